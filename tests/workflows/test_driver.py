"""The driver: it stores and reports, goes on where another one was killed, and begins cycles when it is time."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import EndpointConnectionError
from tests.workflows.fake_api import FakeApi
from tests.workflows.test_planner import flow_of

from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError
from raytide.core.objects.job import JobState
from raytide.workflows.driver import FAILED, STOPPED, FlowDriver, StateFile, begins_because, next_time_s
from raytide.workflows.spec import FlowSpec, ScheduleSpec

NOON_S = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def api() -> FakeApi:
    made = FakeApi()
    made.add()  # the flow's own job
    return made


def driver_of(flow: FlowSpec, api: FakeApi, clock: VirtualClock | None = None, job: str = "job-1") -> FlowDriver:
    return FlowDriver(flow, "run", job, api, clock or VirtualClock(NOON_S), say=lambda line: None)


def chain(tmp_path: Path, **more: Any) -> FlowSpec:
    return flow_of({"a": {}, "b": {"needs": ["a"]}}, out=str(tmp_path / "out"), **more)


def test_each_stage_is_a_job_and_the_state_is_reported_and_stored(tmp_path: Path, api: FakeApi) -> None:
    flow = chain(tmp_path)
    driver = driver_of(flow, api)
    assert driver.tick() is None
    assert api.jobs_by_id["job-2"].spec.labels == {"flow": "flow", "stage": "a"}
    assert api.jobs_by_id["job-1"].progress["stage"] == "a"
    api.end("job-2", size=3.0)
    assert driver.tick() is None
    assert api.jobs_by_id["job-3"].spec.name == "flow-b"
    api.end("job-3")
    assert driver.tick() == 0
    stored = StateFile(flow, "run").load()
    assert stored is not None
    assert stored.stages["a"].metrics == {"size": 3.0}
    assert api.jobs_by_id["job-1"].progress["stage"] == "2 done"


def test_a_new_driver_goes_on_from_the_stored_state(tmp_path: Path, api: FakeApi) -> None:
    flow = chain(tmp_path)
    driver_of(flow, api).tick()
    api.end("job-2")
    again = driver_of(flow, api)
    assert again.tick() is None
    assert list(api.jobs_by_id) == ["job-1", "job-2", "job-3"]


def test_a_failed_flow_ends_with_its_exit_code_and_another_job_resumes_it(tmp_path: Path, api: FakeApi) -> None:
    flow = chain(tmp_path)
    driver = driver_of(flow, api)
    driver.tick()
    api.end("job-2", JobState.FAILED, "it broke")
    assert driver.tick() == FAILED
    assert driver_of(flow, api).tick() == FAILED, "the same job is not a resume"
    own = api.add()
    resumed = driver_of(flow, api, job=own)
    assert resumed.tick() is None
    assert api.jobs_by_id["job-4"].spec.name == "flow-a"


def test_a_driver_that_is_moved_leaves_its_stages_and_one_that_is_stopped_ends_them(
    tmp_path: Path, api: FakeApi
) -> None:
    for stops, left in ((False, []), (True, ["job-2"])):
        driver = driver_of(chain(tmp_path), api)
        driver.tick()
        api.jobs_by_id["job-1"] = replace(api.jobs_by_id["job-1"], stop_requested=stops)
        driver.stop()
        assert driver.run() == STOPPED
        assert api.stopped == left


def test_a_flow_that_was_stopped_goes_on_with_what_was_stopped_when_it_is_resumed(tmp_path: Path, api: FakeApi) -> None:
    flow = chain(tmp_path)
    driver = driver_of(flow, api)
    driver.tick()
    api.jobs_by_id["job-1"] = replace(api.jobs_by_id["job-1"], stop_requested=True)
    driver.stop()
    driver.run()
    assert "it was stopped with the flow" in api.jobs_by_id["job-1"].progress["flow/a"]
    api.end("job-2", JobState.STOPPED, "it was asked to stop")
    resumed = driver_of(flow, api, job=api.add())
    assert resumed.tick() is None
    assert api.jobs_by_id["job-4"].spec.name == "flow-a"


def test_a_flow_whose_stages_were_stopped_for_it_goes_on_with_them_when_it_is_resumed(
    tmp_path: Path, api: FakeApi
) -> None:
    space = {"env.LR": {"choices": ["0.1", "0.2"]}}
    sweep = {
        "spec": {"command": ["true"], "env": {"LR": "0"}},
        "sweep": {"space": space, "trials": 1, "metric": "loss"},
    }
    flows: Any = (({"a": {}}, "flow-a"), ({"b": {"retries": 2}}, "flow-b"), ({"a": sweep}, "flow-a-0"))
    for number, (stages, name) in enumerate(flows):
        flow = flow_of(stages, out=str(tmp_path / str(number)))
        own = api.add()
        driver_of(flow, api, job=own).tick()
        stage = f"job-{len(api.jobs_by_id)}"
        assert api.jobs_by_id[stage].spec.name == name
        api.end(stage, JobState.STOPPED, "stopped on request")  # the driver had lost its node, and did not see it
        resumed = driver_of(flow, api, job=api.add())
        assert resumed.tick() is None
        assert api.jobs_by_id[f"job-{len(api.jobs_by_id)}"].spec.name == name
        assert resumed.tick() is None


def test_a_resumed_flow_waits_for_a_stopped_stage_that_still_saves_its_state(tmp_path: Path, api: FakeApi) -> None:
    flow = flow_of({"a": {}}, out=str(tmp_path))
    driver_of(flow, api, job=api.add()).tick()
    stage = f"job-{len(api.jobs_by_id)}"
    api.jobs_by_id[stage] = replace(api.jobs_by_id[stage], stop_requested=True)
    ending = threading.Timer(0.3, lambda: api.end(stage, JobState.STOPPED, "stopped on request"))
    ending.start()
    resumed = driver_of(flow, api, job=api.add())
    assert resumed.tick() is None
    assert not ending.is_alive()
    assert len(api.jobs_by_id) > int(stage.removeprefix("job-")) + 1, "the stage runs again"


def test_a_submission_while_the_api_is_away_is_made_once_it_is_back(
    tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(chain(tmp_path), api)

    def away(*_: object, **__: object) -> None:
        raise ClusterError("the API does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(api, "submit", away)
        assert driver.tick() is None
        assert len(api.jobs_by_id) == 1
    assert driver.tick() is None
    assert len(api.jobs_by_id) == 2


def test_a_scheduled_flow_runs_in_cycles_also_when_its_driver_changes_in_between(tmp_path: Path, api: FakeApi) -> None:
    flow, clock = chain(tmp_path, schedule={"cron": "0 3 * * *"}), VirtualClock(NOON_S)
    driver = driver_of(flow, api, clock)
    driver.tick()
    api.end("job-2")
    driver.tick()
    api.end("job-3")
    assert driver.tick() is None, "a scheduled flow does not end"
    clock.advance(14 * 3600.0)
    driver = driver_of(flow, api, clock)
    assert driver.tick() is None
    assert len(api.jobs_by_id) == 3
    clock.advance(3600.0)
    driver.tick()
    driver.tick()
    assert len(api.jobs_by_id) == 4
    assert len(api.keys) == 4
    assert api.jobs_by_id["job-1"].progress["stage"] == "cycle 2: a"


def test_a_flow_that_is_not_to_run_at_once_waits_for_its_time(tmp_path: Path, api: FakeApi) -> None:
    clock = VirtualClock(NOON_S)
    driver = driver_of(chain(tmp_path, schedule={"cron": "30 12 * * *", "at_once": False}), api, clock)
    for _ in range(3):
        driver.tick()
    assert len(api.jobs_by_id) == 1
    clock.advance(1800.0)
    driver.tick()
    driver.tick()
    assert api.jobs_by_id["job-2"].spec.name == "flow-a"


def test_new_data_begins_a_cycle(tmp_path: Path, api: FakeApi) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    stages = {"text": {"kind": "data", "spec": {"inputs": [str(tmp_path / "in")]}}}
    body = {"name": "fresh", "out": str(tmp_path / "out"), "stages": stages, "schedule": {"new_data_every_s": 60}}
    clock = VirtualClock(NOON_S)
    driver = driver_of(FlowSpec.parse(body, where="flow"), api, clock)
    driver.tick()
    api.end("job-2", JobState.FAILED, "whatever")
    driver.tick()
    clock.advance(61.0)
    driver.tick()
    driver.tick()
    assert len(api.jobs_by_id) == 2, "nothing changed"
    (tmp_path / "in" / "b.txt").write_text("b")
    driver.tick()
    assert len(api.jobs_by_id) == 2, "it looks once a minute"
    clock.advance(61.0)
    driver.tick()
    driver.tick()
    assert len(api.jobs_by_id) == 3


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EIO, "Reduce your request rate"), "[Errno 5] Reduce your request rate"),
        (EndpointConnectionError(endpoint_url="https://s3"), "Could not connect to the endpoint URL"),
    ],
)
def test_inputs_that_cannot_be_read_for_a_while_do_not_end_the_driver(
    tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    flow, said, clock = chain(tmp_path, schedule={"new_data_every_s": 60}), list[str](), VirtualClock(NOON_S)

    def say(line: str) -> None:
        said.append(line)
        driver.stop()

    driver = FlowDriver(flow, "run", "job-1", api, clock, say=say)
    driver.tick()
    api.end("job-2")
    driver.tick()
    api.end("job-3")
    clock.advance(61.0)
    read = Mock(side_effect=error)
    monkeypatch.setattr("raytide.workflows.driver.fingerprint_of_inputs", read)
    assert driver.run() == STOPPED
    assert len(said) == 1 and text in said[0] and said[0].endswith("; the flow goes on when that is back")


def test_the_next_time_is_that_of_the_cron_expression_in_utc() -> None:
    assert next_time_s(ScheduleSpec(cron="0 3 * * *"), NOON_S) == NOON_S + 15 * 3600
    assert next_time_s(ScheduleSpec(new_data_every_s=5), NOON_S) is None


def test_a_time_that_passed_counts_once() -> None:
    daily = ScheduleSpec(cron="0 3 * * *")
    assert begins_because(daily, NOON_S, NOON_S - 1, "", "") == ""
    assert begins_because(daily, NOON_S, NOON_S + 5 * 86_400, "", "") == "the schedule 0 3 * * *"
    assert begins_because(daily, None, NOON_S, "a", "b") == "", "it does not look at its inputs"
