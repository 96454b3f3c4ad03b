"""Asks every rank how it is, one question out at a time, and knows for how long each has been silent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from raytide.actors.trainer.core import Beat
from raytide.actors.trainer.crew import Hand


class Pulse:
    def __init__(self, hands: list[Hand]) -> None:
        self._hands = hands
        self._every_s = max(0.25, 0.005 * len(hands))  # a large gang is asked less often
        self._out: dict[int, tuple[Any, float]] = {}
        self._next_s = dict.fromkeys(range(len(hands)), 0.0)
        self._phase = dict.fromkeys(range(len(hands)), "starting")
        self._still_s = dict.fromkeys(range(len(hands)), 0.0)

    def beats(self, ranks: Iterable[int]) -> list[Beat]:
        """The answers that have come; asks again those of `ranks` whose turn it is."""
        import ray

        now = time.monotonic()
        for rank in ranks:
            if rank not in self._out and now >= self._next_s[rank]:
                self._out[rank] = self._hands[rank].actor.poll.remote(), now
        found = []
        for rank, (ref, _) in list(self._out.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._out[rank]
                self._next_s[rank] = now + self._every_s
                found += self._read(rank, ref)
        return found

    def last(self, timeout_s: float) -> list[Beat]:
        """One more answer from every rank that still gives one."""
        import ray

        refs = {hand.actor.poll.remote(): rank for rank, hand in enumerate(self._hands)}
        refs |= {ref: rank for rank, (ref, _) in self._out.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        return [beat for ref in done for beat in self._read(refs[ref], ref)]

    def silent_s(self, rank: int) -> float:
        """For how long its question has been waiting."""
        return time.monotonic() - self._out[rank][1] if rank in self._out else 0.0

    def phase(self, rank: int) -> str:
        """What it was doing when it was last heard."""
        return self._phase[rank]

    def still_s(self, rank: int) -> float:
        """For how long it had been at the same thing when it was last heard."""
        return self._still_s[rank]

    def _read(self, rank: int, ref: Any) -> list[Beat]:
        import ray

        try:
            beat: Beat = ray.get(ref)
        except ray.exceptions.RayError:
            return []  # a dead rank's `train` says so too, with the reason
        self._still_s[rank] = beat.phase_s
        self._phase[rank] = f"{beat.phase} for {beat.phase_s:.1f} s"
        return [beat]
