"""Estimates the time of a step from its number of rows. The estimate is learned from the engine's own steps."""

from __future__ import annotations

from bisect import bisect_left

_LEARNED_FROM_FASTER, _LEARNED_FROM_SLOWER = 0.2, 0.05
"""The weights of a new measurement in the estimate: one that is faster than expected, and one that is slower. A slow
one may be due to other work on the machine, so it weighs less.
"""
_MOST_JUMP = 2.0
"""The largest factor by which a measurement may differ from the estimate; a larger difference counts as this one,
because a busy machine causes outliers of any size.
"""
_STALE_AFTER = 256
"""The number of measurements after which a number of rows that was not among them is forgotten, so that it is guessed
and tried again.
"""


class StepCost:
    """Estimates the time of a step in seconds from its number of rows: `factor * (1 + row_cost * (rows - 1))`. The
    factor is learned from measured steps, for each number of rows. A first guess that is too low is corrected within a
    few steps.

    Only decode steps are measured, with or without drafts, because a prompt's attention costs more than its rows
    suggest.
    """

    def __init__(self, row_cost: float = 0.25) -> None:
        self._row_cost = row_cost
        self._rows: list[int] = []  # that were measured, in order
        self._factors: dict[int, float] = {}  # measured over the shape
        self._seen: dict[int, int] = {}
        self._count = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Updates the estimates with the measured time of a step."""
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
        """Returns the estimated seconds of a step. Before any measurement, the result is not in seconds, but in
        multiples of the time of a step with one row.
        """
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
    """Returns the rounded number of rows under which a step is recorded: there are eight values for each doubling."""
    unit = 1 << max(0, rows.bit_length() - 4)
    return rows // unit * unit
