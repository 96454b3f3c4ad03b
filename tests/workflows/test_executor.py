"""Sweeps, retries, caching and cycles by the executor, with jobs that tests end as they like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.fake_runner import FakeJob, FakeRunner
from tests.workflows.test_planner import flow_of

from raytide.core.errors import ConfigError, QuotaError
from raytide.workflows.executor import Executor
from raytide.workflows.spec import FlowSpec
from raytide.workflows.stages.base import StageReport, StageTask
from raytide.workflows.state import FlowState, fresh, next_cycle, resumed


class Time:
    now_s = 0.0


def executor_of(flow: FlowSpec, world: FakeRunner, state: FlowState | None = None, time: type[Time] = Time) -> Executor:
    return Executor(flow, state or fresh(flow, "run"), world, lambda state: None, lambda: time.now_s)


def succeed(world: FakeRunner, **metrics: float) -> None:
    """Ends everything that runs."""
    for handle, job in world.jobs.items():
        if job.report.status == "running":
            world.end(handle, StageReport("done", outputs={"out": job.task.out}, metrics=metrics))


def test_a_finished_stage_is_found_by_another_run_and_not_run_again(tmp_path: Path) -> None:
    stages = {"a": {"cache": True}, "b": {"cache": True, "spec": {"command": ["see", "${a.out}"]}}}
    flow = flow_of(stages, out=str(tmp_path))
    first, second = FakeRunner(), FakeRunner()
    driver = executor_of(flow, first)
    while not driver.step():
        for job in first.jobs.values():
            Path(job.task.out).mkdir(parents=True, exist_ok=True)
        succeed(first, size=2.0)
    assert len(first.jobs) == 2
    assert first.of_stage("b")[0].task.spec["command"] == ["see", first.of_stage("a")[0].task.out]

    again = executor_of(flow, second)
    assert again.step()
    assert second.jobs == {}
    assert all(stage.is_cached and stage.metrics == {"size": 2.0} for stage in again.state.stages.values())

    other = flow_of({**stages, "b": {**stages["b"], "spec": {"command": ["other", "${a.out}"]}}}, out=str(tmp_path))
    third = FakeRunner()
    assert not executor_of(other, third).step()
    assert [job.task.labels["stage"] for job in third.jobs.values()] == ["b"]


def test_a_failed_attempt_is_tried_again_after_its_backoff_in_the_same_folder() -> None:
    class Clock(Time):
        pass

    flow, world = flow_of({"a": {"retries": 2, "backoff_s": 10}}), FakeRunner()
    driver = executor_of(flow, world, time=Clock)
    for failures, wait_s in ((1, 10.0), (2, 20.0)):
        driver.step()
        assert len(world.jobs) == failures
        world.end(f"job-{failures - 1}", StageReport("failed", "out of memory"))
        driver.step()
        Clock.now_s += wait_s - 0.1
        driver.step()
        assert len(world.jobs) == failures, "it waits"
        Clock.now_s += 0.1
    driver.step()
    assert len({job.task.out for job in world.jobs.values()}) == 1
    assert len({job.task.key for job in world.jobs.values()}) == 3
    world.end("job-2", StageReport("failed", "out of memory"))
    assert driver.step()
    assert driver.state.stages["a"].reason == "out of memory It was tried 3 times."


class Refusing(FakeRunner):
    error: Exception = ConfigError("bad spec.")

    def submit(self, task: StageTask) -> str:
        if self.error is not None and not self.is_away:
            raise self.error
        self.is_away = False
        return super().submit(task)


def test_a_wrong_spec_is_not_tried_again() -> None:
    world = Refusing()
    driver = executor_of(flow_of({"a": {"retries": 5}}), world)
    assert driver.step()
    assert driver.state.stages["a"].reason == "bad spec."


def test_a_full_quota_is_waited_for_and_uses_up_no_retry() -> None:
    world = Refusing()
    world.error = QuotaError("1000 jobs are unfinished.")
    driver = executor_of(flow_of({"a": {}}), world)
    for _ in range(3):
        assert not driver.step()
    assert "its submission waits: 1000 jobs" in driver.state.stages["a"].reason
    world.is_away = True  # the next submission is accepted
    assert not driver.step()
    assert list(world.jobs) == ["job-0"]
    assert driver.state.stages["a"].attempt == 1


SWEEP = {
    "space": {"params.lr": {"low": 0.001, "high": 1.0, "log": True}},
    "trials": 9,
    "at_once": 3,
    "sampler": "random",
    "asha": {"first": 10, "factor": 3},
}


def sweep_flow(**changes: Any) -> FlowSpec:
    spec = {"command": ["train"], "params": {"lr": 0.1}, "steps": 90}
    return flow_of({"tune": {"spec": spec, "sweep": {**SWEEP, **changes}}, "use": {"needs": ["tune"]}})


def loss(job: FakeJob) -> float:
    params = job.task.spec["params"]
    assert isinstance(params, dict)
    return float(params["lr"])


def advance(world: FakeRunner, by: int = 5) -> None:
    """Lets every trial that runs do some steps: its loss is its rate."""
    for handle, job in world.jobs.items():
        if job.task.labels["stage"] != "tune" or job.report.status != "running" or job.stops:
            continue
        step = (job.report.curve[-1][0] if job.report.curve else 0) + by
        curve = (*job.report.curve, (step, loss(job)))
        is_over = step >= 90
        world.end(
            handle,
            StageReport("done" if is_over else "running", outputs={"out": job.task.out}, curve=curve),
        )


def run_sweep(flow: FlowSpec, on_step: Callable[[Executor, FakeRunner], Executor] | None = None) -> Executor:
    world = FakeRunner()
    driver = executor_of(flow, world)
    for _ in range(500):
        if driver.step():
            return driver
        tuned = driver.state.stages["tune"]
        active = [trial for trial in tuned.trials if trial.status == "running"]
        sweep = flow.stages["tune"].sweep
        assert sweep is not None
        assert len(active) <= sweep.at_once
        advance(world)
        for handle, job in world.jobs.items():
            if job.task.labels["stage"] == "use":
                world.end(handle, StageReport("done"))
        if on_step is not None:
            driver = on_step(driver, world)
    raise AssertionError("it does not end")


def test_a_sweep_ends_bad_trials_early_and_its_result_is_the_best_trial() -> None:
    state = run_sweep(sweep_flow()).state
    tuned = state.stages["tune"]
    assert len(tuned.trials) == 9
    rates = [float(trial.params["params.lr"]) for trial in tuned.trials]
    best = rates.index(min(rates))
    assert tuned.metrics["loss"] == pytest.approx(min(rates))
    assert tuned.outputs["out"].endswith(f"/trial-{best}")
    ended = [trial for trial in tuned.trials if trial.status == "ended"]
    assert len(ended) >= 4
    assert all("is not among the best" in trial.reason for trial in ended)
    assert tuned.metrics["sweep_cost"] < 0.75
    assert state.stages["use"].status == "done"


def test_a_sweep_whose_driver_is_new_at_every_step_makes_the_same_trials() -> None:
    def killed(driver: Executor, world: FakeRunner) -> Executor:
        stored = FlowState.parse(driver.state.model_dump(mode="json"), where="state")
        return executor_of(driver.flow, world, stored)

    whole, broken = run_sweep(sweep_flow()), run_sweep(sweep_flow(), killed)
    assert whole.state.stages["tune"].trials == broken.state.stages["tune"].trials


def test_a_sweep_without_asha_runs_every_trial_to_its_end() -> None:
    tuned = run_sweep(sweep_flow(asha=None)).state.stages["tune"]
    assert {trial.status for trial in tuned.trials} == {"done"}
    assert tuned.metrics["sweep_cost"] == 1.0


def test_a_sweep_of_which_every_trial_fails_says_why_and_can_be_resumed() -> None:
    flow, world = sweep_flow(trials=2), FakeRunner()
    driver = executor_of(flow, world)
    for _ in range(3):
        driver.step()
        for handle in world.jobs:
            world.end(handle, StageReport("failed", "no such file"))
    assert driver.step()
    assert driver.state.stages["tune"].reason == "no trial of 2 ended with a finite loss: no such file"
    assert driver.state.stages["use"].status == "skipped"

    again = executor_of(flow, world, resumed(driver.state, "driver-2"))
    assert not again.step()
    assert len(world.of_stage("tune")) == 4
    assert len({str(job.task.spec) for job in world.of_stage("tune")}) == 2, "with the same parameters"


def test_a_new_cycle_submits_everything_anew_under_other_keys() -> None:
    flow, world = flow_of({"a": {}}), FakeRunner()
    driver = executor_of(flow, world)
    driver.step()
    succeed(world)
    assert driver.step()
    again = executor_of(flow, world, next_cycle(driver.state, "the schedule", ""))
    assert not again.step()
    assert len(world.jobs) == 2


def test_a_served_endpoint_that_is_unchanged_in_a_later_cycle_keeps_its_address() -> None:
    serve = {"kind": "serve", "cache": True, "spec": {"name": "chat", "model": "/m"}}
    flow = flow_of({"serve": serve, "ask": {"spec": {"command": ["ask", "${serve.url}"]}}})
    world, outputs = FakeRunner(), {"name": "chat", "url": "http://x/chat/v1"}
    driver = executor_of(flow, world)
    driver.step()
    world.end("job-0", StageReport("done", outputs=outputs))
    driver.step()
    succeed(world)
    assert driver.step()
    stored = FlowState.parse(driver.state.model_dump(mode="json"), where="state")
    for _ in range(2):  # the second is two cycles after the deployment
        again = executor_of(flow, world, next_cycle(stored, "new data", ""))
        again.step()
        assert again.state.stages["serve"].outputs == outputs
        assert world.of_stage("ask")[-1].task.spec["command"] == ["ask", "http://x/chat/v1"]
        stored = again.state
    assert len(world.of_stage("serve")) == 1


def test_a_state_of_an_older_release_still_counts_as_served() -> None:
    flow, world = (
        flow_of({"serve": {"kind": "serve", "cache": True, "spec": {"name": "chat", "model": "/m"}}}),
        FakeRunner(),
    )
    driver = executor_of(flow, world)
    driver.step()
    world.end("job-0", StageReport("done", outputs={"name": "chat", "url": "http://x/chat/v1"}))
    assert driver.step()
    text = driver.state.model_dump(mode="json", exclude={"applied_outputs"})
    again = executor_of(flow, world, next_cycle(FlowState.parse(text, where="state"), "new data", ""))
    assert again.step()
    assert again.state.stages["serve"].outputs == {"name": "chat", "url": ""}


def test_stopping_a_flow_stops_what_runs() -> None:
    flow, world = flow_of({"a": {}, "b": {}, "c": {"needs": ["a"]}}), FakeRunner()
    driver = executor_of(flow, world)
    driver.step()
    world.end("job-0", StageReport("done"))
    driver.step()
    driver.stop()
    assert {job.task.labels["stage"]: job.stops for job in world.jobs.values()} == {"a": 0, "b": 1, "c": 1}


def test_the_trials_that_were_stopped_with_their_flow_run_again_in_a_resume() -> None:
    flow, world = sweep_flow(trials=3, at_once=2, asha=None), FakeRunner()
    driver = executor_of(flow, world)
    driver.step()
    world.end("job-0", StageReport("done", outputs={"out": "x"}, curve=((90, 0.5),)))
    driver.step()
    driver.stop()
    for handle, job in world.jobs.items():
        if job.stops:
            world.end(handle, StageReport("failed", "it was asked to stop"))
    again = executor_of(flow, world, resumed(driver.state, "driver-2"))
    assert not again.step()
    assert [trial.status for trial in again.state.stages["tune"].trials] == ["done", "running", "running"]
    advance(world, by=90)
    again.step()
    assert again.state.stages["tune"].status == "done"
    assert again.state.stages["tune"].metrics["trials"] == 3.0
    assert [trial.status for trial in again.state.stages["tune"].trials] == ["done"] * 3


def test_what_uses_a_script_that_always_runs_runs_after_it_again(tmp_path: Path) -> None:
    stages = {"fetch": {"cache": False}, "use": {"cache": True, "spec": {"command": ["see", "${fetch.out}"]}}}
    flow, world = flow_of(stages, out=str(tmp_path)), FakeRunner()
    state: FlowState | None = None
    for _ in range(2):
        driver = executor_of(flow, world, state)
        while not driver.step():
            for job in world.jobs.values():
                Path(job.task.out).mkdir(parents=True, exist_ok=True)
            succeed(world)
        state = next_cycle(driver.state, "the schedule", "")
    assert [job.task.labels["stage"] for job in world.jobs.values()] == ["fetch", "use"] * 2
