"""One pass over the queue: everybody in order takes room that is free, or room that lower ones give way for. Pure.

It knows nothing of nodes: a Floor says what fits. The live queue's floor has nodes, quotas and budgets (`floor.py`),
the simulator's counts GPUs.

There is no cycle: at one instant who gives way stands below, in one order, whom it gives way to; later it preempts
nobody until its cool-down is over; and nobody is preempted more than `MAX_PREEMPTIONS` times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from raytide.jobs.admission.priority import Ints, QueueTable, ranked, waiting

Victims = Callable[[], Ints]
"""Who gives way, the first one first."""


class Capacity(Protocol):
    def first(self, waiting: Ints) -> int | None:
        """The place in `waiting` of the first that may find room; those before it are passed over."""
        ...

    def admit(self, row: int) -> bool:
        """Take room that is free for a waiting row."""
        ...

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
        """Take room that `victims` give way for: the first of them, and as few as will do.

        Those that give way whole are returned; none when it takes none, or when it was enough that some shrink.
        """
        ...


def run_cycle(claims: QueueTable, floor: Capacity) -> Ints:
    """Seat whom there is room for, in the order that is returned. What came of it is the floor's to tell."""
    order = ranked(claims)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    there = claims.is_held & claims.is_preemptible & ~claims.is_urgent
    lowest = order[there[order]][::-1]
    height = -rank[lowest]
    tried = left = waiting(claims, order)
    while (at := floor.first(left)) is not None:
        row, left = int(left[at]), left[at + 1 :]
        if floor.admit(row):
            continue
        if gone := floor.preempt(row, partial(_below, claims, lowest, height, row, rank)):
            there[list(gone)] = False
            stay = there[lowest]
            lowest, height = lowest[stay], height[stay]
    return tried


def _below(claims: QueueTable, lowest: Ints, height: Ints, row: int, rank: Ints) -> Ints:
    """Who gives way to the row, of those after it in the order: the lowest class and band first, within one who came
    last. `lowest`: everybody who does, in that order. `height`: where they stand."""
    return lowest[: 0 if claims.in_cooldown[row] else height.searchsorted(-rank[row])]
