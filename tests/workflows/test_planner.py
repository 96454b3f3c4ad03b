"""The laws of a flow: order, gates, retries, and no stage twice, whenever its driver is killed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.workflows.fake_runner import FakeRunner

from raytide.core.errors import ClusterError
from raytide.workflows.executor import Executor
from raytide.workflows.graph import needs_of
from raytide.workflows.planner import StageAction, plan
from raytide.workflows.spec import FlowSpec
from raytide.workflows.stages.base import StageReport
from raytide.workflows.state import FINAL, FlowState, finished, fresh, resumed


def flow_of(stages: dict[str, dict[str, object]], **more: object) -> FlowSpec:
    """Returns a flow of script stages."""
    full = {
        name: {"kind": "script", "spec": {"command": ["true"]}, "cache": False, **stage}
        for name, stage in stages.items()
    }
    return FlowSpec.parse({"name": "flow", "out": "memory://flow", "stages": full, **more}, where="flow")


def test_stages_begin_when_those_that_they_need_are_done() -> None:
    flow = flow_of({"last": {"needs": ["a", "b"]}, "a": {}, "b": {}})
    state = fresh(flow, "run")
    assert plan(flow, state, 0.0) == (StageAction("begin", "a"), StageAction("begin", "b"))
    state = finished(state, "a", {}, {}, "", 0.0)
    assert plan(flow, state, 0.0) == (StageAction("begin", "b"),)
    state = finished(state, "b", {}, {}, "", 0.0)
    assert plan(flow, state, 0.0) == (StageAction("begin", "last"),)


def test_at_most_at_once_stages_run() -> None:
    flow = flow_of({name: {} for name in "abc"}, at_once=2)
    assert [action.stage for action in plan(flow, fresh(flow, "run"), 0.0)] == ["a", "b"]


def test_a_broken_condition_skips_the_stage_and_all_that_need_it_with_the_reason() -> None:
    flow = flow_of({"eval": {}, "serve": {"when": "eval.loss < 4"}, "after": {"needs": ["serve"]}})
    state = finished(fresh(flow, "run"), "eval", {}, {"loss": 4.25}, "", 0.0)
    (skip,) = plan(flow, state, 0.0)
    assert skip == StageAction("skip", "serve", "eval.loss is 4.25, and the condition is eval.loss < 4")
    state = state.with_stage("serve", status="skipped", reason=skip.reason)
    (after,) = plan(flow, state, 0.0)
    assert after == StageAction("skip", "after", f"serve skipped: {skip.reason}")


def test_a_condition_on_a_metric_that_nobody_reported_fails_its_stage_and_says_what_there_is() -> None:
    flow = flow_of({"eval": {}, "serve": {"when": "eval.lost < 4"}})
    state = finished(fresh(flow, "run"), "eval", {}, {"loss": 1.0, "steps": 3.0}, "", 0.0)
    assert plan(flow, state, 0.0) == (StageAction("fail", "serve", "eval has no metric lost; it has loss, steps"),)


FLOWS = (
    flow_of(
        {
            "a": {},
            "b": {"needs": ["a"], "retries": 1, "backoff_s": 4},
            "c": {"needs": ["a"]},
            "d": {"needs": ["b", "c"]},
        }
    ),
    flow_of(
        {"a": {"retries": 2, "backoff_s": 1}, "gate": {"when": "a.loss < 2"}, "end": {"needs": ["gate"]}, "free": {}}
    ),
    flow_of({name: {"retries": 1, "backoff_s": 0} for name in "abcd"}, at_once=2),
)


class KilledError(BaseException):
    """As abrupt as a signal."""


class Flow(RuleBasedStateMachine):
    """A driver that is killed between any two of its actions, jobs that end in any way, and an API that goes away."""

    @initialize(flow=st.sampled_from(FLOWS))
    def begin(self, flow: FlowSpec) -> None:
        self.flow, self.world, self.now_s, self.drivers = flow, FakeRunner(), 0.0, 1
        self.stored = fresh(flow, "run", "driver-1")
        self.kill_in: int | None = None
        self.executor = self.driver()

    def driver(self) -> Executor:
        def save(state: FlowState) -> None:
            self.may_die()
            self.stored = FlowState.parse(state.model_dump(mode="json"), where="state")
            self.may_die()

        world, submit = self.world, self.world.submit

        class Runner(FakeRunner):
            def submit(own, task):  # type: ignore[no-untyped-def, override]  # noqa: N805
                job = submit(task)
                self.may_die()
                return job

        runner = Runner(world.jobs, world.by_key)
        self.runner = runner
        return Executor(self.flow, self.stored, runner, save, lambda: self.now_s)

    def may_die(self) -> None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                raise KilledError

    @rule(kill_in=st.none() | st.integers(0, 6), is_away=st.booleans())
    def step(self, kill_in: int | None, is_away: bool) -> None:
        self.kill_in, self.world.is_away = kill_in, is_away
        self.runner.is_away = is_away
        try:
            self.executor.step()
        except ClusterError:
            assert is_away
        except KilledError:
            self.executor = self.driver()
        self.kill_in = None

    @precondition(lambda self: any(job.report.status == "running" for job in self.world.jobs.values()))
    @rule(pick=st.integers(0, 100), loss=st.one_of(st.none(), st.sampled_from([1.0, 3.0])))
    def a_job_ends(self, pick: int, loss: float | None) -> None:
        running = [handle for handle, job in self.world.jobs.items() if job.report.status == "running"]
        report = StageReport("failed", "it broke") if loss is None else StageReport("done", metrics={"loss": loss})
        self.world.end(running[pick % len(running)], report)

    @rule(seconds=st.sampled_from([1.0, 5.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.stored.is_over and self.stored.failed)
    @rule()
    def a_user_resumes_it(self) -> None:
        self.drivers += 1
        self.stored = resumed(self.stored, f"driver-{self.drivers}")
        self.executor = self.driver()

    @invariant()
    def no_stage_is_done_twice(self) -> None:
        for name in self.flow.stages:
            jobs = self.world.of_stage(name)
            assert sum(1 for job in jobs if job.report.status in ("running", "done")) <= 1, name
            assert len(jobs) <= self.drivers * (self.flow.stages[name].retries + 1)

    @invariant()
    def everything_waits_for_what_it_needs(self) -> None:
        for name, stage in self.flow.stages.items():
            if self.world.of_stage(name):
                assert all(self.done(needed) for needed in needs_of(stage))
            now = self.stored.stages[name]
            if now.status == "done":
                assert self.done(name)
            if now.status == "skipped":
                blocked = [self.stored.stages[each].status for each in needs_of(stage)]
                assert {"failed", "skipped"} & set(blocked) or stage.when

    @invariant()
    def no_more_run_than_allowed(self) -> None:
        running = [job for job in self.world.jobs.values() if job.report.status == "running"]
        assert len(running) <= self.flow.at_once

    def done(self, name: str) -> bool:
        return any(job.report.status == "done" for job in self.world.of_stage(name))

    def teardown(self) -> None:
        """Left alone with jobs that all succeed, every flow ends."""
        self.kill_in, self.runner.is_away, self.world.is_away = None, False, False
        for _ in range(100):
            if self.executor.step():
                break
            for handle, job in self.world.jobs.items():
                if job.report.status == "running":
                    self.world.end(handle, StageReport("done", metrics={"loss": 1.0}))
            self.now_s += 10_000.0
        assert all(stage.status in FINAL for stage in self.executor.state.stages.values())


Flow.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFlow = Flow.TestCase
