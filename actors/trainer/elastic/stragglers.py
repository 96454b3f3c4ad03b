"""Finds the slowest rank, for which the other ranks wait, and the peak memory of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from raytide.actors.trainer.elastic.recovery import HALF_LIFE
from raytide.actors.trainer.types import StepResult

_PASSES = 3.0
"""The work of a forward and backward pass, in forward passes."""
LEAST_STEPS = 5


class RankTimes:
    """Two measurements of the ranks of one generation: the time that each rank needs for its own work in a step,
    averaged over recent steps, and the peak memory of the GPUs.
    """

    def __init__(self) -> None:
        self.gpu_bytes = 0
        """The peak memory of the GPU that needed the most; 0 without GPUs."""
        self._own_s: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def record(self, rank: int, steps: Sequence[StepResult]) -> None:
        share = 1.0 - 0.5 ** (1.0 / HALF_LIFE)
        for step in steps:
            self.gpu_bytes = max(self.gpu_bytes, step.gpu_bytes)
            own_s = step.times.get("data", 0.0) + _PASSES * step.forward_s
            before = self._own_s.get(rank, own_s)
            self._own_s[rank] = before + share * (own_s - before)
            self._steps[rank] = self._steps.get(rank, 0) + 1

    def slowest(self) -> tuple[int, float] | None:
        """Returns the slowest rank, and the ratio of its time to the median time of the other ranks. Returns None until
        at least two ranks have done a few steps.
        """
        known = {rank: own_s for rank, own_s in self._own_s.items() if self._steps[rank] >= LEAST_STEPS}
        if len(known) < 2:
            return None
        rank = max(known, key=known.__getitem__)
        others_s = median(own_s for other, own_s in known.items() if other != rank)
        return (rank, known[rank] / others_s) if others_s > 0 else None
