"""What would have been missed with 1, 2, 3... replicas: fleets that exist on paper only, fed with what really arrived.

Each paper fleet keeps two numbers, the seconds of prefill and of decode slots that are still to be worked off, and
moves them second by second. What a request would have waited for follows from them, so bursts of any shape are in the
result. The counts are kept by what the forecast for that time had said, so its errors are in the result too.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raytide.autoscaler.replica_target import Floats, MissTable, Service

PRIOR_REQUESTS = 500.0
"""How many requests the queueing formula's word is worth beside what was counted."""
HALF_LIFE_S = 3 * 86400.0
LONGEST_WAIT_S = 120.0
"""A paper fleet that is too small for the day forgets the rest, or it would be late all night."""
LEAST_RPS = 1e-3
_BINS = 64
_RATIO = 1.25


@dataclass(slots=True)
class Shadow:
    most: int
    slots: int
    horizon_s: float
    missed: Floats = field(init=False)
    requests: Floats = field(default_factory=lambda: np.zeros(_BINS))
    _left_s: Floats = field(init=False)
    _servers: Floats = field(init=False)
    _said: deque[tuple[float, float]] = field(default_factory=deque)
    """(the time that it was about, requests a second)"""
    _formula: MissTable | None = None
    _spread: float = 0.0
    _formula_at: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        replicas = np.arange(1, self.most + 1, dtype=float)
        self._servers = np.stack((replicas, replicas * self.slots))
        self._left_s = np.zeros((2, self.most))
        self.missed = np.zeros((self.most, _BINS))

    def observe(
        self, at_s: float, requests: NDArray[np.int64], prefill_s: Floats, service: Service, forecast_rps: float
    ) -> None:
        """`requests` and their `prefill_s`, one entry a second up to now; the forecast is about one horizon ahead."""
        self._said.append((at_s + self.horizon_s, forecast_rps))
        while len(self._said) > 1 and self._said[1][0] <= at_s:
            self._said.popleft()
        decode_s = requests * (service.held_s - service.prefill_s)
        brought_s = np.stack((prefill_s, prefill_s + decode_s), axis=1)[:, :, None]
        residuals_s = (service.prefill_square / service.prefill_s / 2, service.held_square / service.held_s / 2)
        residual_s = np.array(residuals_s)[:, None]
        fade = 0.5 ** (len(requests) / HALF_LIFE_S)
        self.missed *= fade
        self.requests *= fade
        seen = []
        left_s, servers = self._left_s, self._servers
        longest_s = servers * LONGEST_WAIT_S
        for brought, count in zip(brought_s, requests, strict=True):
            if count:
                seen.append(left_s + brought / 2)
                left_s = np.minimum(left_s + brought, longest_s)
            busy = np.minimum(servers, np.maximum(left_s / residual_s, 1.0))
            left_s = np.maximum(left_s - busy, 0.0)
        self._left_s = left_s
        if not seen:
            return
        waits_s = (np.array(seen) / servers - residual_s * (1.0 - 1.0 / servers)).max(axis=1)
        late = np.interp(waits_s, service.slack_s, np.cumsum(service.weight), left=0.0)
        missed = requests[requests > 0] @ late
        low, share = _bin(self._said[0][1])
        for at, weight in ((low, 1.0 - share), (low + 1, share)):
            self.missed[:, at] += weight * missed
            self.requests[at] += weight * requests.sum()

    def trust(self, formula: MissTable, spread: float) -> None:
        """From now on this is believed where little was counted."""
        self._formula, self._spread = formula, spread
        self._formula_at.clear()

    def misses(self, rate_rps: float) -> list[float]:
        """The share that misses with 0, 1, 2... replicas when that rate is forecast."""
        low, share = _bin(rate_rps)
        total = np.zeros(self.most)
        for at, weight in ((low, 1.0 - share), (low + 1, share)):
            counted = self.missed[:, at] + PRIOR_REQUESTS * self._prior(at)
            total += weight * counted / (self.requests[at] + PRIOR_REQUESTS)
        return [1.0, *total.tolist()]

    def _prior(self, at: int) -> Floats:
        if self._formula is None:
            return np.zeros(self.most)
        if at not in self._formula_at:
            self._formula_at[at] = self._formula.misses(LEAST_RPS * _RATIO**at, self._spread)[1:]
        return self._formula_at[at]


def _bin(rate_rps: float) -> tuple[int, float]:
    at = math.log(max(rate_rps, LEAST_RPS) / LEAST_RPS) / math.log(_RATIO)
    low = min(int(at), _BINS - 2)
    return low, min(at - low, 1.0)
