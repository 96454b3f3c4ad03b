"""How soon spot nodes are taken back: a rate that falls with the age of a zone's spell, learned from what happened.

A zone that has held nodes for long goes on holding them (the recorded spells are heavy-tailed), so deaths and time are
counted in bins of age over all zones, and each zone has a factor of its own. Both begin at a prior and move with
evidence (gamma priors).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

AGES_S = (900.0, 3600.0, 4 * 3600.0, float("inf"))
"""Upper ends of the bins."""
PRIOR_PER_H = (1.5, 0.8, 0.35, 0.15)
PRIOR_DEATHS = 3.0
"""How many deaths the prior of a bin is worth."""
PRIOR_FACTOR = 2.0
"""The same for a zone's factor, whose prior is 1."""
STALE_S = 600.0
"""A zone in which nothing of ours has run for longer begins a new spell."""


@dataclass(slots=True)
class _Zone:
    since_s: float
    """Since when something of ours has run there, or it took launches."""
    seen_s: float
    deaths: float = 0.0
    expected: float = 0.0
    """Deaths that the rates of all zones would have made it."""


@dataclass(slots=True)
class Hazard:
    deaths: list[float] = field(default_factory=lambda: [PRIOR_DEATHS] * len(AGES_S))
    hours: list[float] = field(default_factory=lambda: [PRIOR_DEATHS / rate for rate in PRIOR_PER_H])
    lost_share: float = 0.8
    """Of a zone's nodes, how many go when one goes."""
    zones: dict[str, _Zone] = field(default_factory=dict)

    def observe(self, held: Mapping[str, int], lost: Mapping[str, int], now_s: float, dt_s: float) -> None:
        """`held`: our nodes by zone now; `lost`: those taken back since the last look."""
        for name in {*held, *lost}:
            zone = self.zones.get(name)
            if zone is None or now_s - zone.seen_s > STALE_S:
                kept = zone or _Zone(now_s, now_s)
                zone = self.zones[name] = _Zone(now_s, now_s, kept.deaths, kept.expected)
            at = _bin(now_s - zone.since_s)
            zone.expected += self.deaths[at] / self.hours[at] * dt_s / 3600.0
            self.hours[at] += dt_s / 3600.0
            zone.seen_s = now_s
            if lost.get(name):
                zone.deaths += 1
                self.deaths[at] += 1
                self._learn_share(lost[name], held.get(name, 0))
                zone.since_s = now_s

    def per_h(self, name: str, now_s: float) -> float:
        """Expected deaths an hour of a zone at its present age; a zone that we do not hold begins at age 0."""
        zone = self.zones.get(name)
        if zone is None:
            return self.deaths[0] / self.hours[0]
        age_s = now_s - zone.since_s if now_s - zone.seen_s <= STALE_S else 0.0
        at = _bin(age_s)
        factor = (zone.deaths + PRIOR_FACTOR) / (zone.expected + PRIOR_FACTOR)
        return factor * self.deaths[at] / self.hours[at]

    def _learn_share(self, lost: int, left: int) -> None:
        if lost + left > 1:
            self.lost_share += 0.05 * (lost / (lost + left) - self.lost_share)


def _bin(age_s: float) -> int:
    return next(at for at, end_s in enumerate(AGES_S) if age_s < end_s)


def holds(names: Iterable[str]) -> dict[str, int]:
    """Nodes by zone."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
