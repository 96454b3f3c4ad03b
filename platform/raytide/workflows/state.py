"""The state of a run of a flow, and the pure functions that change it after each event. The executor stores the
returned states.

A stage is `waiting`, then `running`, then `done`, `failed` or `skipped`. A failed stage that has retries left is
`waiting` again. Each attempt has a number that is unique within the flow's present cycle (a scheduled flow has many
cycles), and the key of its submission contains this number. The number is stored before the submission. If a driver
is killed after the number is stored, it therefore submits the same attempt again after its restart, and the API
returns the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from raytide.core import bounds
from raytide.core.config import Config
from raytide.workflows.spec import FlowSpec, StageSpec
from raytide.workflows.sweep.spec import Value

StageStatus = Literal["waiting", "running", "done", "failed", "skipped"]
TrialStatus = Literal["running", "done", "ended", "failed"]
FINAL: frozenset[str] = frozenset({"done", "failed", "skipped"})


class TrialState(Config):
    """The state of one trial of a sweep."""

    params: dict[str, Value]
    status: TrialStatus = "running"
    attempt: int = 1
    failures: int = 0
    retry_at_s: float | None = None
    """The time of its next attempt after a failure; None without one."""
    job: str = ""
    """The job of the present attempt; empty until it is submitted."""
    steps: int = 0
    """The last step that it has reported."""
    rungs: dict[int, float | None] = Field(default_factory=dict)
    """Its metric at each rung that it reached; None for a value that was not finite."""
    value: float | None = None
    """Its metric at its end; None if it is not finite."""
    outputs: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    reason: str = ""


class StageState(Config):
    """The state of one stage in a run."""

    status: StageStatus = "waiting"
    attempt: int = 0
    """The number of its attempts in this cycle, over all drivers."""
    failures: int = 0
    """Failed attempts since the run was begun or resumed."""
    retry_at_s: float | None = None
    job: str = ""
    """The job, endpoint or version of the present attempt; empty until it is known."""
    key: str = ""
    """The digest of everything that determines the result; see `raytide.workflows.cache`."""
    outputs: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    digest: str = ""
    """The digest of the result, which is a part of the keys of stages that use it."""
    is_cached: bool = False
    reason: str = ""
    started_at_s: float | None = None
    ended_at_s: float | None = None
    trials: tuple[TrialState, ...] = ()


class FlowState(Config):
    """The state of a run of a flow. In a scheduled flow, each cycle begins with fresh stages."""

    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    run: str
    driver: str = ""
    """The id of the driver's job that wrote the state last."""
    cycle: int = 1
    because: str = ""
    stages: dict[str, StageState]
    applied: dict[str, str] = Field(default_factory=dict)
    """The key with which each `serve` stage was last applied, in any cycle."""
    applied_outputs: dict[str, dict[str, str]] = Field(default_factory=dict)
    """The outputs that each `serve` stage had then. States of older releases lack them."""
    inputs: str = ""
    """The fingerprint of the data stages' inputs in this cycle."""
    next_at_s: float | None = None
    """The time of the next cycle by the cron expression; None while a cycle runs, and always without an expression."""

    @property
    def is_over(self) -> bool:
        return all(stage.status in FINAL for stage in self.stages.values())

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for name, stage in self.stages.items() if stage.status == "failed")

    def with_stage(self, name: str, **changes: object) -> FlowState:
        stage = self.stages[name].model_copy(update=changes)
        return self.model_copy(update={"stages": {**self.stages, name: stage}})

    def with_trial(self, name: str, number: int, **changes: object) -> FlowState:
        trials = list(self.stages[name].trials)
        trials[number] = trials[number].model_copy(update=changes)
        return self.with_stage(name, trials=tuple(trials))


def fresh(flow: FlowSpec, run: str, driver: str = "") -> FlowState:
    """Returns the state of a run in which no stage has begun."""
    return FlowState(run=run, driver=driver, stages={name: StageState() for name in flow.stages})


def postponed(state: FlowState) -> FlowState:
    """Returns the state of a flow that waits for its first scheduled time. The flow is then in cycle 0, which has no
    work.
    """
    stages = {name: StageState(status="skipped", reason="its first cycle has not begun") for name in state.stages}
    return state.model_copy(update={"cycle": 0, "stages": stages})


def next_cycle(state: FlowState, because: str, inputs: str) -> FlowState:
    """Returns the state at the start of the next cycle, in which all stages wait. `because` is the reason for the
    cycle.
    """
    stages = {name: StageState() for name in state.stages}
    changes = {"cycle": state.cycle + 1, "because": because, "stages": stages, "inputs": inputs, "next_at_s": None}
    return state.model_copy(update=changes)


def resumed(state: FlowState, driver: str) -> FlowState:
    """Returns the state for a new driver job. Failed and skipped stages are set back to waiting. Finished stages stay
    done.

    Failed trials of a sweep run once more. All other trials stay as they are.
    """
    stages = {}
    for name, stage in state.stages.items():
        is_retry = stage.status == "waiting" and stage.retry_at_s is not None
        if (stage.status in ("failed", "skipped") or is_retry) and state.cycle:
            trials = tuple(_tried_again(trial) for trial in stage.trials)
            stage = StageState(attempt=stage.attempt, trials=trials)
        elif stage.status == "running":
            stage = stage.model_copy(update={"trials": tuple(_tried_again(trial) for trial in stage.trials)})
        stages[name] = stage
    return state.model_copy(update={"driver": driver, "stages": stages})


def begun(state: FlowState, name: str, key: str, now_s: float) -> FlowState:
    """Returns the state with a new attempt at a stage. The caller stores this state before it submits the attempt."""
    before = state.stages[name]
    changes = {"status": "running", "attempt": before.attempt + 1, "key": key, "job": "", "retry_at_s": None}
    if before.started_at_s is None:
        changes["started_at_s"] = now_s
    return state.with_stage(name, **changes, reason="", ended_at_s=None)


def finished(
    state: FlowState,
    name: str,
    outputs: Mapping[str, str],
    metrics: Mapping[str, float],
    digest: str,
    now_s: float,
    **changes: object,
) -> FlowState:
    done = {"outputs": dict(outputs), "metrics": dict(metrics), "digest": digest, "ended_at_s": now_s}
    return state.with_stage(name, status="done", **done, reason="", **changes)


def skipped(state: FlowState, name: str, reason: str, now_s: float) -> FlowState:
    return state.with_stage(name, status="skipped", reason=reason, ended_at_s=now_s)


def failed(
    state: FlowState, name: str, stage: StageSpec, reason: str, now_s: float, *, is_final: bool = False
) -> FlowState:
    """Returns the state after a failed attempt at a stage. The stage waits for a retry, or has finally failed.

    `is_final` means that another attempt would fail in the same way, for example because the spec is wrong.
    """
    failures = state.stages[name].failures + 1
    if is_final or failures > stage.retries:
        again = f" It was tried {failures} times." if failures > 1 else ""
        return state.with_stage(name, status="failed", failures=failures, reason=f"{reason}{again}", ended_at_s=now_s)
    retry_at_s = now_s + stage.retry_after_s(failures)
    return state.with_stage(name, status="waiting", failures=failures, retry_at_s=retry_at_s, reason=reason)


def trial_failed(state: FlowState, name: str, number: int, stage: StageSpec, reason: str, now_s: float) -> FlowState:
    """Returns the state after a failed attempt at a trial of a sweep."""
    failures = state.stages[name].trials[number].failures + 1
    if failures > stage.retries:
        return state.with_trial(name, number, status="failed", failures=failures, reason=reason)
    retry_at_s = now_s + stage.retry_after_s(failures)
    return state.with_trial(name, number, failures=failures, retry_at_s=retry_at_s, job="", reason=reason)


def metric_of(state: FlowState) -> Callable[[str, str], float]:
    """Returns a function that maps the names of a stage and a metric to the metric's value. The returned function
    raises KeyError for an unknown metric.
    """

    def find(stage: str, name: str) -> float:
        metrics = state.stages[stage].metrics
        if name not in metrics:
            raise KeyError(f"{stage} has no metric {name}; it has {', '.join(sorted(metrics)) or 'none'}")
        return metrics[name]

    return find


def _tried_again(trial: TrialState) -> TrialState:
    if trial.status != "failed" and trial.retry_at_s is None:
        return trial
    changes = {"status": "running", "attempt": trial.attempt + 1, "failures": 0, "job": "", "reason": ""}
    return trial.model_copy(update={**changes, "retry_at_s": None})
