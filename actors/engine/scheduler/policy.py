"""The order in which sequences are served. Lower levels go first. Within a level, the earlier deadline or arrival goes
first.

The level of a waiting request is its priority, less one for each `ageing_s` seconds that it has waited. The level stays
fixed while the sequence runs. A request that started because it had waited long is therefore not evicted by the next
request of the same priority.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytide.actors.engine.limits import MAX_PRIORITY
from raytide.actors.engine.sequence import Rank, Sequence

MOST_EVICTIONS = 3
"""The most evictions of one sequence; after them it is not evicted again."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """A scheduling policy. `fcfs` ignores priorities and deadlines. With `deadline`, a request without a deadline
    counts as due `ageing_s` seconds after its arrival. Requests with deadlines therefore cannot starve it.
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
        """Returns the level of a waiting sequence at `now_s`."""
        if self.kind == "fcfs":
            return 0
        waited_s = max(0.0, seq.waited_s + now_s - seq.waiting_since_s)
        return self.priority(seq) - int(waited_s / self.ageing_s)

    def rank(self, seq: Sequence) -> Rank:
        """Returns a running sequence's rank. A sequence may take blocks from sequences with a later rank. Sequences
        that were evicted three times are protected and have the first ranks.
        """
        return (-math.inf if is_protected(seq) else seq.level), self.due_s(seq), seq.arrival

    def may_evict(self, waiting: Sequence, level: int, running: Sequence) -> bool:
        """Returns whether a waiting sequence may evict a running sequence. The waiting sequence must have both the
        better priority and the better level. A better level alone is not enough, because a level improves while its
        sequence waits.
        """
        return self.priority(waiting) < self.priority(running) and level < running.rank[0]


def is_protected(seq: Sequence) -> bool:
    return seq.preemptions >= MOST_EVICTIONS
