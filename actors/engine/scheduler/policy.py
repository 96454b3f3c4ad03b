"""Who goes first. A lower level goes first; among equals of a level, by deadline or by arrival.

A request's level is its priority, less one for each `ageing_s` that it has waited. It stays what it was when the
sequence began to run: so a request that aged its way in is not thrown out again by the next one of its old betters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytide.actors.engine.limits import MAX_PRIORITY
from raytide.actors.engine.sequence import Rank, Sequence

__all__ = ["MOST_EVICTIONS", "SchedulingPolicy", "is_protected"]

MOST_EVICTIONS = 3
"""A sequence that was evicted this often runs to its end the next time."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """`fcfs` knows neither priorities nor deadlines. A request without a deadline counts as due `ageing_s` after its
    arrival, so that those with one cannot keep it waiting for ever.
    """

    kind: Literal["fcfs", "priority", "deadline"] = "priority"
    ageing_s: float = 30.0

    def priority(self, seq: Sequence) -> int:
        return 0 if self.kind == "fcfs" else max(-MAX_PRIORITY, min(MAX_PRIORITY, seq.priority))

    def due_s(self, seq: Sequence) -> float:
        if self.kind != "deadline":
            return 0.0
        return seq.arrival_s + self.ageing_s if math.isinf(seq.deadline_s) else seq.deadline_s

    def level(self, seq: Sequence, now_s: float) -> int:
        """Of a waiting sequence, now."""
        if self.kind == "fcfs":
            return 0
        waited_s = max(0.0, seq.waited_s + now_s - seq.waiting_since_s)
        return self.priority(seq) - int(waited_s / self.ageing_s)

    def rank(self, seq: Sequence) -> Rank:
        """The order of running sequences: each may take blocks of those after it."""
        return (-math.inf if is_protected(seq) else seq.level), self.due_s(seq), seq.arrival

    def may_evict(self, waiting: Sequence, level: int, running: Sequence) -> bool:
        """Whether a waiting sequence of this level may take a running one's place: ageing alone gives no such right."""
        return self.priority(waiting) < self.priority(running) and level < running.rank[0]


def is_protected(seq: Sequence) -> bool:
    return seq.preemptions >= MOST_EVICTIONS
