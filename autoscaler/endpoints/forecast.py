"""The request rate that is usual now: a mean in which the last quarter of an hour counts most.

Half an hour is better for very bursty requests by a hundredth, and worse for smooth ones by five. Trends, a shorter
memory beside it and yesterday's shape told no more about the time after a cold start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 900.0


@dataclass(slots=True)
class RequestRate:
    _sum: float = 0.0
    _weight: float = 0.0

    def observe(self, requests: int, dt_s: float) -> None:
        if dt_s <= 0:
            return
        fade = math.exp(-dt_s / MEMORY_S)
        self._sum = self._sum * fade + requests / dt_s * (1.0 - fade)
        self._weight = self._weight * fade + 1.0 - fade

    @property
    def rps(self) -> float:
        return self._sum / self._weight if self._weight else 0.0
