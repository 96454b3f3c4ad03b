"""Carries out the plan of a flow: a thin loop around `planner.plan`. The process may be killed after any step.

The state is stored before each submission and after each event. A submission has a key made of the run, the cycle, the
stage and the attempt. A repeated submission thus returns the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raytide.core.bounds import shortened
from raytide.core.errors import ClusterError, OverloadedError, QuotaError, RaytideError, UsageError
from raytide.workflows import state as changes
from raytide.workflows.cache import StageRecord, digest_of_result, folder_of, key_of, record_of, save_record
from raytide.workflows.planner import StageAction, TrialAction, past_trials, plan
from raytide.workflows.references import METRICS, PARAMS, Reference, resolved, with_value
from raytide.workflows.spec import FlowSpec
from raytide.workflows.stages.base import StageReport, StageRunner, StageTask
from raytide.workflows.state import FlowState, StageState, TrialState
from raytide.workflows.sweep.halving import reached, smoothed
from raytide.workflows.sweep.sampler import suggest

_PASSES = (ClusterError, OverloadedError, QuotaError)
"""Temporary errors, after which the submission is tried again in the next step."""
_MOST_REASON = 500
_STOPPED = "it was stopped with the flow"
NEVER_CACHED = frozenset({"register", "serve"})
"""Kinds of stages whose result is a change outside the flow, which someone may have undone."""


class Executor:
    """Runs one cycle of a flow."""

    def __init__(
        self,
        flow: FlowSpec,
        state: FlowState,
        runner: StageRunner,
        save: Callable[[FlowState], None],
        now_s: Callable[[], float],
        code_of: Callable[[str], str] = lambda stage: "",
    ) -> None:
        """`save` stores the state durably, `code_of` returns the digest of a script stage's files."""
        self.flow, self.state = flow, state
        self._runner, self._save, self._now_s, self._code_of = runner, save, now_s, code_of
        self._saved: FlowState | None = None

    def step(self) -> bool:
        """Reads the states of all running stages, and takes all actions that are possible now. Returns whether the
        cycle is over.

        Raises ClusterError if the API does not answer, and StorageError if the state or a result cannot be stored. The
        next step continues after the completed actions.
        """
        try:
            self.look()
            while actions := plan(self.flow, self.state, self._now_s()):
                before = self.state
                for action in actions:
                    self._apply_trial(action) if isinstance(action, TrialAction) else self._apply(action)
                if self.state == before:
                    break
        finally:
            self._store()
        return self.state.is_over

    def stop(self) -> None:
        """Asks all running stages and trials to end, and stores that they were stopped: a resume runs them again."""
        try:
            for name, stage in self.state.stages.items():
                if stage.status == "running":
                    self._stop(name, stage)
        finally:
            self._store()

    def _stop(self, name: str, stage: StageState) -> None:
        if stage.job:
            self._runner.stop(self._task(name), stage.job)
        for number, trial in enumerate(stage.trials):
            if trial.status == "running":
                if trial.job:
                    self._runner.stop(self._trial_task(name, number), trial.job)
                self.state = self.state.with_trial(name, number, status="failed", retry_at_s=None, reason=_STOPPED)
        self.state = self.state.with_stage(name, status="failed", reason=_STOPPED, ended_at_s=self._now_s())

    def _store(self) -> None:
        if self.state != self._saved:
            self._save(self.state)
            self._saved = self.state

    def look(self) -> None:
        """Reads the states of all running stages."""
        for name, stage in self.state.stages.items():
            if stage.status != "running":
                continue
            if self.flow.stages[name].sweep is not None:
                for number, trial in enumerate(stage.trials):
                    if trial.status == "running" and trial.job and trial.retry_at_s is None:
                        self._look_at_trial(name, number, trial)
            elif stage.job:
                self._look_at(name, stage.job)

    def _look_at(self, name: str, job: str) -> None:
        report = self._runner.look(self._task(name), job)
        if report.status == "done":
            self._finish(name, report.outputs, report.metrics)
        elif report.status == "refused":
            self.state = changes.skipped(self.state, name, _short(report.reason), self._now_s())
            self.state = self.state.with_stage(name, job="")  # it made nothing
        elif report.status == "failed":
            self._fail(name, report.reason, is_final=report.is_final)

    def _finish(self, name: str, outputs: Mapping[str, str], metrics: Mapping[str, float]) -> None:
        stage, now = self.flow.stages[name], self.state.stages[name]
        try:
            digest = digest_of_result(stage.kind, now.key, outputs)
        except RaytideError as error:
            self._fail(name, f"its result cannot be read: {error}")
            return
        if not stage.cache and stage.kind == "script":  # it may have made something else than the last time
            digest = f"{digest}-{self.state.run}-{self.state.cycle}-{now.attempt}"
        if stage.cache and stage.kind not in NEVER_CACHED:
            record = StageRecord(stage=name, job=now.job, outputs=dict(outputs), metrics=dict(metrics), digest=digest)
            save_record(self.flow, now.key, record)
        self.state = changes.finished(self.state, name, outputs, metrics, digest, self._now_s())
        if stage.kind == "serve":
            applied = {**self.state.applied, name: now.key}
            had = {**self.state.applied_outputs, name: dict(outputs)}
            self.state = self.state.model_copy(update={"applied": applied, "applied_outputs": had})

    def _fail(self, name: str, reason: str, *, is_final: bool = False) -> None:
        stage = self.flow.stages[name]
        self.state = changes.failed(self.state, name, stage, _short(reason), self._now_s(), is_final=is_final)

    def _apply(self, action: StageAction) -> None:
        name = action.stage
        if action.kind == "skip":
            self.state = changes.skipped(self.state, name, _short(action.reason), self._now_s())
        elif action.kind == "fail":
            self._fail(name, action.reason, is_final=True)
        elif action.kind == "begin":
            self._begin(name)
        elif action.kind == "submit":
            self._submit(name)
        elif action.trial is None:
            self._fail(name, action.reason, is_final=True)
        else:
            best = self.state.stages[name].trials[action.trial]
            self.state = self.state.with_stage(name, job=best.job)
            self._finish(name, best.outputs, {**best.metrics, **self._sweep_metrics(name, action.trial)})

    def _sweep_metrics(self, name: str, best: int) -> dict[str, float]:
        stage, trials = self.flow.stages[name], self.state.stages[name].trials
        assert stage.sweep is not None
        found = {"trial": float(best), "trials": float(len(trials))}
        value = trials[best].value
        if value is not None:
            found[stage.sweep.metric] = value
        if steps := self._steps(name):
            found["sweep_cost"] = sum(trial.steps for trial in trials) / (steps * len(trials))
        return found

    def _begin(self, name: str) -> None:
        stage = self.flow.stages[name]
        try:
            key = key_of(self.flow, self.state, name, self._code_of(name) if stage.kind == "script" else "")
        except _PASSES:
            raise
        except RaytideError as error:
            self._fail(name, str(error), is_final=isinstance(error, UsageError))
            return
        except KeyError as error:
            self._fail(name, f"it refers to the metric {error.args[0]}, which was not reported", is_final=True)
            return
        if self._is_known(name, key):
            return
        self.state = changes.begun(self.state, name, key, self._now_s())
        self._store()
        if stage.sweep is None:
            self._submit(name)

    def _is_known(self, name: str, key: str) -> bool:
        """Returns whether the result of the stage exists already; if so, the stage is recorded as done with that
        result.
        """
        stage, now_s = self.flow.stages[name], self._now_s()
        if stage.kind == "serve":
            if not stage.cache or self.state.applied.get(name) != key or self.state.cycle == 1:
                return False
            unknown = {"name": str(self._spec(name).get("name", "")), "url": ""}
            done = self.state.applied_outputs.get(name, unknown)
            self.state = changes.finished(self.state, name, done, {}, key, now_s, key=key, is_cached=True)
            return True
        if stage.kind in NEVER_CACHED or not stage.cache:
            return False
        if (record := record_of(self.flow, key)) is None:
            return False
        more = {"key": key, "is_cached": True, "job": record.job}
        self.state = changes.finished(self.state, name, record.outputs, record.metrics, record.digest, now_s, **more)
        return True

    def _submit(self, name: str) -> None:
        try:
            job = self._runner.submit(self._task(name))
        except _PASSES as error:
            self.state = self.state.with_stage(name, reason=_short(f"its submission waits: {error}"))
        except RaytideError as error:
            self._fail(name, str(error), is_final=isinstance(error, UsageError))
        else:
            self.state = self.state.with_stage(name, job=job, reason="")
            self._store()

    def _apply_trial(self, action: TrialAction) -> None:
        name, number = action.stage, action.number
        sweep, trials = self.flow.stages[name].sweep, self.state.stages[name].trials
        assert sweep is not None
        if action.kind == "end":
            self._runner.stop(self._trial_task(name, number), trials[number].job)
            self.state = self.state.with_trial(name, number, status="ended", reason=action.reason)
            return
        if action.kind == "begin":
            trial = TrialState(params=suggest(sweep, number, past_trials(trials)))
            self.state = self.state.with_stage(name, trials=(*trials, trial))
        elif action.kind == "retry":
            attempt = trials[number].attempt + 1
            self.state = self.state.with_trial(name, number, attempt=attempt, retry_at_s=None, job="")
        self._store()
        try:
            job = self._runner.submit(self._trial_task(name, number))
        except _PASSES as error:
            self.state = self.state.with_trial(name, number, reason=_short(f"its submission waits: {error}"))
        except RaytideError as error:
            self._fail_trial(name, number, str(error))
        else:
            self.state = self.state.with_trial(name, number, job=job, reason="")
            self._store()

    def _fail_trial(self, name: str, number: int, reason: str) -> None:
        stage = self.flow.stages[name]
        self.state = changes.trial_failed(self.state, name, number, stage, _short(reason), self._now_s())

    def _look_at_trial(self, name: str, number: int, trial: TrialState) -> None:
        stage = self.flow.stages[name]
        assert stage.sweep is not None
        report = self._runner.look(self._trial_task(name, number), trial.job, stage.sweep.metric)
        rungs = {**reached(report.curve, stage.sweep.rungs(self._steps(name))), **trial.rungs}
        steps = max(trial.steps, report.curve[-1][0] if report.curve else 0)
        self.state = self.state.with_trial(name, number, rungs=rungs, steps=steps)
        if report.status == "done":
            self._end_trial(name, number, report)
        elif report.status != "running":
            self._fail_trial(name, number, report.reason)

    def _end_trial(self, name: str, number: int, report: StageReport) -> None:
        sweep = self.flow.stages[name].sweep
        assert sweep is not None
        if report.curve:
            value = smoothed(report.curve, report.curve[-1][0])
        else:
            value = report.metrics.get(sweep.metric)
        if value is None:
            self._fail_trial(name, number, f"it ended without a finite {sweep.metric}")
            return
        done = {"value": value, "outputs": dict(report.outputs), "metrics": dict(report.metrics), "reason": ""}
        self.state = self.state.with_trial(name, number, status="done", **done)

    def _spec(self, name: str) -> dict[str, object]:
        """Returns the spec of a stage whose needs are done, without references."""

        def lookup(reference: Reference) -> object:
            if reference.stage == PARAMS:
                return self.flow.params[reference.name]
            before = self.state.stages[reference.stage]
            kind, _, metric = reference.name.partition(".")
            return before.metrics[metric] if kind == METRICS else before.outputs[reference.name]

        spec = resolved(self.flow.stages[name].spec, lookup)
        assert isinstance(spec, dict)  # as the stage's spec is
        return spec

    def _steps(self, name: str) -> int:
        """Returns the number of steps of a whole trial, from which the rungs are computed; 0 if the spec does not
        contain it.
        """
        steps = self._spec(name).get("steps")
        return steps if isinstance(steps, int) else 0

    def _task(self, name: str) -> StageTask:
        now = self.state.stages[name]
        key = f"{self.state.run}-{self.state.cycle}-{name}-{now.attempt}"
        return self._task_of(name, f"{self.flow.name}-{name}", self._spec(name), "", key)

    def _trial_task(self, name: str, number: int) -> StageTask:
        trial, spec = self.state.stages[name].trials[number], self._spec(name)
        for path, value in trial.params.items():
            spec = with_value(spec, path, value)
        key = f"{self.state.run}-{self.state.cycle}-{name}-trial-{number}-{trial.attempt}"
        return self._task_of(name, f"{self.flow.name}-{name}-{number}", spec, f"/trial-{number}", key)

    def _task_of(self, name: str, job: str, spec: dict[str, object], below: str, key: str) -> StageTask:
        out = folder_of(self.flow, name, self.state.stages[name].key) + below
        labels = {"flow": self.flow.name, "stage": name}
        return StageTask(job, self.flow.stages[name], spec, out, key, self.flow.team, labels)


def _short(reason: str) -> str:
    return shortened(reason.strip(), _MOST_REASON)
