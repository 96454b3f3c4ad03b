"""One scheduling cycle: each waiting row, in order, is admitted to free capacity, or preempts rows that are lower in
the order.

The cycle knows nothing of nodes; its `Capacity` does. The live queue's has nodes, quotas and budgets (`preemption.py`);
the simulator's counts GPUs. Preemption cannot go in circles. Within a cycle, victims are lower in the order than their
preemptor. A preempted job preempts no other until its cool-down is over, and no job is preempted more than
`MAX_PREEMPTIONS` times.
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
        """Returns the index in `waiting` of the first row that may fit; the rows before it are skipped. Returns None if
        none may.
        """
        ...

    def admit(self, row: int) -> bool:
        """Admits a waiting row to free capacity; returns whether it fits."""
        ...

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
        """Admits a row in the place of as few `victims` as necessary, taken in their order.

        Returns the rows that are preempted whole: none if the row was not admitted, or if shrinking gangs was enough.
        """
        ...


def run_cycle(table: QueueTable, capacity: Capacity) -> Ints:
    """Admits the rows that fit; returns all waiting rows in the order in which they were tried."""
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
