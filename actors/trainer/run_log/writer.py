"""Writes a run's log: `metrics.jsonl` (one line per logged step), `events.jsonl` and `run.json` (the run's state).

A step that is repeated after a failure has several lines. The last of them counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raytide.actors.trainer.checkpoint.manifest import sizes_of
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.run_log.mlflow import MlflowRun
from raytide.actors.trainer.types import RunResult, StepResult
from raytide.core.clock import Clock
from raytide.core.errors import ConflictError, RaytideError, StorageError
from raytide.core.io.claim import committing
from raytide.core.io.private_paths import safe_opener
from raytide.core.io.storage import full_disk_is_an_error, join
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from raytide.actors.trainer.data.order.shuffle import Ids
    from raytide.actors.trainer.distributed.process_group import ProcessGroup

_log = logging.getLogger(__name__)
RunState = Literal["running", "done", "failed"]

METRICS, EVENTS, RUN = "metrics.jsonl", "events.jsonl", "run.json"
MOST_STEPS = 10_000
"""The number of recent steps whose times are kept, far more than there are between two checkpoints."""
MOST_KEPT = 100_000
"""The most lines that are kept while the disk is full; the oldest are dropped first. A step's line has half a KiB."""


class LineFile:
    """An append-only file of JSON lines with one writer. A full disk never stops training. Lines that cannot be written
    are kept, and are written together with a later line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """The reason why the last line is not in the file yet; empty if it is."""
        self.dropped = 0
        self._pending: deque[str] = deque()

    def add(self, line: Mapping[str, object]) -> None:
        self._pending.append(json.dumps(_to_json(line)) + "\n")
        if len(self._pending) > MOST_KEPT:
            self._pending.popleft()
            self.dropped += 1
        self.flush()

    def flush(self) -> bool:
        """Writes the lines that are not in the file yet. Returns whether the file now has all lines."""
        if not self._pending:
            return True
        try:
            self._append("".join(self._pending).encode())
        except OSError as error:
            self.problem = f"cannot write {self.path}: {os.strerror(error.errno or 0)}"
            return False
        self._pending.clear()
        self.problem = ""
        return True

    def _append(self, body: bytes) -> None:
        """Appends the whole of `body`, or nothing if that fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = safe_opener(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            before, left = os.fstat(handle).st_size, memoryview(body)
            try:
                while left:
                    left = left[os.write(handle, left) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)


def _to_json(value: object) -> object:
    """Returns the value with floats that JSON cannot represent (NaN, infinity) replaced by None."""
    if isinstance(value, Mapping):
        return {key: _to_json(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StepLog:
    """The log of a run's training steps, `metrics.jsonl`.

    A line is written for every `log_every`-th step, for the last step, and for each step with an evaluation. In a
    gang, rank 0 writes the log. A step's line is stored before the step's checkpoint, so that the log
    is not behind the newest checkpoint even if a process is killed. Only if storing the line takes too long is the
    checkpoint stored first.
    """

    def __init__(self, spec: TrainSpec, clock: Clock, folder: RunFolder) -> None:
        self.spec, self.clock, self.folder = spec, clock, folder
        file = folder.fetch(METRICS)
        _drop_torn_line(file)
        self._lines = LineFile(file)

    def add(self, result: StepResult) -> None:
        due = result.step % self.spec.log_every == 0 or result.step == self.spec.steps
        if result.verdict != "stopped" and (due or result.eval_loss is not None):
            self._lines.add({**result.metrics_line(), "at_s": self.clock.now_s()})
            self.folder.changed(METRICS)
        if self.spec.is_due(self.spec.checkpoint_every, result.step):
            # Other ranks wait in a collective, which must not time out because a store hangs.
            self.folder.flush(self.spec.collective_timeout_s / 2)

    def flush(self) -> None:
        self._lines.flush()


class SampleLog:
    """The log of the sample ids of each step. Each rank that reads samples has a file of its own."""

    def __init__(self, folder: RunFolder, group: ProcessGroup) -> None:
        self._folder, self._name, self._generation = folder, f"samples/{group.rank}.jsonl", group.generation
        self._lines = LineFile(folder.fetch(self._name))

    def add(self, step: int, ids: Ids) -> None:
        """Records the sample ids of step number `step`, counted from 0."""
        self._lines.add({"step": step + 1, "generation": self._generation, "ids": ids.tolist()})
        self._folder.changed(self._name)


class RunLog:
    """The log of a run. The job's driver writes it. If `logs_steps` is false, rank 0 writes the log of the steps
    instead of the driver.
    """

    def __init__(self, spec: TrainSpec, clock: Clock, *, logs_steps: bool = True, claim: str = "") -> None:
        """`claim` is the token of the run's claim on its folders; without one, uploads are not checked."""
        self.spec, self.clock = spec, clock
        self.folder = RunFolder(spec.out, partial(committing, spec.places, claim))
        with full_disk_is_an_error(spec.out):
            self.folder.path.mkdir(parents=True, exist_ok=True)
        self.began_s = clock.now_s()
        self.steps = self.tokens = self.restarts = self.resizes = self.steps_lost = 0
        self.first_loss: float | None = None
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.recovery_s = self.lost_s = 0.0
        """Duration of the longest recovery; seconds of all steps that had to be repeated."""
        self.broke_at_s: float | None = None
        self._done: deque[tuple[int, float]] = deque(maxlen=MOST_STEPS)
        self.step_s: float | None = None
        """Duration of the last step that an earlier driver logged."""
        self.unsaved = ""
        """Reason why the last checkpoint could not be written; empty once a later one succeeds."""
        self.has_been_unsaved = False
        self._events = LineFile(self.folder.fetch(EVENTS))
        self._resume()
        self._log = StepLog(spec, clock, self.folder) if logs_steps else None
        self.mlflow = MlflowRun(spec, spec.mlflow, clock) if spec.mlflow is not None else None

    def step(self, result: StepResult) -> None:
        if result.verdict in ("skipped", "stopped"):
            numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "samples": list(result.samples)}
            self.event("not_applied", step=result.step, verdict=result.verdict, why=result.why, **numbers)
        if result.early_end:
            self.event("early_end", step=result.step, why=result.early_end)
        if result.unsaved and result.unsaved != self.unsaved:
            self.event("not_saved", step=result.step, why=result.unsaved)
        self.unsaved = result.unsaved
        self.has_been_unsaved |= bool(result.unsaved)
        if self._log is not None:
            self._log.add(result)
        if result.verdict == "stopped":
            return
        self.steps = result.step
        self.eval_loss = self.eval_loss if result.eval_loss is None else result.eval_loss
        while self._done and self._done[-1][0] >= result.step:
            self.lost_s += self._done.pop()[1]
        self._done.append((result.step, result.step_s))
        if result.verdict != "skipped":
            self.loss = result.loss
            self.first_loss = result.loss if self.first_loss is None else self.first_loss
            self.tokens += result.tokens

    def event(self, what: str, **details: object) -> None:
        self._events.add({"at_s": self.clock.now_s(), "event": what, **details})
        self.folder.changed(EVENTS)

    def record_recovery(self, seconds: float, steps_lost: int) -> None:
        self.recovery_s = max(self.recovery_s, seconds)
        self.steps_lost += steps_lost

    def result(self) -> RunResult:
        """Returns the run's result so far. It has no `model_dir` if the store cannot be reached."""
        return RunResult(
            steps=self.steps,
            first_loss=self.first_loss,
            loss=self.loss,
            tokens=self.tokens,
            seconds=self.clock.now_s() - self.began_s,
            restarts=self.restarts,
            resizes=self.resizes,
            steps_lost=self.steps_lost,
            recovery_s=self.recovery_s,
            model_dir=join(self.spec.out, "model") if self._has_model() else None,
        )

    def _has_model(self) -> bool:
        store = self.folder.store
        if store is None:
            return (self.folder.path / "model").is_dir()
        try:
            return bool(sizes_of(store, "model"))
        except StorageError as error:
            _log.warning("whether the run has exported a model cannot be seen: %s", error)
            return False

    def log_run(self, train: Callable[[], object]) -> RunResult:
        """Runs `train` and closes the log. The final state is `done`, or `failed` if `train` raises a RaytideError.
        After a ConflictError or an exception that is no RaytideError, no final state is written.
        """
        try:
            try:
                train()
            except ConflictError:  # the files belong to another run now
                raise
            except RaytideError as error:
                self.close("failed", str(error))
                raise
            return self.close("done")
        finally:
            self.folder.close()

    def close(self, state: RunState, reason: str = "") -> RunResult:
        """Writes run.json and returns the run's result. Raises StorageError if the file cannot be written. After a
        failed run, no error is raised, because the run's failure is the error to report.
        """
        if self.mlflow is not None and (lost := self.mlflow.close(done=state == "done")):
            self.event("mlflow", why=lost)
        result = self.result()
        body = {"state": state, "reason": reason, **asdict(result), "spec": self.spec.model_dump(mode="json")}
        self._events.flush()
        if self._log is not None:
            self._log.flush()
        try:
            self._write(json.dumps(body, indent=2) + "\n")
        except StorageError:
            if state == "done":
                raise
        finally:
            self.folder.close()
        return result

    def _write(self, text: str) -> None:
        part = self.folder.path / f"{RUN}.part"
        with full_disk_is_an_error(str(part)):
            try:
                part.write_text(text)
                os.replace(part, self.folder.path / RUN)
            finally:
                part.unlink(missing_ok=True)
        self.folder.changed(RUN)
        if not self.folder.flush():
            problem = self.folder.problem or f"{self.folder.out} does not answer."
            raise StorageError(problem, hint="Start the run again: it has nothing left to train.")

    def mark_finished(self) -> None:
        """Records that all steps are done. Call it if an earlier driver was killed after the last step and could not
        record this. Does nothing for a run that may end early (`eval.patience`).
        """
        if self.spec.eval is None or self.spec.eval.patience is None:
            self.steps = self.spec.steps

    def _resume(self) -> None:
        """Restores the run's steps and losses from its files, which earlier drivers may have written."""
        metrics = self.folder.fetch(METRICS)
        for file in (metrics, self.folder.path / EVENTS):
            _drop_torn_line(file)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if lines:
            last = json.loads(lines[-1])
            self.steps, self.step_s = int(last["step"]), last.get("step_s")
            self.first_loss, self.loss = _first_loss(lines), _first_loss(reversed(lines))
            evaluated = (line["eval_loss"] for line in map(json.loads, reversed(lines)) if "eval_loss" in line)
            self.eval_loss = next(evaluated, None) if self.spec.eval is not None else None


def _first_loss(lines: Iterable[str]) -> float | None:
    """Returns the loss of the first applied step in `lines`; None if there is none."""
    return next((float(line["loss"]) for line in map(json.loads, lines) if "verdict" not in line), None)


def _drop_torn_line(file: Path) -> None:
    """Truncates a half-written last line, which a killed process leaves behind."""
    if not file.exists():
        return
    with open(file, "r+b", opener=safe_opener) as lines:
        if not (body := lines.read()).endswith(b"\n"):
            lines.truncate(body.rfind(b"\n") + 1)
