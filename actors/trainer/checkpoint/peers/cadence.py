"""Chooses the steps between two snapshots: as few as cost about a hundredth of the training time."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.01
"""The part of the training time that snapshots may cost."""
FIRST = 10
"""Steps between snapshots before anything is known."""
MOST = 1000
HALF_LIFE = 16
"""Half-life of the averages, in samples."""
UNDISTURBED_EVERY = 64
"""A snapshot that is due is left out once in so many steps: a step without one shows what they cost."""


@dataclass(slots=True)
class Average:
    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        """Counts the first samples evenly, and later ones with a weight that halves."""
        self.samples += 1
        self.value += (sample - self.value) * max(1 / self.samples, 1 - 0.5 ** (1 / HALF_LIFE))


class SnapshotCadence:
    """Decides when a snapshot is due. Every rank gives it the same figures, so all decide alike.

    A snapshot costs the time for which the step waits for it (the copy, and an exchange that is still going on), and
    what its exchange in the background takes from the steps beside it: those are slower than others.
    """

    def __init__(self, every: int = FIRST) -> None:
        self.every = every
        self._alone, self._beside, self._stall = Average(), Average(), Average()
        self._undisturbed_at = 0

    def record(self, step_s: float, stall_s: float, is_beside: bool) -> None:
        """Record a step, the time that it waited for a snapshot, and whether one was exchanged beside it."""
        (self._beside if is_beside else self._alone).add(step_s)
        if stall_s:
            self._stall.add(stall_s)
        if self._alone.samples and self._beside.samples:
            slower_s = max(0.0, self._beside.value - self._alone.value)
            cost_s = self._stall.value + slower_s
            self.every = max(1, min(MOST, math.ceil(cost_s / (SHARE * max(self._alone.value, 1e-9)))))

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether to take one after `step`, the one before being of step `last`."""
        if step - last < self.every:
            return False
        if self.every == 1 and step - self._undisturbed_at >= UNDISTURBED_EVERY:
            self._undisturbed_at = step
            return False
        return True
