"""The seconds that a step takes by its rows, learned from the engine's own steps."""

from __future__ import annotations

from bisect import bisect_left

_LEARNED_FROM_FASTER, _LEARNED_FROM_SLOWER = 0.2, 0.05
"""The weight of a new measurement: what other work on the machine adds says nothing about rows."""
_MOST_JUMP = 2.0
"""A measurement that is further off counts as this far: a busy machine makes some of any size."""
_STALE_AFTER = 256
"""Measurements after which a number of rows that had none is guessed again, which tries it again."""


class StepCost:
    """Estimates a step's seconds: 1 + `row_cost` x (rows - 1) in shape, corrected where steps of about so many rows
    were measured. A first guess that is too low is tried and corrected within a few steps.

    Only steps of decodes are measured, with or without drafts: a prompt's attention costs more than its rows.
    """

    def __init__(self, row_cost: float = 0.25) -> None:
        self._row_cost = row_cost
        self._rows: list[int] = []  # that were measured, in order
        self._factors: dict[int, float] = {}  # measured over the shape
        self._seen: dict[int, int] = {}
        self._count = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a step."""
        rows, self._count = _rounded(rows), self._count + 1
        expected = self.seconds(rows) if self._rows else seconds
        bounded = min(max(seconds, expected / _MOST_JUMP), expected * _MOST_JUMP)
        if rows not in self._factors:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            expected = bounded
        weight = _LEARNED_FROM_FASTER if bounded < expected else _LEARNED_FROM_SLOWER
        self._factors[rows] = (expected + weight * (bounded - expected)) / self._shape(rows)
        self._seen[rows] = self._count
        if self._count % _STALE_AFTER == 0:
            for stale in [each for each in self._rows if self._seen[each] <= self._count - _STALE_AFTER]:
                self._rows.remove(stale)
                del self._factors[stale], self._seen[stale]

    def seconds(self, rows: int) -> float:
        """Returns the estimate; in units of a step of one row before anything was measured."""
        measured = self._rows
        if not measured:
            return self._shape(rows)
        at = bisect_left(measured, rows)
        if at == 0:
            factor = self._factors[measured[0]]
        elif at == len(measured):
            factor = self._factors[measured[-1]]
        else:
            low, high = measured[at - 1], measured[at]
            part = (rows - low) / (high - low)
            factor = (1 - part) * self._factors[low] + part * self._factors[high]
        return factor * self._shape(rows)

    def _shape(self, rows: int) -> float:
        return 1.0 + self._row_cost * (rows - 1)


def _rounded(rows: int) -> int:
    """Returns the rows under which a step is remembered: eight for each doubling."""
    unit = 1 << max(0, rows.bit_length() - 4)
    return rows // unit * unit
