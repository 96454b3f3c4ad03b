"""The driver of a flow: `python -m raytide.workflows.driver`, a process on a leased node. It runs the flow's executor,
and stores and reports the flow's state. Between the cycles of a scheduled flow it waits.

The driver has the rights of the flow's job. If it is killed or loses its node, it is started again and continues from
the stored state.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from raytide.control.client import ApiClient
from raytide.core.clock import Clock, SystemClock
from raytide.core.config import environment
from raytide.core.errors import AuthError, ClusterError, DataError, RaytideError, StorageError
from raytide.core.io.storage import cloud_failures, join, read_bytes, write_bytes
from raytide.workflows import state as changes
from raytide.workflows.cache import digest_of_code, fingerprint_of_inputs
from raytide.workflows.executor import Executor
from raytide.workflows.spec import FlowSpec, ScheduleSpec
from raytide.workflows.stages.runner import ApiRunner
from raytide.workflows.state import FlowState
from raytide.workflows.view import as_progress

FAILED = 79
"""The exit code of a flow in which a stage failed; the driver is not started again."""
STOPPED = 128 + signal.SIGTERM
"""The exit code after SIGTERM, which does not end the flow: unless the flow's job is stopped, the driver is started
again.
"""
POLL_S = 0.5
_STAYS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of a storage that waiting does not mend. Others, such as a timeout of a file server, pass."""
_AWAY_S = 2.0


@dataclass(frozen=True, slots=True)
class StateFile:
    """The stored state of a run, in `out`/runs/RUN.json. It is replaced atomically."""

    flow: FlowSpec
    run: str

    @property
    def url(self) -> str:
        return join(self.flow.out, "runs", f"{self.run}.json")

    def load(self) -> FlowState | None:
        """Returns the stored state. Returns None if none has been stored yet."""
        try:
            text = read_bytes(self.url)
        except DataError:
            return None
        return FlowState.parse(json.loads(text), where=self.url)

    def save(self, state: FlowState) -> None:
        write_bytes(self.url, state.model_dump_json().encode())


def _to_log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class FlowDriver:
    """Runs the cycles of a flow until the flow is over. A flow with a schedule runs for ever."""

    def __init__(
        self,
        flow: FlowSpec,
        run: str,
        job: str,
        client: ApiClient,
        clock: Clock,
        say: Callable[[str], None] = _to_log,
    ) -> None:
        self._flow, self._job, self._client, self._clock, self._say = flow, job, client, clock, say
        self._file = StateFile(flow, run)
        self._package = str(client.job(job).job.spec.config.get("package", ""))
        self._codes: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        self._stopped = threading.Event()
        self._look_at_s = 0.0
        self._executor = self._executor_of(self._first_state(run))

    def run(self) -> int:
        """Calls `tick` until the flow is over. Returns the process's exit code."""
        while not self._stopped.is_set():
            try:
                with cloud_failures(self._flow.out):
                    code = self.tick()
            except (ClusterError, StorageError, OSError) as error:
                if isinstance(error, _STAYS):
                    raise
                self._say(f"{error}; the flow goes on when that is back")
                self._stopped.wait(_AWAY_S)
                continue
            if code is not None:
                return code
            self._stopped.wait(POLL_S)
        return self._leave()

    def tick(self) -> int | None:
        """Runs all steps that are possible now. Returns the exit code if the flow is over, else None.

        Raises ClusterError or StorageError if the API or the storage is unavailable. The next tick then continues.
        """
        is_over = self._executor.step()
        self._report()
        if not is_over:
            return None
        if self._flow.schedule is not None:
            self._begin_next_cycle_if_due(self._flow.schedule)
            return None
        state = self._executor.state
        for name in state.failed:
            self._say(f"{name} failed: {state.stages[name].reason}")
        return FAILED if state.failed else 0

    def stop(self) -> None:
        """Makes `run` return after the current tick."""
        self._stopped.set()

    def _leave(self) -> int:
        """Stops the stages if the flow's job was asked to stop; returns the exit code. Otherwise the driver is only
        moved to another node, and the stages keep running.
        """
        try:
            if self._client.job(self._job).job.stop_requested:
                self._executor.stop()
                self._report()
        except RaytideError as error:
            self._say(f"its stages may run on: {error}")
        return STOPPED

    def _first_state(self, run: str) -> FlowState:
        state = self._file.load()
        if state is None:
            state = changes.fresh(self._flow, run, self._job)
            state = state.model_copy(update={"inputs": fingerprint_of_inputs(self._flow)})
            if self._flow.schedule is not None and not self._flow.schedule.at_once:
                state = changes.postponed(state)
        elif state.driver != self._job:
            # Its stages may have been stopped while the flow had no process, and may still save their state.
            while any(map(self._is_stopping, _jobs_of(self._flow, state))) and not self._stopped.wait(POLL_S):
                pass
            before = self._executor_of(state)
            before.look()
            state = changes.resumed(before.state, self._job)
        self._file.save(state)
        return state

    def _is_stopping(self, job: str) -> bool:
        try:
            found = self._client.job(job).job
        except ClusterError:
            return True  # the next look asks again
        return found.stop_requested and not found.is_final

    def _executor_of(self, state: FlowState) -> Executor:
        runner = ApiRunner(self._client, self._package)
        return Executor(self._flow, state, runner, self._file.save, self._clock.now_s, self._code_of)

    def _code_of(self, stage: str) -> str:
        if not self._package:
            return ""
        if stage not in self._codes:
            package = self._client.package(self._package)
            for name, each in self._flow.stages.items():
                if each.kind == "script":
                    self._codes[name] = digest_of_code(package, each.code)
        return self._codes[stage]

    def _begin_next_cycle_if_due(self, schedule: ScheduleSpec) -> None:
        state, now_s = self._executor.state, self._clock.now_s()
        if state.next_at_s is None and schedule.cron:
            state = state.model_copy(update={"next_at_s": next_time_s(schedule, now_s)})
            self._executor.state = state
            self._file.save(state)
        inputs = state.inputs
        if schedule.new_data_every_s is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + schedule.new_data_every_s
            inputs = fingerprint_of_inputs(self._flow)
        why = begins_because(schedule, state.next_at_s, now_s, state.inputs, inputs)
        if why:
            state = changes.next_cycle(state, why, inputs)
            self._file.save(state)
            self._executor = self._executor_of(state)
            self._say(f"cycle {state.cycle}: {why}")

    def _report(self) -> None:
        progress = as_progress(self._flow, self._executor.state)
        changed = {name: value for name, value in progress.items() if self._reported.get(name) != value}
        if changed:
            self._client.report(self._job, changed)
            self._reported.update(changed)


def main() -> int:
    """Runs the flow whose spec is in the environment variable RAYTIDE_FLOW, and returns the exit code. SIGTERM ends the
    run after the current tick.
    """
    flow = FlowSpec.parse(json.loads(environment("FLOW") or "{}"), where="RAYTIDE_FLOW")
    try:
        driver = FlowDriver(
            flow, environment("FLOW_RUN") or "", environment("JOB") or "", ApiClient.find(), SystemClock()
        )
        signal.signal(signal.SIGTERM, lambda *_: driver.stop())
        return driver.run()
    except AuthError:
        return 0  # the flow's job is over
    except RaytideError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1 if isinstance(error, ClusterError | StorageError) else FAILED


def _jobs_of(flow: FlowSpec, state: FlowState) -> Iterator[str]:
    """Yields the jobs of the stages and trials that run, or were stopped with the flow."""
    for name, stage in state.stages.items():
        if stage.status in ("running", "failed") and flow.stages[name].kind not in ("register", "serve"):
            trials = (trial.job for trial in stage.trials if trial.status in ("running", "failed"))
            yield from filter(None, (stage.job, *trials))


def next_time_s(schedule: ScheduleSpec, now_s: float) -> float | None:
    """Returns the first time after `now_s` that matches the schedule's cron expression. Returns None if there is no
    expression.
    """
    if not schedule.cron:
        return None
    from cronsim import CronSim

    return next(CronSim(schedule.cron, datetime.fromtimestamp(now_s, UTC))).timestamp()


def begins_because(schedule: ScheduleSpec, next_at_s: float | None, now_s: float, before: str, inputs: str) -> str:
    """Returns the reason why the next cycle begins now. The reason is empty if no cycle begins.

    `before` is the fingerprint of the inputs in the last cycle, and `inputs` is the current fingerprint. Only one cycle
    starts, even if several scheduled times have passed while no driver ran.
    """
    if next_at_s is not None and now_s >= next_at_s:
        return f"the schedule {schedule.cron}"
    if schedule.new_data_every_s is not None and inputs != before:
        return "its inputs changed"
    return ""


if __name__ == "__main__":
    sys.exit(main())
