"""Commands without a cluster fail clearly, and those that follow something show it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import raytide
from raytide.cli import demo
from raytide.cli.app import COMMANDS, app
from raytide.cli.jobs import queue, submit
from raytide.cli.options import _with_zone
from raytide.control.accounting.final_accounting import Closed
from raytide.control.bootstrap.cloud_launch import SetUpStep
from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.control.client import ApiClient
from raytide.control.views import CostReport, JobView, LogPart, Waiting
from raytide.core.errors import ClusterError, ConfigError, NotFoundError, RaytideError, UsageError
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType
from raytide.core.objects.snapshot import MarketConstraint
from raytide.ledger.reconcile import Difference
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run, explain

runner = CliRunner()
NOWHERE = "http://127.0.0.1:9"
"""Nothing listens at the discard port."""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API", "TOKEN", "CLUSTER_NAME"):
        monkeypatch.delenv(f"RAYTIDE_{name}", raising=False)
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path))


def error_of(*args: str) -> RaytideError:
    error = runner.invoke(app, args).exception
    assert isinstance(error, RaytideError)
    return error


def test_the_version_and_the_short_help() -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"raytide {raytide.__version__}\n"
    assert runner.invoke(app, ["-h"]).stdout == runner.invoke(app, ["--help"]).stdout


def test_no_command_is_described_by_half_a_sentence() -> None:
    for args in ([], ["data"], ["autoscaler"], ["simulate"]):
        shown = runner.invoke(app, [*args, "--help"], terminal_width=80).stdout
        assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize(
    "args", ["quota set red GPU=inf", "quota set red GPU", "budget set red nan", "budget set red -- -1"]
)
def test_limits_are_finite(args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiClient, "find", lambda _: ApiClient(NOWHERE, ""))
    monkeypatch.setattr(ApiClient, "teams", lambda _: [])
    assert isinstance(error_of(*args.split()), UsageError)


@pytest.mark.parametrize("command", ["status", "cost", "ps", "why job-1", "logs job-1", "serve", "autoscaler explain"])
def test_without_a_cluster_the_hint_is_how_to_start_one(command: str) -> None:
    error = error_of(*command.split())
    assert isinstance(error, NotFoundError)
    assert "raytide up --local" in error.hint
    assert "raytide up --local --name other" in error_of("status", "--cluster", "other").hint


def test_down_says_when_the_books_do_not_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = CostReport((), 0, 0, 0, 0)
    closed = Closed((), nothing, (Difference("node-7", 3_000_000, 1_000_000, "another amount"),))
    monkeypatch.setattr("raytide.control.bootstrap.local.down", lambda name: closed)
    printed = runner.invoke(app, ["down"]).stdout
    assert "node-7: booked 1000000 micro-dollars, billed 3000000: another amount" in printed
    shown = json.loads(runner.invoke(app, ["down", "--json"]).stdout)
    assert [difference["node_id"] for difference in shown["differences"]] == ["node-7"]


def test_down_of_what_is_not_there_says_so() -> None:
    assert runner.invoke(app, ["down", "--name", "typo"]).stdout == "there is no cluster typo; nothing was done\n"
    assert json.loads(runner.invoke(app, ["down", "--cluster", "typo", "--json"]).stdout)["state"] == "absent"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["up"], "`raytide up --local`"),
        (["up", "--dry-run"], "`raytide up cluster.yaml --dry-run`"),
        (["up", "mine.yaml", "--local", "--dry-run"], "`raytide up mine.yaml --dry-run`"),
        (["up", str(DEFAULT_CONFIG)], f"`raytide up {DEFAULT_CONFIG} --local`"),
    ],
)
def test_an_up_that_names_no_place_says_the_whole_command(args: list[str], said: str) -> None:
    error = error_of(*args)
    assert isinstance(error, UsageError)
    assert said in error.hint


def test_a_dry_run_prints_what_it_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [SetUpStep("head", "buy", "{}"), SetUpStep("l4", "run", "ray start")]
    monkeypatch.setattr("raytide.control.bootstrap.cloud_launch.dry_run", lambda config, name, **_: steps)
    assert runner.invoke(app, ["up", "c.yaml", "--dry-run"]).stdout == "head: buy {}\nl4: run ray start\n"
    shown = json.loads(runner.invoke(app, ["up", "c.yaml", "--dry-run", "--json"]).stdout)
    assert shown[1] == {"machine": "l4", "what": "run", "text": "ray start"}


@pytest.mark.parametrize("replicas", [(3, 1), (0, 0)])
def test_impossible_replicas_are_refused_before_anything_is_sent(replicas: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        Client(ApiClient(NOWHERE, "")).serve("model", replicas=replicas)


def asked(monkeypatch: pytest.MonkeyPatch, *args: str) -> ServeSpec:
    """Returns the spec that `raytide serve` sends."""
    sent: list[ServeSpec] = []

    def send(self: Client, spec: ServeSpec) -> None:
        sent.append(spec)
        raise RaytideError("sent", hint="")

    monkeypatch.setattr(Client, "serve", send)
    monkeypatch.setattr(ApiClient, "find", lambda cluster: ApiClient(NOWHERE, ""))
    error = error_of("serve", *args)
    assert sent, error
    return sent[0]


def test_serve_takes_what_replicas_promise_and_what_each_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = asked(monkeypatch, str(tmp_path / "Mine"), "--replicas", "1:4", "--slo-ttft-s", "2", "--slo-target", "0.95")
    assert (spec.name, spec.model, spec.resources) == ("mine", str(tmp_path / "Mine"), {"CPU": 1.0})
    assert spec.replicas == Replicas(min=1, max=4, slo_ttft_s=2.0, slo_target=0.95)
    assert asked(monkeypatch, "m", "--gpus", "2", "--cpus", "8").resources == {"GPU": 2.0, "CPU": 8.0}


def test_options_of_serve_go_before_what_the_file_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("{name: m, model: /m, resources: {GPU: 1}, replicas: {min: 2, max: 3, slo_ttft_s: 4}}")
    assert asked(monkeypatch, str(file)).replicas == Replicas(min=2, max=3, slo_ttft_s=4)
    spec = asked(monkeypatch, str(file), "--name", "n", "--slo-target", "0.9", "--target-ongoing", "3")
    assert (spec.name, spec.resources) == ("n", {"GPU": 1.0})
    assert asked(monkeypatch, str(file), "--cpus", "8").resources == {"GPU": 1.0, "CPU": 8.0}
    assert asked(monkeypatch, str(file), "--gpus", "0").resources == {"CPU": 1.0}
    assert spec.replicas == Replicas(min=2, max=3, slo_ttft_s=4, slo_target=0.9, target_ongoing=3)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    """The list is shown without importing a command."""
    command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    assert command.get_short_help_str(limit=1000) == COMMANDS[name][1].rstrip(".") + "."


def test_serve_explains_its_engine_without_a_cluster() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["serve", "/models/mine", "--gpus", "H100:1", "--explain"])
    assert (
        done.stdout == "mine runs on the vllm engine: its replicas have GPUs, and vLLM's kernels are made for them.\n"
    )
    done = runner.invoke(app, ["serve", "/models/mine", "--explain", "--json"])
    assert json.loads(done.stdout)["engine"] == "native"


@pytest.mark.parametrize(
    "args",
    [
        ["--replicas", "1:4"],
        ["--gpus", "2"],
        ["--delete", "m", "--name", "n"],
        ["m", "--delete", "m"],
        ["--weights", "/w"],
        ["m", "--weights", "/w", "--gpus", "1"],
    ],
)
def test_options_of_serve_that_would_do_nothing_are_refused(args: list[str]) -> None:
    assert isinstance(error_of("serve", *args), UsageError)


def test_a_promise_without_a_time_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="slo_target needs slo_ttft_s"):
        Client(ApiClient(NOWHERE, "")).serve("model", slo_target=0.9)


def test_resources_of_serve_do_not_name_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "team" not in asked(monkeypatch, "m", "--gpus", "2", "--spot").model_fields_set
    assert asked(monkeypatch, "m", "--gpus", "2", "--team", "red").team == "red"


def view(state: JobState, **progress: float | int | str) -> JobView:
    spec = JobSpec(
        kind=JobKind.TRAIN, name="tiny", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)), config={"out": "/out"}
    )
    job = Job(id="job-1", spec=spec, user="ada", state=state, submitted_at_s=0.0, progress=progress)
    return JobView(job=job, position=None, cost_micro_usd=0, price_micro_usd_h=0)


class Script(ApiClient):
    """Answers with these views, one after the other; then the user interrupts."""

    def __init__(self, *views: JobView) -> None:
        super().__init__(NOWHERE, "")
        self._views: Iterator[JobView] = iter(views)

    def job(self, job_id: str) -> JobView:
        try:
            return next(self._views)
        except StopIteration:
            raise KeyboardInterrupt from None


def _follow(run: Run) -> None:
    submit.finish(run, partial(submit.follow, run, quiet=False), wait=True, json=False)


def test_a_job_is_followed_for_as_long_as_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each look a day has passed."""
    days = count()
    clock = SimpleNamespace(monotonic=lambda: 86_400.0 * next(days), sleep=lambda _: None, time=time.time)
    monkeypatch.setattr("raytide.sdk.jobs.job_run.time", clock)
    done = view(JobState.SUCCEEDED, step=3, model="/out/model")
    client = Script(view(JobState.RUNNING, step=1), view(JobState.RUNNING, step=2), done, done)
    _follow(Run(client, view(JobState.QUEUED)))
    assert capsys.readouterr().out.splitlines()[-1] == "train tiny: /out/model"


def test_a_followed_job_shows_its_numbers_and_where_the_result_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.sdk.jobs.job_run._POLL_S", 0.0)
    done = view(JobState.SUCCEEDED, step=2, model="/out/model")
    client = Script(view(JobState.RUNNING, step=1, restarts=0, loss=2.34567), done, done)
    _follow(Run(client, view(JobState.QUEUED)))
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["job-1 running: step 1, loss 2.346", "job-1 is succeeded.", "train tiny: /out/model"]


@pytest.mark.parametrize(
    ("state", "at_s", "shown"),
    [
        (JobState.RUNNING, 400.0, "in 53m20s"),
        (JobState.RUNNING, 3700.0, "1m40s late"),
        (JobState.SUCCEEDED, 3000.0, "kept"),
        (JobState.STOPPED, 3000.0, "-"),
    ],
)
def test_ps_shows_how_long_there_is_until_a_deadline(state: JobState, at_s: float, shown: str) -> None:
    gang = GangSpec(shapes=(Shape(resources={"CPU": 1}),))
    spec = JobSpec.parse({"kind": "train", "name": "j", "gang": gang, "deadline": "1970-01-01T01:00Z"}, where="job")
    job = Job("job-1", spec, "ana", state, 0.0, ended_at_s=None if state is JobState.RUNNING else at_s)
    assert queue._due(job, at_s) == shown


@pytest.mark.parametrize(
    ("state", "progress", "shown"),
    [
        (JobState.RUNNING, {"left_s": 200.0, "step_at_s": 95.0}, "3m15s"),
        (JobState.RUNNING, {"left_s": 3.0, "step_at_s": 95.0}, "0s"),
        (JobState.RUNNING, {}, "-"),
        (JobState.SUCCEEDED, {"left_s": 200.0, "step_at_s": 95.0}, "-"),
    ],
)
def test_ps_shows_how_long_a_run_still_takes(state: JobState, progress: dict[str, float], shown: str) -> None:
    assert queue._left(replace(view(state).job, progress=progress), 100.0) == shown


def test_a_deadline_without_a_zone_is_meant_where_it_is_said() -> None:
    said = _with_zone("2026-11-22T08:00")
    assert said is not None and datetime.fromisoformat(said) == datetime(2026, 11, 22, 8).astimezone()
    assert (_with_zone("8h"), _with_zone(None)) == ("8h", None)


def test_what_is_said_of_a_job_ends_with_how_its_deadline_stands() -> None:
    stance = MarketConstraint((CapacityType.SPOT,), False, 1.0, 1.0, 1.0, "on spot: 3.1 h of work")
    assert explain(replace(view(JobState.RUNNING), stance=stance)).endswith("Deadline: on spot: 3.1 h of work.")
    waits = Waiting("deadline", "it waits for spot: 3.1 h of work.", "Nothing to do: it starts in time.")
    said = explain(replace(view(JobState.QUEUED), stance=stance, waiting=waits))
    assert said.count("3.1 h of work") == 1


def test_all_that_are_named_are_stopped_whatever_is_wrong_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: ApiClient, job_id: str) -> JobView:
        if job_id == "job-9":
            raise NotFoundError("there is no job job-9.")
        return view(JobState.RUNNING if job_id == "job-1" else JobState.STOPPED)

    monkeypatch.setattr(ApiClient, "find", lambda _: ApiClient(NOWHERE, ""))
    monkeypatch.setattr(ApiClient, "stop", stop)
    done = runner.invoke(app, ["stop", "job-1", "job-9", "job-2"])
    assert done.stdout == "job-1 is being stopped\njob-2 is stopped\n"
    assert isinstance(done.exception, NotFoundError)
    assert runner.invoke(app, ["stop", "job-9", "--json"]).stdout == ""
    assert isinstance(json.loads(runner.invoke(app, ["stop", "job-1", "--json"]).stdout), dict)
    assert len(json.loads(runner.invoke(app, ["stop", "job-1", "job-2", "--json"]).stdout)) == 2


def test_whoever_stops_following_is_told_that_the_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _follow(Run(Script(), view(JobState.RUNNING)))
    said = capsys.readouterr().err
    assert "job-1 keeps running" in said
    assert "raytide stop job-1" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_whose_terminal_closes_still_cleans_up(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[bool] = []

    def run(**options: object) -> int:
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(True)
        return 0

    monkeypatch.setattr(demo, "run", run)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert runner.invoke(app, ["demo"]).exit_code == 128 + number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert cleaned == [True]


class Watched(ApiClient):
    """Two looks at the jobs, and one log that grows until its job is over; then the user interrupts."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, "")
        dearer = replace(view(JobState.RUNNING), cost_micro_usd=9_000_000)
        self.pages = [[view(JobState.RUNNING)], [dearer], None, [dearer], [view(JobState.SUCCEEDED)]]
        self.states = [JobState.RUNNING, JobState.RUNNING, JobState.SUCCEEDED]
        self.texts = ["step 1\n", "step 1\nstep 2\n"]

    def jobs(self, *, limit: int = 100, offset: int = 0, active: bool = False) -> list[JobView]:
        if not self.pages:
            raise KeyboardInterrupt
        if (page := self.pages.pop(0)) is None:
            raise ClusterError("the API does not answer.")
        return page

    def job(self, job_id: str) -> JobView:
        return view(self.states.pop(0))

    def log_part(self, job_id: str, *, after: str = "", tail: int | None = None) -> LogPart:
        text = self.texts.pop(0)
        lines = text.splitlines(keepends=True)
        at = int(after or 0) if tail is None else len("".join(lines[:-tail]))
        return LogPart(text[at:], str(len(text)), has_more=False)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiClient, "find", lambda _: Watched())
    monkeypatch.setattr(queue, "_FOLLOW_S", 0.0)
    monkeypatch.setattr("raytide.sdk.jobs.job_run._POLL_S", 0.0)


@pytest.mark.usefixtures("watched")
def test_a_watched_list_is_shown_again_when_a_job_got_on_and_outlives_the_api() -> None:
    shown = runner.invoke(app, ["ps", "-w"]).stdout
    assert [line.split("\t")[4] for line in shown.splitlines() if line.startswith("job-1")] == ["running", "succeeded"]


def test_a_watched_list_ends_when_the_api_stays_away_which_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client, times = Watched(), iter([0.0, 1.0, 59.0, 61.0])
    client.pages = [client.pages[0], None, None, None, None]
    monkeypatch.setattr(ApiClient, "find", lambda _: client)
    monkeypatch.setattr(queue, "time", SimpleNamespace(time=time.time, sleep=lambda _: None, monotonic=times.__next__))
    done = runner.invoke(app, ["ps", "-w"])
    assert isinstance(done.exception, ClusterError)
    assert done.stderr.count("the API does not answer") == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), "the newest 2; `--limit` shows more, `--active` only those that have not ended\n"),
        (("--active",), "the newest 2; `--limit` shows more\n"),
        (("--limit", "3"), ""),
    ],
)
def test_a_list_that_may_not_be_all_says_what_shows_more(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], said: str
) -> None:
    client = Watched()
    client.pages = [[view(JobState.RUNNING)] * 2]
    monkeypatch.setattr(ApiClient, "find", lambda _: client)
    assert runner.invoke(app, ["ps", "--limit", "2", *asked]).stderr == said


def test_who_lists_as_many_jobs_as_are_ever_shown_is_not_told_to_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Watched()
    client.pages = [[view(JobState.RUNNING)] * 1000]
    monkeypatch.setattr(ApiClient, "find", lambda _: client)
    assert runner.invoke(app, ["ps", "--limit", "1000", "--active"]).stderr == "the newest 1000\n"


@pytest.mark.usefixtures("watched")
def test_a_followed_log_is_printed_to_its_last_line_and_each_line_once() -> None:
    assert runner.invoke(app, ["logs", "-f", "job-1"]).stdout == "step 1\nstep 2\n"
    assert runner.invoke(app, ["logs", "job-1"]).stdout == "step 1\n"
    assert runner.invoke(app, ["logs", "-f", "-n", "1", "job-1"]).stdout == "step 1\nstep 2\n"
