"""A training run from outside: its handle in the SDK and its commands, on files that a driver would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raytide as rt
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import StepResult
from raytide.cli.app import app
from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.clock import VirtualClock
from raytide.core.errors import ConfigError, UsageError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.specs.train import TrainSpec
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run
from raytide.sdk.jobs.train_run import TrainRun

runner = CliRunner()


class One(ApiClient):
    """Knows one job, of that kind and state."""

    def __init__(self, out: Path, state: JobState = JobState.SUCCEEDED, kind: JobKind = JobKind.TRAIN) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.out, self.state, self.kind = out, state, kind
        self.progress: dict[str, float | int | str] = {"step": 2}

    def job(self, job_id: str) -> JobView:
        gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
        spec = JobSpec(kind=self.kind, name="tiny", gang=gang, config={"out": str(self.out)})
        job = Job(id=job_id, spec=spec, user="ada", state=self.state, submitted_at_s=0.0, progress=self.progress)
        return JobView(job=job, position=None, cost_micro_usd=0, price_micro_usd_h=0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    spec = TrainSpec(name="tiny", dataset="none", out=str(tmp_path / "run"), steps=2)
    record = RunLog(spec, VirtualClock(1000.0))
    for step, loss in ((1, 3.0), (2, 2.5)):
        record.step(StepResult(step, loss, 1e-3, 0.5, tokens=64, step_s=0.5, data_s=0.0, world=2, times={"data": 0.0}))
    record.event("broke", step=1, why="rank 1 is gone")
    record.close("done")
    return tmp_path / "run"


def handle(client: ApiClient) -> TrainRun:
    run = Client(client).job("job-1")
    assert isinstance(run, TrainRun)
    return run


def test_a_run_gives_its_metrics_its_result_and_its_picture(out: Path) -> None:
    run = handle(One(out))
    assert [(line["step"], line["loss"]) for line in run.metrics()] == [(1, 3.0), (2, 2.5)]
    assert run.table().column("loss").to_pylist() == [3.0, 2.5]
    assert [event["event"] for event in run.events()] == ["broke"]
    result = run.result()
    assert (result.steps, result.first_loss, result.loss, result.tokens) == (2, 3.0, 2.5, 128)
    assert "rank 1 is gone" in run._repr_html_()
    assert str(run.plot()) == run.plot()._repr_html_()


def test_a_spec_in_a_file_or_a_mapping_becomes_a_run(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = One(out)
    sent: list[Any] = []
    monkeypatch.setattr(ApiClient, "find", lambda name: client)
    monkeypatch.setattr(client, "submit", lambda spec: (sent.append(spec), client.job("job-1"))[1])
    (tmp_path / "t.yaml").write_text(f"{{name: tiny, dataset: none, out: {out}, steps: 2, guard: {{nan: skip}}}}")
    run = rt.train(tmp_path / "t.yaml")
    assert run.wait(timeout_s=5).result().steps == 2
    assert sent[0].config["guard"]["nan"] == "skip"
    with pytest.raises(ConfigError, match="did you mean guard"):
        rt.train({"dataset": "none", "out": str(out), "steps": 2, "gaurd": {}})


def test_a_run_that_has_no_step_yet_has_no_metrics(tmp_path: Path) -> None:
    client = One(tmp_path / "nothing", JobState.QUEUED)
    client.progress = {}
    assert handle(client).metrics() == []
    assert "svg" not in handle(client)._repr_html_()


def test_a_profile_is_asked_for_where_the_run_looks(out: Path) -> None:
    handle(One(out, JobState.RUNNING)).profile(steps=4)
    assert json.loads((out / "profile.json").read_text()) == {"steps": 4}


def test_other_jobs_have_the_plain_handle(out: Path) -> None:
    run = Client(One(out, kind=JobKind.DATA)).job("job-1")
    assert type(run) is Run
    assert run.output() == str(out)


def test_the_commands_take_a_directory_or_a_job(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = runner.invoke(app, ["metrics", str(out), "--last", "1"]).stdout.splitlines()
    assert shown[0].split("\t")[:2] == ["STEP", "LOSS"] and shown[1].split("\t")[:2] == ["2", "2.5"]
    monkeypatch.setattr(ApiClient, "find", lambda name: One(out))
    assert [line["step"] for line in json.loads(runner.invoke(app, ["metrics", "job-1", "--json"]).stdout)] == [1, 2]
    for name, start in (("a.svg", b"<svg "), ("a.html", b"<!doctype html>"), ("a.png", b"\x89PNG")):
        done = runner.invoke(app, ["plot", "job-1", "-o", str(tmp_path / name)])
        assert done.stdout == f"{tmp_path / name} shows 2 steps\n"
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "next 2 steps are profiled" in runner.invoke(app, ["profile", str(out), "--steps", "2"]).stdout
    assert (out / "profile.json").exists()


def test_what_cannot_be_drawn_says_what_can(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = runner.invoke(app, ["plot", str(out), "-o", "a.pdf"]).exception
    assert isinstance(error, UsageError) and ".svg" in error.hint
    monkeypatch.setattr(ApiClient, "find", lambda name: One(out, kind=JobKind.DATA))
    error = runner.invoke(app, ["metrics", "job-1"]).exception
    assert isinstance(error, UsageError) and "is a data job" in str(error)


@pytest.mark.parametrize("what", ["cluster", "train", "data", "serve"])
def test_every_spec_has_a_schema(what: str) -> None:
    schema = json.loads(runner.invoke(app, ["schema", what]).stdout)
    assert schema["additionalProperties"] is False
    assert schema["properties"]
