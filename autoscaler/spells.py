"""What is learned of a spot market by watching it: how soon a spell ends, by how long it has lasted.

Spells are heavy-tailed: what has lived long goes on living, so the hazard is kept by age. The market is watched through
the eyes of one holder who takes the zone least likely to go, keeps it until it is lost, and then takes the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

AGES_S = (0.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 57600.0)
"""Where each age band begins."""
BANDS = len(AGES_S)
HALF_LIFE_S = 7 * 86400.0
"""What was seen so long ago counts half."""
PRIOR_EVENTS = 1.0
"""The prior of each band weighs as much as so many ends of spells."""
_PRIOR_SCALE_S = 1800.0
_PRIOR_SHAPE = 0.7
_BOUNDS = np.asarray(AGES_S[1:])
_MIDDLES = np.asarray([*((a + b) / 2 for a, b in pairwise(AGES_S)), AGES_S[-1] * 1.5])

Floats = NDArray[np.float64]

PRIOR_HAZARD = _PRIOR_SHAPE / (_PRIOR_SCALE_S + _MIDDLES)
"""Ends per second of a Lomax law, before anything is seen: half the spells end within the hour, some last for days."""


def band(age_s: float) -> int:
    """The age band of a spell."""
    return int(np.searchsorted(_BOUNDS, age_s, side="right"))


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """The learned rates, each a second and by age band."""

    lost: Floats
    """A held zone goes and none other is there."""
    switched: Floats
    """A held zone goes while another is there; by band of the held one, then of the other."""
    found: Floats
    """Some zone comes back while none is there; by the age of the drought."""
    zone_hazard: Floats
    """By zone and band: how soon that zone goes."""


class Spells:
    """Watches the zones of one market. What it learned up to a moment depends on nothing later."""

    def __init__(self, zones: int) -> None:
        self.up = np.zeros(zones, dtype=bool)
        self.since_s = np.full(zones, np.nan)
        self.at_s = np.nan
        self._weight = 1.0
        self._held: int | None = None
        self._none_since_s = np.nan
        self._zone_ends = np.zeros((zones, BANDS))
        self._zone_seconds = np.zeros((zones, BANDS))
        self._lost = np.zeros(BANDS)
        self._switched = np.zeros((BANDS, BANDS))
        self._held_seconds = np.zeros(BANDS)
        self._found = np.zeros(BANDS)
        self._none_seconds = np.zeros(BANDS)

    def observe(self, at_s: float, up: Sequence[bool] | NDArray[np.bool_]) -> None:
        """Which zones can be had now. Calls come in order of time; a state holds until the next call."""
        now = np.asarray(up, dtype=bool)
        if np.isnan(self.at_s):
            self.since_s[:] = at_s
            self._none_since_s = at_s
        else:
            self._learn(at_s, now)
        self.since_s[now != self.up] = at_s
        self.up, self.at_s = now.copy(), at_s
        if self._held is None or not now[self._held]:
            was_held, self._held = self._held, self.best()
            if self._held is None and was_held is not None:
                self._none_since_s = at_s

    def ages_s(self) -> Floats:
        """How long each zone has been as it is."""
        return np.asarray(self.at_s - self.since_s)

    def drought_s(self) -> float:
        """How long no zone has been there; 0 when one is."""
        return 0.0 if self.up.any() else float(self.at_s - self.since_s.max())

    def best(self, hazard: Floats | None = None) -> int | None:
        """The zone that is there and least likely to go, the older one of equals."""
        there = np.flatnonzero(self.up)
        if not len(there):
            return None
        if len(there) == 1:
            return int(there[0])
        hazard = self._zone_hazard() if hazard is None else hazard
        ages = self.ages_s()
        return int(min(there, key=lambda zone: (hazard[zone, band(ages[zone])], -ages[zone], zone)))

    def market(self) -> Market:
        prior = PRIOR_EVENTS * self._weight
        ends = self._lost + self._switched.sum(axis=1)
        hazard = (ends + prior) / (self._held_seconds + prior / PRIOR_HAZARD)
        others = len(self.up) - 1
        share = (self._switched.sum(axis=1) + prior * others / (others + 2)) / (ends + prior)
        landing = self._switched + np.eye(1, BANDS) * prior * 1e-3
        landing /= landing.sum(axis=1, keepdims=True)
        return Market(
            lost=hazard * (1 - share),
            switched=(hazard * share)[:, None] * landing,
            found=(self._found + prior) / (self._none_seconds + prior / PRIOR_HAZARD),
            zone_hazard=self._zone_hazard(),
        )

    def _learn(self, at_s: float, now: NDArray[np.bool_]) -> None:
        seconds = at_s - self.at_s
        self._weight *= 2.0 ** (seconds / HALF_LIFE_S)
        bands = np.searchsorted(_BOUNDS, self.ages_s(), side="right")
        for zone in np.flatnonzero(self.up):
            self._zone_seconds[zone, bands[zone]] += seconds * self._weight
            self._zone_ends[zone, bands[zone]] += self._weight * (not now[zone])
        if self._held is None:
            drought = band(self.at_s - self._none_since_s)
            self._none_seconds[drought] += seconds * self._weight
            self._found[drought] += self._weight * bool(now.any())
            return
        held = bands[self._held]
        self._held_seconds[held] += seconds * self._weight
        if now[self._held]:
            return
        if not now.any():
            self._lost[held] += self._weight
            return
        ages = np.where(now & self.up, at_s - self.since_s, 0.0)
        hazard = self._zone_hazard()
        landed = min(np.flatnonzero(now), key=lambda zone: hazard[zone, band(ages[zone])])
        self._switched[held, band(ages[landed])] += self._weight

    def _zone_hazard(self) -> Floats:
        """Each zone's own, drawn to that of all zones while little of it was seen."""
        prior = PRIOR_EVENTS * self._weight
        ends, seconds = self._zone_ends.sum(axis=0), self._zone_seconds.sum(axis=0)
        common = (ends + prior) / (seconds + prior / PRIOR_HAZARD)
        return np.asarray((self._zone_ends + 2 * prior) / (self._zone_seconds + 2 * prior / common))
