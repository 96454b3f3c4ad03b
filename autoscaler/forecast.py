"""The request rate one cold start ahead: lines through the recent past, the one whose length has been right so far.

Weighted least squares, with weights that fall by e over minutes; a short memory follows ramps, a long one sees through
bursts. Each is judged by the rate that came, as a logarithm, the last day counting most.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MEMORY_S = 900.0
MEMORIES_S = (300.0, 900.0, 2400.0)
LEAST_RPS = 1e-3
_JUDGED_OVER_S = 600.0
_DAY_S = 86400.0


@dataclass(slots=True)
class UsualRate:
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


@dataclass(slots=True)
class _Line:
    """Exponentially weighted sums for rate = level + slope * (t - now)."""

    memory_s: float
    weight: float = 0.0
    t: float = 0.0
    tt: float = 0.0
    y: float = 0.0
    ty: float = 0.0

    def observe(self, rate: float, dt_s: float) -> None:
        fade = math.exp(-dt_s / self.memory_s)
        middle = -dt_s / 2
        moved_tt = self.tt - 2 * dt_s * self.t + dt_s * dt_s * self.weight  # the past is dt further back
        moved_t, moved_ty = self.t - dt_s * self.weight, self.ty - dt_s * self.y
        self.weight = self.weight * fade + dt_s
        self.t = moved_t * fade + dt_s * middle
        self.tt = moved_tt * fade + dt_s * middle * middle
        self.y = self.y * fade + dt_s * rate
        self.ty = moved_ty * fade + dt_s * rate * middle

    @property
    def level(self) -> float:
        return self.y / self.weight if self.weight else 0.0

    def ahead(self, trend: _Line, horizon_s: float) -> float:
        """Its level moved along the slope of a longer line, by no more than a factor of two."""
        spread = trend.weight * trend.tt - trend.t * trend.t
        slope = (trend.weight * trend.ty - trend.t * trend.y) / spread if spread > 0 else 0.0
        moved = self.level + slope * (horizon_s - self.t / self.weight)
        return max(min(max(moved, self.level / 2), self.level * 2), LEAST_RPS)


@dataclass(slots=True)
class _Guess:
    """One memory: its line, a longer one for the trend, and how wrong it was."""

    level: _Line
    trend: _Line
    due: deque[tuple[float, float]] = field(default_factory=deque)
    """(when it is judged, what it said)"""
    square: float = 0.15**2


def _guesses() -> list[_Guess]:
    return [_Guess(_Line(memory_s), _Line(3 * memory_s)) for memory_s in MEMORIES_S]


@dataclass(slots=True)
class Forecast:
    horizon_s: float
    rate_rps: float = LEAST_RPS
    """One horizon from now."""
    spread: float = 0.15
    """Standard deviation of the logarithm of what comes over what was forecast."""
    _guesses: list[_Guess] = field(default_factory=_guesses)
    _recent: _Line = field(default_factory=lambda: _Line(_JUDGED_OVER_S))

    def observe(self, at_s: float, requests: int, dt_s: float) -> None:
        if dt_s <= 0:
            return
        self._recent.observe(requests / dt_s, dt_s)
        came = math.log(max(self._recent.level, LEAST_RPS))
        learn = min(1.0, 2 * dt_s / _DAY_S)
        for guess in self._guesses:
            guess.level.observe(requests / dt_s, dt_s)
            guess.trend.observe(requests / dt_s, dt_s)
            while guess.due and guess.due[0][0] <= at_s:
                wrong = came - math.log(guess.due.popleft()[1])
                guess.square += (min(wrong * wrong, 1.0) - guess.square) * learn
            said = guess.level.ahead(guess.trend, self.horizon_s)
            guess.due.append((at_s + self.horizon_s + _JUDGED_OVER_S, said))
        best = min(self._guesses, key=lambda guess: guess.square)
        self.rate_rps, self.spread = best.due[-1][1], math.sqrt(best.square)
