"""A model of one spot market. In each zone, intervals in which spot nodes are available (up) alternate with intervals
in which they are not (down). The model learns the rates at which these intervals end.

Intervals are heavy-tailed (a long one tends to last longer), so each rate depends on the interval's age band. The
model simulates a virtual holder of one spot node. The holder takes the zone with the lowest hazard, keeps that zone
until it is lost, and then takes another zone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

AGES_S = (0.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 57600.0)
"""The lower ends of the age bands, in seconds."""
BANDS = len(AGES_S)
HALF_LIFE_S = 7 * 86400.0
"""The age at which an event counts half."""
LEARN_EVERY_S = 6 * 3600.0
LEARN_GROWTH = 1.1
"""Rates are recomputed after `LEARN_EVERY_S`, or when the number of ends has grown by this factor."""
PRIOR_EVENTS = 1.0
"""The weight of each band's prior, in ends of intervals."""
_PRIOR_SCALE_S = 1800.0
_PRIOR_SHAPE = 0.7
_BOUNDS = np.asarray(AGES_S[1:])
_MIDDLES = np.asarray([*((a + b) / 2 for a, b in pairwise(AGES_S)), AGES_S[-1] * 1.5])

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PRIOR_HAZARD = _PRIOR_SHAPE / (_PRIOR_SCALE_S + _MIDDLES)
"""The prior rate of ends per second in each age band, by a Lomax distribution: half the intervals end within the hour,
some last for days.
"""


def band(age_s: float) -> int:
    """Returns the index of the age band in which `age_s` lies."""
    return bisect_right(AGES_S, age_s, lo=1) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ReclaimRates:
    """The rates at which the zones of one market are lost and become available. They are learned from observations. The
    rates are per second, with one value for each age band.
    """

    lost: Floats
    """The rate at which the held zone is lost while no other is up, by age band."""
    switched: Floats
    """The rate at which the held zone is lost while another is up, by the age band of the held zone,
    then of the other.
    """
    found: Floats
    """The rate at which some zone comes up while none is up, by the age band of the drought."""
    zone_hazard: Floats
    """The rate at which each zone is lost, by zone and age band."""


class AvailabilityModel:
    """The learned availability of one market's zones."""

    def __init__(self, zones: int) -> None:
        self.up = np.zeros(zones, dtype=bool)
        self.since_s = np.full(zones, np.nan)
        self.at_s = np.nan
        self.ends = 0
        """The number of ended intervals of the holder and of ended droughts."""
        self._weight = 1.0  # of a new event; it grows, so that stored sums need no decay
        self._held: int | None = None
        self._gone_since_s = np.nan
        self._zone_ends = np.zeros((zones, BANDS))
        self._zone_seconds = np.zeros((zones, BANDS))
        self._lost = np.zeros(BANDS)
        self._switched = np.zeros((BANDS, BANDS))
        self._held_seconds = np.zeros(BANDS)
        self._found = np.zeros(BANDS)
        self._gone_seconds = np.zeros(BANDS)
        self._learned: tuple[float, int, ReclaimRates] | None = None

    def observe(self, at_s: float, up: Sequence[bool] | NDArray[np.bool_]) -> None:
        """Records which zones are up. Calls must be in order of time. If a zone has changed its state since the
        previous call, the change is assumed to have happened halfway between the two calls.
        """
        now = np.asarray(up, dtype=bool)
        if np.isnan(self.at_s):
            self.since_s[:] = self._gone_since_s = self.at_s = at_s
            self.up = now.copy()
            self._held = self._best()
            return
        bands, drought = self._bands(), band(self.at_s - self._gone_since_s)
        self._weight *= 2.0 ** ((at_s - self.at_s) / HALF_LIFE_S)
        self._add_time((at_s - self.at_s) * self._weight, now, bands, drought)
        self.since_s[now != self.up] = at_s
        self.up, self.at_s = now.copy(), at_s
        if self._held is None or not now[self._held]:
            self._take_next(bands, drought)

    def ages_s(self) -> Floats:
        """Returns, for each zone, how many seconds it has been in its present state, up or down."""
        return np.asarray(self.at_s - self.since_s)

    def cached_rates(self, at_s: float) -> ReclaimRates:
        """Returns the rates that were computed last if they are recent and few events have been added since then.
        Otherwise computes new rates.

        The cache saves time, because callers must solve a value table again whenever the rates change.
        """
        if self._learned is not None:
            since_s, ends, market = self._learned
            if at_s - since_s < LEARN_EVERY_S and self.ends <= LEARN_GROWTH * ends:
                return market
        self._learned = (at_s, self.ends, self.current_rates())
        return self._learned[2]

    def current_rates(self) -> ReclaimRates:
        """Computes the rates from all events so far."""
        prior = PRIOR_EVENTS * self._weight
        switches = self._switched.sum(axis=1)
        ends = self._lost + switches
        hazard = _rates(ends, self._held_seconds, PRIOR_HAZARD, prior)
        others = len(self.up) - 1
        share = (switches + prior * others / (others + 2)) / (ends + prior)
        landing = self._switched + prior * 1e-3 * (np.arange(BANDS) == 0)
        return ReclaimRates(
            lost=hazard * (1 - share),
            switched=(hazard * share)[:, None] * landing / landing.sum(axis=1, keepdims=True),
            found=_rates(self._found, self._gone_seconds, PRIOR_HAZARD, prior),
            zone_hazard=self._zone_hazard(),
        )

    def _add_time(self, weight_s: float, now: NDArray[np.bool_], bands: Ints, drought: int) -> None:
        """Adds the time since the last call; changes are assumed to have happened halfway between the calls."""
        there = np.flatnonzero(self.up)
        self._zone_seconds[there, bands[there]] += weight_s * np.where(now[there], 1.0, 0.5)
        self._zone_ends[there, bands[there]] += self._weight * ~now[there]
        if self._held is None:
            self._gone_seconds[drought] += weight_s * (0.5 if now.any() else 1.0)
        else:
            self._held_seconds[bands[self._held]] += weight_s * (1.0 if now[self._held] else 0.5)

    def _take_next(self, bands: Ints, drought: int) -> None:
        """Moves the virtual holder, which has lost its zone or has none, to the next zone. `bands` and `drought` are
        the age bands at the time of the change.
        """
        lost, self._held = self._held, self._best()
        self.ends += lost is not None or self._held is not None
        if lost is None:
            if self._held is not None:
                self._found[drought] += self._weight
        elif self._held is None:
            self._lost[bands[lost]] += self._weight
            self._gone_since_s = self.at_s
        else:
            self._switched[bands[lost], self._bands()[self._held]] += self._weight

    def _best(self) -> int | None:
        """Returns the zone with the lowest hazard among those that are up; of equal zones, the one that has been up
        longest. Returns None if no zone is up.
        """
        there, bands = np.flatnonzero(self.up), self._bands()
        if not len(there):
            return None
        return int(there[np.lexsort((self.since_s[there], self._zone_hazard()[there, bands[there]]))[0]])

    def _bands(self) -> Ints:
        return np.searchsorted(_BOUNDS, self.ages_s(), side="right")

    def _zone_hazard(self) -> Floats:
        """Returns the hazard of each zone by age band, shrunk towards the mean of all zones while the zone has few
        events.
        """
        prior = PRIOR_EVENTS * self._weight
        ends, seconds = self._zone_ends.sum(axis=0), self._zone_seconds.sum(axis=0)
        common = _rates(ends, seconds, PRIOR_HAZARD, prior)
        return np.asarray((self._zone_ends + 2 * prior) / (self._zone_seconds + 2 * prior / common))


def _rates(ends: Floats, seconds: Floats, expected: Floats, prior: float) -> Floats:
    """Returns the ends of intervals per second by age band, shrunk towards `expected`, which is scaled to the total
    number of ends.
    """
    level = (ends.sum() + prior) / (seconds @ expected + prior)
    return np.asarray((ends + prior) / (seconds + prior / (level * expected)))
