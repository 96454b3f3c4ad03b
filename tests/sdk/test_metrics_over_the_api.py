"""The metrics of a run whose directory this machine does not have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.trainer.run_log import history
from raytide.actors.trainer.run_log.curve import CurveReader
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import StepResult
from raytide.control.client import ApiClient
from raytide.control.views import JobView, to_json
from raytide.core.clock import VirtualClock
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.specs.train import TrainSpec
from raytide.sdk.client import Client
from raytide.sdk.jobs.train_run import TrainRun, from_curves


class Elsewhere(ApiClient):
    """Knows a training job whose directory only the API can read."""

    def __init__(self, out: Path) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.out = out

    def job(self, job_id: str) -> JobView:
        gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
        config: dict[str, object] = {"out": "/not/here", "steps": 4}
        spec = JobSpec(kind=JobKind.TRAIN, name="tiny", gang=gang, config=config)
        job = Job(id=job_id, spec=spec, user="ada", state=JobState.RUNNING, submitted_at_s=0.0, progress={"step": 3})
        return JobView(job=job, position=None, cost_micro_usd=0, price_micro_usd_h=0)

    def call(self, method: str, path: str, body: object = None, query: Any = None) -> Any:
        assert (method, path) == ("GET", "/v1/jobs/job-1/metrics")
        return to_json(CurveReader(str(self.out)).read(query["points"]))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    record = RunLog(TrainSpec(name="tiny", dataset="none", out=str(tmp_path), steps=4), VirtualClock(1000.0))
    for step, loss in ((1, 3.0), (2, math.nan), (3, 2.5)):
        times = {"data": 0.1, "forward": 0.3}
        record.step(StepResult(step, loss, 1e-3, 0.5, tokens=64, step_s=0.5, data_s=0.1, world=2, times=times))
    record.event("broke", step=2, why="rank 1 is gone")
    return tmp_path


def test_they_are_those_of_its_files(out: Path) -> None:
    run = Client(Elsewhere(out)).job("job-1")
    assert isinstance(run, TrainRun)
    assert [step["step"] for step in run.metrics()] == [1, 2, 3]
    assert [step.get("loss") for step in run.metrics()] == [3.0, None, 2.5], "JSON has no NaN"
    assert [event["why"] for event in run.events()] == ["rank 1 is gone"]
    mine, theirs = run.metrics()[0], history.read(str(out)).steps[0]
    assert {name: theirs[name] for name in mine} == mine
    assert mine["times"] == {"data": 0.1, "forward": 0.3}


def test_the_curves_and_the_glance_need_no_file(out: Path) -> None:
    run = Client(Elsewhere(out)).job("job-1")
    assert "rank 1 is gone" in run._repr_html_()
    glance = run.glance(is_whole=True)
    assert (glance.done, glance.total) == (3.0, 4.0)
    assert list(glance.curves["loss"]) == [3.0, 2.5]
    assert "<svg " in glance.as_html() and "75%" in glance.as_html()


def test_columns_become_lines_again(out: Path) -> None:
    steps = from_curves(CurveReader(str(out)).read()).steps
    assert steps[2]["loss"] == 2.5 and steps[2]["world"] == 2
