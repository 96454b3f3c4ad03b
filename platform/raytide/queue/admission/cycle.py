"""One scheduling cycle. Each waiting job, in scheduling order, is admitted to free capacity or preempts jobs that come
later in the order. A job is a row of the queue table.

The cycle does not know nodes. It uses a `Capacity`. The live queue's `Capacity` has nodes, quotas and budgets
(`preemption.py`). The simulator's `Capacity` only counts GPUs.

Preemption cannot go in circles, for three reasons. Within a cycle, a job preempts only jobs that come later in the
order. A preempted job preempts no other until its cool-down is over. No job is preempted more than `MAX_PREEMPTIONS`
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from raytide.queue.admission.priority import Ints, QueueTable, ranked, waiting

Victims = Callable[[], Ints]
"""A function that returns the rows that may be preempted, in the order of preemption."""


class Capacity(Protocol):
    def first(self, waiting: Ints) -> int | None:
        """Returns the index in `waiting` of the first row that may fit. Returns None if no row may fit.

        The cycle skips all rows before that index.
        """
        ...

    def admit(self, row: int) -> bool:
        """Admits a waiting row if it fits into the free capacity. Returns whether it was admitted."""
        ...

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
        """Admits a row by preempting as few of `victims` as necessary, in the order of `victims`.

        Returns the rows that were preempted as a whole. The result is empty in two cases: the row was not admitted, or
        shrinking elastic gangs freed enough capacity.
        """
        ...


def run_cycle(table: QueueTable, capacity: Capacity) -> Ints:
    """Runs one cycle on `capacity`. Returns all waiting rows in the order in which they were tried."""
    order = ranked(table)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    is_candidate = table.is_held & table.is_preemptible & ~table.is_urgent
    lowest = order[is_candidate[order]][::-1]
    height = -rank[lowest]
    tried = left = waiting(table, order)
    while (at := capacity.first(left)) is not None:
        row, left = int(left[at]), left[at + 1 :]
        if capacity.admit(row):
            continue
        if gone := capacity.preempt(row, partial(_below, table, lowest, height, row, rank)):
            is_candidate[list(gone)] = False
            stay = is_candidate[lowest]
            lowest, height = lowest[stay], height[stay]
    return tried


def _below(table: QueueTable, lowest: Ints, height: Ints, row: int, rank: Ints) -> Ints:
    """Returns the candidates that come after this row in the order, last first; none during the row's cool-down."""
    return lowest[: 0 if table.in_cooldown[row] else height.searchsorted(-rank[row])]
