"""The hazard of spot reclaims by zone and age, and the correlation of reclaims within a region.

The longer a zone has held nodes, the longer it tends to keep them (recorded intervals are heavy-tailed). The common
reclaim rate of all zones therefore depends on this age. The common rate of an age bin is the number of reclaims
divided by the hours in which zones of that age held nodes. The rate of one zone is the common rate times a factor of
that zone. Rates and factors have gamma priors. Zones of one region are often lost together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.hardware.transfer import region

AGES_S = (900.0, 3600.0, 4 * 3600.0, float("inf"))
"""The upper ends of the age bins, in seconds."""
PRIOR_PER_H = (1.5, 0.8, 0.35, 0.15)
PRIOR_RECLAIMS = 3.0
"""The weight of a bin's prior, in reclaims."""
PRIOR_FACTOR = 2.0
"""The weight of a zone factor's prior, which is 1."""
PRIOR_CORRELATION, PRIOR_LOSSES = 0.4, 5.0
"""The probability that another zone of the region is lost too, and the weight of this prior in losses."""
CORRELATION_WINDOW_S = 600.0
"""The time within which losses count as correlated."""
STALE_S = 600.0
"""The time without a node after which a zone starts again at age 0."""


@dataclass(slots=True)
class _Zone:
    since_s: float
    """The time since which nodes have run in the zone, or launches there have succeeded."""
    seen_s: float
    lost_s: float = -math.inf
    """The time of the last reclaim of a node."""
    reclaims: float = 0.0
    expected: float = 0.0
    """Reclaims expected at the rates of all zones."""


@dataclass(slots=True)
class ReclaimHazard:
    reclaims: list[float] = field(default_factory=lambda: [PRIOR_RECLAIMS] * len(AGES_S))
    hours: list[float] = field(default_factory=lambda: [PRIOR_RECLAIMS / rate for rate in PRIOR_PER_H])
    lost_share: float = 0.8
    """Share of a zone's nodes that is lost together."""
    zones: dict[str, _Zone] = field(default_factory=dict)
    _correlated_losses: float = PRIOR_CORRELATION * PRIOR_LOSSES
    _losses: float = PRIOR_LOSSES

    def observe(self, held: Mapping[str, float], lost: Mapping[str, int], now_s: float, dt_s: float) -> None:
        """Updates the hazards. `held` is the number of nodes in each zone now. `lost` is the number of nodes in each
        zone that were reclaimed since the last call. `dt_s` is the time since the last call in seconds.
        """
        for name in sorted({*held, *lost}):
            zone = self.zones.get(name)
            if zone is None or now_s - zone.seen_s > STALE_S:
                kept = zone or _Zone(now_s, now_s)
                zone = self.zones[name] = _Zone(now_s, now_s, kept.lost_s, kept.reclaims, kept.expected)
            at = _bin(now_s - zone.since_s)
            zone.expected += self.reclaims[at] / self.hours[at] * dt_s / 3600.0
            self.hours[at] += dt_s / 3600.0
            zone.seen_s = now_s
            if lost.get(name):
                zone.reclaims += 1
                self.reclaims[at] += 1
                self._learn_share(lost[name], held.get(name, 0))
                zone.since_s = now_s
        for name in lost:
            self._learn_correlation(name, held, lost, now_s)
        for name in lost:
            self.zones[name].lost_s = now_s

    @property
    def region_correlation(self) -> float:
        """The probability that another zone of the region is lost when one zone is lost."""
        return min(1.0, self._correlated_losses / self._losses)

    def losses(
        self, held: Mapping[str, float], now_s: float, recovery_s: float
    ) -> Iterator[tuple[float, Sequence[str]]]:
        """Yields pairs (share of the time, zones) for the zones in `held`. A pair means that the nodes of these zones
        are expected to be lost for this share of the time. A loss counts for `recovery_s` seconds.

        In each region, a pair with a single zone stands for the loss of that zone alone. If the region has several
        zones, its last pair stands for the loss of all of them together.
        """
        return losses({zone: self.per_h(zone, now_s) for zone in held}, self.region_correlation, recovery_s)

    def per_h(self, name: str, now_s: float) -> float:
        """Returns the expected reclaims per hour of a zone. The rate depends on the zone's age: the time for which
        nodes have been held there without a reclaim. A zone that had no nodes lately has age 0.
        """
        zone = self.zones.get(name)
        if zone is None:
            return self.reclaims[0] / self.hours[0]
        age_s = now_s - zone.since_s if now_s - zone.seen_s <= STALE_S else 0.0
        at = _bin(age_s)
        factor = (zone.reclaims + PRIOR_FACTOR) / (zone.expected + PRIOR_FACTOR)
        return factor * self.reclaims[at] / self.hours[at]

    def _learn_correlation(self, name: str, held: Mapping[str, float], lost: Mapping[str, int], now_s: float) -> None:
        """Counts, for each other zone of the region that held nodes, whether it was lost together with this zone."""
        for other, zone in self.zones.items():
            if other == name or region(other) != region(name):
                continue
            before = now_s - zone.lost_s <= CORRELATION_WINDOW_S and other not in lost
            if before or other in lost or held.get(other):
                self._losses += 1
                self._correlated_losses += 2 if before else other in lost  # the one before had counted as alone

    def _learn_share(self, lost: int, left: float) -> None:
        if lost + left > 1:
            self.lost_share += 0.05 * (lost / (lost + left) - self.lost_share)


def losses(
    deaths_per_h: Mapping[str, float], together: float, recovery_s: float
) -> Iterator[tuple[float, Sequence[str]]]:
    """Yields pairs (share, zones). The nodes of these zones are lost for this share of the time.

    Each region first yields one pair for each zone, for the loss of that zone alone. A region with several zones
    then yields one more pair, for the loss of all its zones together.
    """
    regions: dict[str, list[str]] = {}
    for zone in deaths_per_h:
        regions.setdefault(region(zone), []).append(zone)
    for zones in regions.values():
        shares = [min(1.0, deaths_per_h[zone] * recovery_s / 3600.0) for zone in zones]
        alone = 1.0 - together if len(zones) > 1 else 1.0
        yield from ((share * alone, (zone,)) for share, zone in zip(shares, zones, strict=True))
        if len(zones) > 1:
            yield sum(shares) * together / len(zones), zones


def pool_name(node_type: str, zone: str) -> str:
    """Returns the name of a spot pool, `<node type>/<zone>`. Pools of one node type in one region share a prefix."""
    return f"{node_type}/{zone}"


def _bin(age_s: float) -> int:
    return next(at for at, end_s in enumerate(AGES_S) if age_s < end_s)
