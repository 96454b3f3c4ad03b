"""`raytide run`: what a user may write, and what is printed while the script runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.control.client import ApiClient
from raytide.control.views import JobView, LogPart, Waiting
from raytide.core.errors import ClusterError, RaytideError, UsageError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.sdk.jobs.job_run import Run
from raytide.sdk.jobs.script import command_of, pairs_of, parse_range, parse_shape

runner = CliRunner()

ONE_CPU = Shape(resources={"CPU": 1.0})


class Desk(ApiClient):
    """Takes the submission; each look at the job finds the next of its states and what it printed by then."""

    def __init__(self, *looks: tuple[JobState, str]) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.looks, self.specs, self.packages = list(looks), [], []
        self.deaths = 0

    def upload(self, package: bytes) -> str:
        self.packages.append(package)
        return "0" * 64

    def submit(self, spec: JobSpec, *, key: str | None = None) -> JobView:
        self.specs.append(spec)
        return self._view(JobState.QUEUED)

    def job(self, job_id: str) -> JobView:
        if self.deaths:
            self.deaths -= 1
            raise ClusterError("the API does not answer.")
        state, self.printed = self.looks.pop(0)
        return self._view(state)

    def log_part(self, job_id: str, *, after: str = "", tail: int | None = None) -> LogPart:
        return LogPart(self.printed[int(after or 0) :], str(len(self.printed)), has_more=False)

    def _view(self, state: JobState) -> JobView:
        reason = "rank 0 on node-1 ended with exit code 3" if state is JobState.FAILED else ""
        job = Job("job-1", self.specs[-1], "ana", state, 0.0, reason=reason)
        waiting = Waiting("capacity", "it needs 2 x (8 GPU).") if state is JobState.QUEUED else None
        return JobView(job, None, 0, 0, waiting=waiting)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raytide.cli.jobs.submit._FOLLOW_S", 0.0)
    (tmp_path / "train.py").write_text("pass\n")
    return tmp_path / "train.py"


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk((JobState.QUEUED, ""), (JobState.RUNNING, "step 1\n"), (JobState.SUCCEEDED, "step 1\nstep 2\n"))
    monkeypatch.setattr(ApiClient, "find", lambda _: desk)
    return desk


def test_the_output_is_followed_and_the_wait_goes_to_stderr(script: Path, desk: Desk) -> None:
    done = runner.invoke(app, ["run", "train.py"])
    assert (done.exit_code, done.stdout) == (0, "step 1\nstep 2\n")
    assert "it needs 2 x (8 GPU)." in done.stderr


@pytest.mark.parametrize("command", ["run train.py", "logs -f job-1"])
def test_an_api_that_restarts_does_not_end_it(
    script: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("raytide.sdk.jobs.job_run._POLL_S", 0.0)
    desk.specs.append(JobSpec(kind=JobKind.SCRIPT, name="train", gang=GangSpec(shapes=(ONE_CPU,))))
    desk.deaths = 3
    done = runner.invoke(app, command.split())
    assert (done.exit_code, done.stdout) == (0, "step 1\nstep 2\n")
    desk.deaths, desk.looks = 2, [(JobState.RUNNING, ""), (JobState.SUCCEEDED, "")]
    watched = Run(desk, desk.submit(desk.specs[-1])).updates()
    assert [view.job.state for view in watched] == [JobState.RUNNING, JobState.SUCCEEDED]
    desk.deaths = 1
    monkeypatch.setattr("raytide.sdk.jobs.job_run.AWAY_S", 0.0)
    assert "job-1 keeps running: `raytide logs -f job-1`" in str(runner.invoke(app, command.split()).exception)


def test_of_a_job_that_is_over_nobody_says_that_it_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(job_id: str, **_: object) -> LogPart:
        raise ClusterError("Ray does not answer.", hint="See logs/head.log.")

    monkeypatch.setattr("raytide.sdk.jobs.job_run.AWAY_S", 0.0)
    monkeypatch.setattr(desk, "log_part", away)
    desk.specs.append(JobSpec(kind=JobKind.SCRIPT, name="train", gang=GangSpec(shapes=(ONE_CPU,))))
    desk.looks = [(JobState.FAILED, "")]
    assert str(runner.invoke(app, ["logs", "job-1"]).exception) == "Ray does not answer. See logs/head.log."


def test_a_failed_script_is_a_failed_command(script: Path, desk: Desk) -> None:
    desk.looks = [(JobState.FAILED, "boom\n")]
    done = runner.invoke(app, ["run", "train.py"])
    assert (done.exit_code, done.stdout) == (1, "boom\n")
    assert "exit code 3" in done.stderr


def test_options_before_the_script_are_raytides_and_those_after_it_the_scripts(script: Path, desk: Desk) -> None:
    args = "run --gpus 8 --nodes 1:2 --env A=b=c --spot --tag project=search --nproc-per-node gpu --retries 2"
    runner.invoke(app, [*args.split(), "train.py", "--gpus", "1", "--lr", "3"], catch_exceptions=False)
    (spec,) = desk.specs
    assert spec.kind is JobKind.SCRIPT
    assert (spec.name, spec.is_preemptible, spec.labels) == ("train", False, {"project": "search"})
    labels = {"ray.io/market-type": "spot"}
    assert spec.gang.shapes == (Shape(members=2, min_members=1, resources={"GPU": 8.0}, labels=labels),)
    assert spec.config["command"] == ["python", "train.py", "--gpus", "1", "--lr", "3"]
    assert spec.config["env"] == {"A": "b=c"}
    assert (spec.config["nproc_per_node"], spec.config["retries"], spec.config["package"]) == ("gpu", 2, "0" * 64)


def test_no_wait_says_how_to_follow(script: Path, desk: Desk) -> None:
    assert "raytide logs -f job-1" in runner.invoke(app, ["run", "--no-wait", "train.py"]).stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU:8", Shape(members=1, min_members=1, resources={"GPU": 8})),
        ("2xGPU:8,CPU:16", Shape(members=2, min_members=2, resources={"GPU": 8, "CPU": 16})),
        (
            "1:4xCPU:0.5@zone=a,type=b",
            Shape(members=4, min_members=1, resources={"CPU": 0.5}, labels={"zone": "a", "type": "b"}),
        ),
    ],
)
def test_a_shape_in_one_word(text: str, expected: Shape) -> None:
    assert parse_shape(text) == expected


@pytest.mark.parametrize("text", ["", "2x", "GPU", "GPU:many", "2xGPU:8@zone", "4:2xGPU:1", "GPU:-1"])
def test_what_is_no_shape_is_said_so(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shape(text)


@pytest.mark.parametrize("text", ["two", "1:", "1:x", ":2", "-1", "²"])
def test_a_number_of_nodes_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        parse_range(text, "--nodes")


@pytest.mark.parametrize("text", ["A", "=b"])
def test_a_variable_without_a_value_or_a_name(text: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        pairs_of([text], "--env")


def test_what_runs_on_the_members(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.py").write_text("")
    tool = tmp_path / "a" / "tool"
    tool.write_text("#!/bin/sh\n")
    assert command_of(str(tmp_path / "a" / "train.py"), ["-x"], tmp_path) == ("python", "a/train.py", "-x")
    assert command_of("python", ["-m", "mine"], tmp_path) == ("python", "-m", "mine")
    with pytest.raises(UsageError, match="cannot be executed"):
        command_of(str(tool), [], tmp_path)
    tool.chmod(0o755)
    assert command_of(str(tool), [], tmp_path) == ("./a/tool",)


def test_a_script_may_be_named_from_the_working_directory_and_be_a_link(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "shared.py").write_text("")
    (work / "train.py").symlink_to(tmp_path / "shared.py")
    (tmp_path / "alias").symlink_to(work)
    assert command_of("train.py", [], work) == ("python", "train.py")
    assert command_of(str(work / "train.py"), [], work) == ("python", "train.py")
    (work / "real.py").write_text("")
    assert command_of(str(tmp_path / "alias" / "real.py"), [], work) == ("python", "real.py")


@pytest.mark.parametrize("option", ["--gpus 1", "--cpus 1", "--nodes 2", "--labels a=b", "--spot", "--memory 1GiB"])
def test_a_shape_and_a_part_of_one_exclude_each_other(script: Path, desk: Desk, option: str) -> None:
    done = runner.invoke(app, ["run", *option.split(), "--shape", "GPU:8", "train.py"])
    assert isinstance(done.exception, UsageError) and "--shape cannot be combined" in str(done.exception)
    assert desk.packages == []


@pytest.mark.parametrize("script", ["gone.py", "no-such-command", "./gone"])
def test_a_script_that_is_not_there_is_refused_before_anything_is_sent(script: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a file nor a command"):
        command_of(script, [], tmp_path)


def test_a_script_outside_of_what_is_uploaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other").mkdir()
    with pytest.raises(RaytideError, match="not below the working directory"):
        command_of(str(tmp_path / "train.py"), [], tmp_path / "other")


def test_an_option_of_raytide_s_after_the_script_is_said_to_be_the_script_s(script: Path, desk: Desk) -> None:
    done = runner.invoke(app, ["run", "train.py", "--team", "blue", "--lr", "3"])
    assert done.exit_code == 0
    assert "--team after the script is passed to it" in done.stderr and "--lr" not in done.stderr
    assert desk.specs[0].team == "default"


@pytest.mark.parametrize("nodes", ["0", "4:2", "0:2"])
def test_nodes_are_a_range_from_one_on(nodes: str) -> None:
    with pytest.raises(UsageError, match=f"--nodes {nodes} is not a range from 1 upwards"):
        parse_range(nodes, "--nodes")


@pytest.mark.parametrize(
    ("command", "spec", "kind"),
    [
        ("train", {"dataset": "tokens", "out": "model", "steps": 2}, JobKind.TRAIN),
        ("data build", {"inputs": ["text"], "out": "tokens"}, JobKind.DATA),
    ],
)
def test_the_options_for_nodes_replace_the_gang_of_the_file(
    desk: Desk, tmp_path: Path, command: str, spec: dict[str, object], kind: JobKind
) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    done = runner.invoke(app, [*command.split(), str(tmp_path / "spec.yaml"), "--cpus", "3", "--no-wait"])
    assert done.stdout == "job-1 is queued; `raytide logs -f job-1` follows it\n", done.exception
    (job,) = desk.specs
    assert job.kind is kind
    assert job.gang.shapes[0].resources == {"CPU": 3.0}


def test_trainings_and_scripts_take_packages_in_the_same_words_and_builds_none(script: Path, desk: Desk) -> None:
    (script.parent / "needs.txt").write_text("# pinned\npeft==0.17 # adapters\n\n")
    (script.parent / "train.yaml").write_text("{dataset: /data, out: /out, steps: 1, pip: [einops]}")
    words = ["--pip", "trl", "--requirements", "needs.txt", "--no-wait"]
    for command in (["run", *words, "train.py"], ["train", "train.yaml", *words]):
        done = runner.invoke(app, command)
        assert done.exit_code == 0, done.output
    assert [spec.config["pip"] for spec in desk.specs] == [["trl", "peft==0.17"]] * 2
    assert runner.invoke(app, ["train", "train.yaml", "--no-wait"]).exit_code == 0
    assert desk.specs[-1].config["pip"] == ["einops"]
    assert runner.invoke(app, ["data", "build", "train.yaml", "--pip", "trl"]).exit_code == 2
    assert desk.specs[-1].config["image"] is None
    image = ["--image", "registry.example.com/train:1", "--no-wait"]
    for command in (["run", *image, "train.py"], ["train", "train.yaml", *image]):
        assert runner.invoke(app, command).exit_code == 0
        assert (desk.specs[-1].config["image"], desk.specs[-1].config["pip"]) == (image[1], [])
    both = runner.invoke(app, ["run", *image, "--pip", "trl", "train.py"])
    assert "image cannot be combined with pip" in str(both.exception)
    lacking = runner.invoke(app, ["train", "train.yaml", "--requirements", "none.txt"])
    assert isinstance(lacking.exception, UsageError)
    refused = runner.invoke(app, ["train", "train.yaml", "--pip", "-i x"])
    assert "no requirement such as name==1.0" in str(refused.exception)


@pytest.mark.parametrize("words", [["--pip", "trl"], ["--image", "registry.example.com/train:1"]])
def test_packages_of_a_training_do_not_name_a_team(script: Path, desk: Desk, words: list[str]) -> None:
    (script.parent / "train.yaml").write_text("{dataset: /data, out: /out, steps: 1}")
    assert runner.invoke(app, ["train", "train.yaml", *words, "--no-wait"]).exit_code == 0
    assert "team" not in desk.specs[-1].model_fields_set
