"""What a rank did and does: written by the thread that works, read by the one that answers the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from raytide.actors.trainer.elastic.where import stack_summary
from raytide.actors.trainer.types import StepResult, WorkerStatus


class StatusRecorder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker = 0
        self._generation = -1
        self._phase, self._since_s, self._lap = "idle", time.monotonic(), ""
        self._laps: dict[str, float] = {}
        self._steps: list[StepResult] = []
        self._skipped: list[str] = []
        self._source, self._save_s = "", 0.0

    def open(self, generation: int) -> None:
        """A new generation begins; the thread that calls this is the one that works."""
        with self._lock:
            self._worker, self._generation = threading.get_ident(), generation
            self._laps, self._steps, self._skipped, self._source = {}, [], [], ""

    def enter_phase(self, phase: str, *, lap: str = "") -> None:
        """From now on it is at `phase`; with `lap`, its seconds go under that name once it is over."""
        with self._lock:
            now = time.monotonic()
            if self._lap:
                self._laps[self._lap] = now - self._since_s
            self._phase, self._since_s, self._lap = phase, now, lap

    def restored(self, source: str, skipped: Iterable[str]) -> None:
        with self._lock:
            self._source = source
            self._skipped += skipped

    def record_step(self, result: StepResult, save_s: float) -> None:
        self.enter_phase(f"after step {result.step}")
        with self._lock:
            self._steps.append(result)
            self._save_s = save_s

    def read(self) -> WorkerStatus:
        """Everything since the last look. Steps are handed over once."""
        where, waits = stack_summary(self._worker)
        with self._lock:
            steps, self._steps = self._steps, []
            skipped, self._skipped = self._skipped, []
            return WorkerStatus(
                generation=self._generation,
                phase=self._phase,
                phase_s=time.monotonic() - self._since_s,
                where=where,
                waits=waits,
                steps=steps,
                skipped=skipped,
                laps=dict(self._laps),
                source=self._source,
                save_s=self._save_s,
            )
