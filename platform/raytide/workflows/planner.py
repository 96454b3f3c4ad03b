"""Decides what a flow does next, by a pure function: `plan(flow, state, now_s) -> actions`. The executor carries out
the actions.

Every decision follows from the stored state alone, so a driver that was killed continues where it was. A running stage
whose job is not known is submitted again under the same key. The API then returns the same job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from raytide.workflows.graph import needs_of, order_of
from raytide.workflows.spec import FlowSpec, StageSpec
from raytide.workflows.state import FlowState, StageState, TrialState, metric_of
from raytide.workflows.sweep.halving import rung_of_end
from raytide.workflows.sweep.sampler import PastTrial


@dataclass(frozen=True, slots=True)
class StageAction:
    """A change of one stage. The kinds are:

    - `begin`: count a new attempt, store it, and submit it unless its result is cached.
    - `submit`: submit the stored attempt again.
    - `skip`, `fail`: end the stage for `reason`.
    - `conclude`: end a sweep with its best trial, which is number `trial`. If `trial` is None, the sweep has failed.
    """

    kind: Literal["begin", "submit", "skip", "fail", "conclude"]
    stage: str
    reason: str = ""
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class TrialAction:
    """A change of one trial of a sweep. The kinds are:

    - `begin`: draw the trial's parameters, store the trial and submit it.
    - `submit`: submit the stored attempt again.
    - `retry`: count a new attempt, store it and submit it.
    - `end`: stop the trial early for `reason`.
    """

    kind: Literal["begin", "submit", "retry", "end"]
    stage: str
    number: int
    reason: str = ""


FlowAction = StageAction | TrialAction


def plan(flow: FlowSpec, state: FlowState, now_s: float) -> tuple[FlowAction, ...]:
    """Returns the actions to take now, in the order of the stages. There are no actions while all unfinished stages run
    or wait for a retry.
    """
    actions: list[FlowAction] = []
    running = sum(1 for stage in state.stages.values() if stage.status == "running")
    for name in order_of(flow):
        stage, now = flow.stages[name], state.stages[name]
        if now.status == "running":
            actions += _of_running(name, stage, now, now_s)
        elif now.status == "waiting" and (found := _of_waiting(flow, state, name, now_s)) is not None:
            if found.kind != "begin":
                actions.append(found)
            elif running < flow.at_once:
                running += 1
                actions.append(found)
    return tuple(actions)


def _of_waiting(flow: FlowSpec, state: FlowState, name: str, now_s: float) -> StageAction | None:
    """Returns the action on a waiting stage; None if it must keep waiting."""
    stage, needs = flow.stages[name], needs_of(flow.stages[name])
    for needed in needs:
        before = state.stages[needed]
        if before.status in ("failed", "skipped"):
            return StageAction("skip", name, f"{needed} {before.status}: {root_reason(state, needed)}")
    if any(state.stages[needed].status != "done" for needed in needs):
        return None
    try:
        broken = [why for condition in stage.conditions if (why := condition.broken_by(metric_of(state)))]
    except KeyError as error:
        return StageAction("fail", name, str(error.args[0]))
    if broken:
        return StageAction("skip", name, "; ".join(broken))
    retry_at_s = state.stages[name].retry_at_s
    return StageAction("begin", name) if retry_at_s is None or now_s >= retry_at_s else None


def root_reason(state: FlowState, name: str) -> str:
    """Returns the original reason why a stage failed or was skipped. A reason that came from another stage has a prefix
    that names this other stage. The prefix is removed.
    """
    reason = state.stages[name].reason
    first, _, rest = reason.partition(": ")
    word = first.split(" ")
    return rest if len(word) == 2 and word[0] in state.stages and word[1] in ("failed", "skipped") else reason


def _of_running(name: str, stage: StageSpec, now: StageState, now_s: float) -> Iterator[FlowAction]:
    if stage.sweep is None:
        if not now.job:
            yield StageAction("submit", name)
        return
    active = 0
    for number, trial in enumerate(now.trials):
        if trial.status == "running":
            active += 1
            if (found := _of_trial(name, stage, now.trials, number, now_s)) is not None:
                yield found
                active -= found.kind == "end"
    room = max(0, min(stage.sweep.at_once - active, stage.sweep.trials - len(now.trials)))
    for number in range(len(now.trials), len(now.trials) + room):
        yield TrialAction("begin", name, number)
    if len(now.trials) == stage.sweep.trials and all(trial.status != "running" for trial in now.trials):
        yield conclusion(name, stage, now.trials)


def _of_trial(
    name: str, stage: StageSpec, trials: tuple[TrialState, ...], number: int, now_s: float
) -> TrialAction | None:
    assert stage.sweep is not None
    trial = trials[number]
    if trial.retry_at_s is not None:
        return TrialAction("retry", name, number) if now_s >= trial.retry_at_s else None
    if not trial.job:
        return TrialAction("submit", name, number)
    if stage.sweep.asha is None:
        return None
    others = [each.rungs for at, each in enumerate(trials) if at != number and each.status != "failed"]
    rung = rung_of_end(trial.rungs, others, stage.sweep.asha, stage.sweep.mode)
    if rung is None:
        return None
    reached = sum(1 for each in others if rung in each) + 1
    value = trial.rungs[rung]
    shown = "no number" if value is None else f"{value:.6g}"
    best = max(1, reached // stage.sweep.asha.factor)
    reason = f"{stage.sweep.metric} {shown} at step {rung} is not among the best {best} of {reached}"
    return TrialAction("end", name, number, reason)


def conclusion(name: str, stage: StageSpec, trials: tuple[TrialState, ...]) -> StageAction:
    """Returns the action that ends a sweep with its best complete trial. If no trial is complete, the action marks the
    sweep as failed.
    """
    assert stage.sweep is not None
    sign = 1.0 if stage.sweep.mode == "min" else -1.0
    whole = [(sign * trial.value, number) for number, trial in enumerate(trials) if trial.value is not None]
    if whole:
        return StageAction("conclude", name, trial=min(whole)[1])
    why = next((trial.reason for trial in trials if trial.status == "failed"), "")
    lacking = f"no trial of {len(trials)} ended with a finite {stage.sweep.metric}"
    return StageAction("conclude", name, f"{lacking}: {why}" if why else f"{lacking}.")


def past_trials(trials: tuple[TrialState, ...]) -> tuple[PastTrial, ...]:
    """Returns the trials from which the sampler learns, in the order of their numbers. These are the trials that ran to
    the end and those that were ended early. A trial whose value is not known is left out.
    """
    past = []
    for trial in trials:
        if trial.status == "done" and trial.value is not None:
            past.append(PastTrial(trial.params, trial.value, trial.steps, is_whole=True))
        elif trial.status == "ended" and (known := _last_known(trial.rungs)) is not None:
            past.append(PastTrial(trial.params, known[1], known[0], is_whole=False))
    return tuple(past)


def _last_known(rungs: Mapping[int, float | None]) -> tuple[int, float] | None:
    rung = max(rungs, default=None)
    value = None if rung is None else rungs[rung]
    return None if rung is None or value is None else (rung, value)
