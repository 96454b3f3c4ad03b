"""Asks every rank how it is, one question out at a time, and knows for how long each has been silent."""

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
    """What a rank said last."""

    beat: WorkerStatus = field(default_factory=lambda: WorkerStatus(-1, "starting", 0.0))
    elsewhere: int = 0
    """Answers in a row, since its peers began to complain, in which it did not wait for them."""

    @property
    def phase(self) -> str:
        return f"{self.beat.phase} for {self.beat.phase_s:.1f} s"


class HeartbeatMonitor:
    def __init__(self, hands: list[WorkerHandle]) -> None:
        self._hands = hands
        self._every_s = max(EVERY_S, 0.005 * len(hands))  # a large gang is asked less often
        self._out: dict[int, tuple[Future[WorkerStatus], float]] = {}
        self._next_s = dict.fromkeys(range(len(hands)), 0.0)
        self._heard = {rank: LastHeartbeat() for rank in range(len(hands))}
        self._complained_s: float | None = None

    def poll(self, ranks: Iterable[int]) -> list[WorkerStatus]:
        """The answers that have come; asks again those of `ranks` whose turn it is."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._out and now >= self._next_s[rank]:
                self._out[rank] = self._hands[rank].call("poll"), now
        found = []
        for rank, (answer, asked_s) in list(self._out.items()):
            if answer.done():
                del self._out[rank]
                self._next_s[rank] = now + (self._every_s if self._complained_s is None else 0.0)
                if answer.exception() is None:  # a dead rank's `train` says so too, with the reason
                    found.append(self._read(rank, answer.result(), asked_s))
        return found

    def complained(self) -> None:
        """Some rank waited for its peers in vain: from now on it matters who is not waiting, and is asked at once."""
        if self._complained_s is None:
            self._complained_s = time.monotonic()
            self._next_s = dict.fromkeys(self._next_s, 0.0)

    def silent_s(self, rank: int) -> float:
        """For how long its question has been waiting."""
        return time.monotonic() - self._out[rank][1] if rank in self._out else 0.0

    def heard(self, rank: int) -> LastHeartbeat:
        return self._heard[rank]

    def _read(self, rank: int, beat: WorkerStatus, asked_s: float) -> WorkerStatus:
        heard = self._heard[rank]
        heard.beat = beat
        if self._complained_s is not None and asked_s >= self._complained_s:
            heard.elsewhere = 0 if beat.waits or beat.phase in ("leaving", "idle") else heard.elsewhere + 1
        return beat
