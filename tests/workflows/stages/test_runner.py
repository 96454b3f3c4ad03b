"""Stages as jobs: what is submitted, and what becomes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.fake_api import FakeApi

from raytide.core.errors import ConfigError
from raytide.core.objects.job import JobKind, JobState
from raytide.core.specs.script import ATTEMPTS, FAILURES, ScriptSpec
from raytide.workflows.spec import StageSpec
from raytide.workflows.stages.base import StageTask
from raytide.workflows.stages.runner import ApiRunner, job_spec


def task_of(kind: str, spec: dict[str, Any], out: str = "/out/s/key", **options: Any) -> StageTask:
    stage = StageSpec.parse({"kind": kind, "spec": {}, **options}, where="stage")
    return StageTask("flow-s", stage, spec, out, "run-1-s-1", labels={"flow": "flow", "stage": "s"})


def test_a_training_is_a_job_with_the_flow_s_folder_and_the_stage_s_nodes_and_budget() -> None:
    task = task_of("train", {"dataset": "/d", "steps": 3}, gang={"cpus": 2, "nodes": [1, 2]}, budget_usd=5)
    job = job_spec(task, "")
    assert job.kind is JobKind.TRAIN
    assert job.config["out"] == "/out/s/key"
    assert job.gang.shapes[0].resources == {"CPU": 2.0}
    assert job.budget_usd == 5
    assert "team" not in job.model_fields_set, "the token's own"


def test_a_script_gets_its_parameters_and_its_folder_and_the_working_directory() -> None:
    job = job_spec(task_of("script", {"command": ["python", "a.py"], "params": {"lr": 0.5, "name": "x y"}}), "digest")
    script = ScriptSpec.parse(job.config, where="job")
    assert script.command == ("python", "a.py", "--lr=0.5", "--name=x y")
    assert script.env["RAYTIDE_STAGE_OUT"] == "/out/s/key"
    assert script.package == "digest"


def test_an_evaluation_is_a_script_of_raytide_s_own() -> None:
    job = job_spec(task_of("eval", {"model": "/m", "dataset": "/d"}), "digest")
    command = ScriptSpec.parse(job.config, where="job").command
    assert command[:3] == ("python", "-m", "raytide.workflows.stages.evaluation")
    assert json.loads(command[3]) == {"model": "/m", "dataset": "/d"}


def test_a_wrong_spec_is_an_error_that_names_the_stage() -> None:
    with pytest.raises(ConfigError, match="flow-s: unknown key stepss"):
        job_spec(task_of("train", {"dataset": "/d", "steps": 1, "stepss": 3}), "")


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def test_metrics_are_what_the_job_reported_and_what_the_script_wrote_which_counts_more(
    tmp_path: Path, api: FakeApi
) -> None:
    task = task_of("script", {"command": ["true"]}, out=str(tmp_path))
    runner = ApiRunner(api)
    job = runner.submit(task)
    assert runner.submit(task) == job
    assert runner.look(task, job).status == "running"
    (tmp_path / "metrics.json").write_text(json.dumps({"loss": 1.5, "note": "text", "is_good": True, "nan": math.nan}))
    api.end(job, loss=2.0, size=3.0, attempts=40.0, stage="attempt 1", **{ATTEMPTS: 1, FAILURES: 0})
    report = runner.look(task, job)
    assert report.status == "done"
    assert report.metrics == {"loss": 1.5, "size": 3.0, "attempts": 40.0}, "the driver's own counts are no metrics"
    assert report.outputs == {"out": str(tmp_path), "job": job}


@pytest.mark.parametrize(("text", "why"), [("{half", "is not JSON"), ("[1]", "is no mapping")])
def test_a_broken_metrics_file_fails_the_stage_and_is_named(tmp_path: Path, api: FakeApi, text: str, why: str) -> None:
    task = task_of("script", {"command": ["true"]}, out=str(tmp_path))
    job = ApiRunner(api).submit(task)
    (tmp_path / "metrics.json").write_text(text)
    api.end(job)
    report = ApiRunner(api).look(task, job)
    assert report.status == "failed"
    assert why in report.reason
    assert "metrics.json" in report.reason


def test_a_job_that_failed_or_was_stopped_says_why(api: FakeApi) -> None:
    task = task_of("script", {"command": ["true"]})
    job = ApiRunner(api).submit(task)
    for state in (JobState.FAILED, JobState.STOPPED):
        api.end(job, state, "because")
        report = ApiRunner(api).look(task, job)
        assert (report.status, report.reason) == ("failed", f"{job} {state}: because")


def test_the_curve_of_a_training_is_that_of_its_log_and_of_a_script_its_last_report(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, script = task_of("train", {"dataset": "/d", "steps": 3}), task_of("script", {"command": ["true"]})
    runner = ApiRunner(api)
    first = runner.submit(train)
    assert runner.look(train, first, "loss").curve == (), "before its first step"
    api.end(first, JobState.RUNNING, step=2.0)
    logged = {"steps": [1, 2], "values": {"loss": [3.0, None], "lr": [1.0, 1.0]}}
    monkeypatch.setattr(api, "call", lambda *_, **__: logged)
    (one, two) = runner.look(train, first, "loss").curve
    assert one == (1, 3.0)
    assert two[0] == 2
    assert math.isnan(two[1])
    assert runner.look(train, first, "unknown").curve == ()
    other = api.add()
    assert runner.look(script, other, "loss").curve == ()
    api.end(other, JobState.RUNNING, step=7.0, loss=2.25)
    assert runner.look(script, other, "loss").curve == ((7, 2.25),)
