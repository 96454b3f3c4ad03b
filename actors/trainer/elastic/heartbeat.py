"""Polls every rank, with one call in flight per rank, and tracks how long each has been silent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from raytide.actors.trainer.elastic.worker_group import WorkerHandle
from raytide.actors.trainer.types import WorkerStatus

EVERY_S = 0.25


@dataclass(slots=True)
class LastHeartbeat:
    """The last status of a rank."""

    status: WorkerStatus = field(default_factory=lambda: WorkerStatus(-1, "starting", 0.0))
    polls_outside: int = 0
    """Consecutive polls since the first collective timeout in which the rank was outside of collectives."""

    @property
    def phase(self) -> str:
        return f"{self.status.phase} for {self.status.phase_s:.1f} s"


class HeartbeatMonitor:
    def __init__(self, workers: list[WorkerHandle]) -> None:
        self._workers = workers
        self._every_s = max(EVERY_S, 0.005 * len(workers))  # a large gang is polled less often
        self._pending: dict[int, tuple[Future[WorkerStatus], float]] = {}
        self._next_s = dict.fromkeys(range(len(workers)), 0.0)
        self._last = {rank: LastHeartbeat() for rank in range(len(workers))}
        self._timed_out_at_s: float | None = None

    def poll(self, ranks: Iterable[int]) -> list[WorkerStatus]:
        """Returns the statuses that arrived, and polls those of `ranks` that are due."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._pending and now >= self._next_s[rank]:
                self._pending[rank] = self._workers[rank].call("poll"), now
        found = []
        for rank, (answer, polled_s) in list(self._pending.items()):
            if answer.done():
                del self._pending[rank]
                self._next_s[rank] = now + (self._every_s if self._timed_out_at_s is None else 0.0)
                if answer.exception() is None:  # a dead rank's `train` call reports the reason
                    found.append(self._read(rank, answer.result(), polled_s))
        return found

    def on_collective_timeout(self) -> None:
        """Record that a collective timed out: from now on ranks are polled without delay, to find those outside of
        collectives."""
        if self._timed_out_at_s is None:
            self._timed_out_at_s = time.monotonic()
            self._next_s = dict.fromkeys(self._next_s, 0.0)

    def silent_s(self, rank: int) -> float:
        """Returns the seconds for which the rank's pending poll has been unanswered."""
        return time.monotonic() - self._pending[rank][1] if rank in self._pending else 0.0

    def last(self, rank: int) -> LastHeartbeat:
        return self._last[rank]

    def _read(self, rank: int, status: WorkerStatus, polled_s: float) -> WorkerStatus:
        heartbeat = self._last[rank]
        heartbeat.status = status
        if self._timed_out_at_s is not None and polled_s >= self._timed_out_at_s:
            heartbeat.polls_outside = (
                0 if status.is_waiting or status.phase in ("leaving", "idle") else heartbeat.polls_outside + 1
            )
        return status
