"""What one missed request is worth in dollars: the dual variable of the wish that a share of them is served in time.

It begins at a guess from what a request costs and moves with what happens: up while more is missed than the target
allows, down while less is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

START = 3.0
"""At the start a miss costs so many times what serving a request on demand costs, over the root of the share of misses
that is allowed: the ever fewer that are late with ever more replicas need no price beyond all measure."""
GAIN = 6.0
"""How far the logarithm moves when a day misses twice what is allowed, times the root of that share: rare misses come
many at once, with a lost zone, and a day of them tells less."""
MOST_UP, MOST_DOWN = math.log(3.0), math.log(8.0)
"""A target that no fleet reaches is not chased at any price."""
_DAY_S = 86400.0


@dataclass(slots=True)
class SloShadowPrice:
    target: float
    moved: float = 0.0
    day_requests: float = 0.0

    def observe(self, requests: int, missed: int, rate_rps: float, dt_s: float) -> None:
        allowed = 1.0 - self.target
        self.day_requests += (rate_rps * _DAY_S - self.day_requests) * min(1.0, dt_s / _DAY_S)
        day = max(self.day_requests, rate_rps * _DAY_S, 1.0)
        step = GAIN * math.sqrt(allowed) * (missed / allowed - requests) / day
        self.moved = min(max(self.moved + step, -MOST_DOWN), MOST_UP)

    def usd(self, request_s: float, ondemand_usd_h: float) -> float:
        """`request_s`: replica-seconds that one request needs."""
        return START * request_s * ondemand_usd_h / 3600.0 / math.sqrt(1.0 - self.target) * math.exp(self.moved)
