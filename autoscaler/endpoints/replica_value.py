"""The value of an endpoint's replicas, learned from the endpoint's requests: how many are worth the spot price, and how
many are worth the on-demand price. This module uses no clock and no I/O.

A replica is bought when the late requests that it avoids are worth more than its cost. It is released once the excess
of its cost over its value adds up to the cost of a new start. This rule costs at most twice the optimum (ski rental).
Spot replicas can be lost together. So a few on-demand replicas on standby can be worth more than many spot replicas.

The price of a late request is the dual variable of the SLO. It starts at a guess from the cost of a request. It rises
while more requests are late than the target allows, and falls while fewer are. Its upper bound is the price at which
the model, corrected by its past errors, predicts as many late requests as allowed. Without a bound, the loss of a zone
on the first day would keep the price high for a week. An overspent error budget of the last week raises the price."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat

from raytide.autoscaler.endpoints.queue_simulator import (
    CounterfactualFleets,
    Floats,
    ReplicaSpeed,
    RequestBatch,
    SavedCounts,
)
from raytide.autoscaler.endpoints.replica_placement import DETECTION_S
from raytide.autoscaler.endpoints.traffic import RateForecast
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.config import Config
from raytide.core.objects.endpoint_load import ReplicaValue

SETTLE_S = 120.0
"""The time between a request's arrival and its evaluation: nearly all have their last token by then."""


START_PRICE_FACTOR = 3.0
"""The initial price of a miss is this times the on-demand cost of a request, divided by the square root of the allowed
share of misses. The root keeps the price moderate for strict targets."""
GAIN = 6.0
"""On a day with twice the allowed misses, the price's logarithm rises by this times the square root of the allowed
share. Rare misses come in bursts, with a lost zone, so one day with them is weaker evidence."""
FIRST_GAIN = 2.0
"""At first the gain is larger by this multiple of itself, because the initial price is a guess. The increase falls with
the days observed."""
KNOWN_DAYS = 0.5
"""The number of days after which predictions weigh as much as the initial price."""
BUDGET_GAIN, MOST_DEBT_DAYS = 3.0, 4.0
"""If the last week had too many misses by one day's allowance, the price's logarithm is higher by BUDGET_GAIN times the
square root of the allowed share. An excess of more than MOST_DEBT_DAYS days' allowances counts as that many."""
MOST_UP, LEAST_WORTH, MOST_WORTH = math.log(3.0), 0.01, 0.9
"""Bounds of the price, for unreachable targets: MOST_UP of its logarithm, the others of the value of avoiding all
allowed misses, as a share of the cost of serving everything on demand. The higher one of the upper bounds applies."""
PRICES = 24
"""The number of prices, between the bounds, at which late requests are predicted."""
_DAY_S = 86400.0
BUDGET_S = 7 * _DAY_S
"""The time constant, in seconds, of the sums over about the last week."""


@dataclass(frozen=True, slots=True)
class ServingGoal:
    """An endpoint's SLO, the bounds of its replica count, its replicas' speed, and the prices."""

    slo_ttft_s: float
    slo_target: float
    min_replicas: int
    max_replicas: int
    """Exceeded while on-demand replicas wait for their spot replacements."""
    cold_start_s: float
    speed: ReplicaSpeed
    ondemand_usd_h: float
    spot_usd_h: Mapping[str, float]
    """Keyed by pool."""


@dataclass(frozen=True, slots=True)
class IntervalStats:
    """The statistics of an endpoint over one interval, from the reports of its replicas."""

    at_s: float
    dt_s: float
    requests: int
    missed: int
    """Requests whose first token became late in the interval."""
    settled: RequestBatch
    held: Mapping[str, float]
    """Work of staying spot replicas by pool, starting ones included, in units of a replica on the slowest type."""
    ready: float
    """Work of all ready replicas."""


class SavedModel(Config):
    """The slowly learned values of a `ReplicaValueModel`, in the form that is stored for the next controller."""

    slo_ttft_s: float
    slo_target: float
    max_replicas: int
    paper: SavedCounts
    price_moved: float
    day_requests: float
    week_requests: NonNegativeFloat = 0.0
    week_missed: NonNegativeFloat = 0.0
    per_day: NonNegativeFloat = 1.0
    days: NonNegativeFloat = 0.0
    predicted: tuple[NonNegativeFloat, ...] = ()
    expected: NonNegativeFloat = 0.0


@dataclass(slots=True)
class HysteresisCount:
    """The number of replicas that are worth their price, with hysteresis. A replica is added when its value exceeds its
    price. It is removed only after its price has exceeded its value by a given number of dollars in total."""

    count: int = 0
    _regret_usd: Floats = field(default_factory=lambda: np.zeros(0))
    """The cost of each replica in excess of its value, in dollars, since it was last worth its price."""

    def update(self, worth_usd_h: Floats, usd_h: float, start_usd: float, dt_s: float) -> None:
        """Updates the count. `worth_usd_h[i]` is the value of replica `i + 1` in dollars an hour."""
        if len(self._regret_usd) != len(worth_usd_h):
            self._regret_usd = np.zeros(len(worth_usd_h))
        node = np.arange(1, len(worth_usd_h) + 1)
        held = node <= self.count
        lost_usd = (usd_h - worth_usd_h) * dt_s / 3600.0
        self._regret_usd = np.where(held & (lost_usd > 0), self._regret_usd + lost_usd, 0.0)
        stays = np.where(held, self._regret_usd < start_usd, worth_usd_h > usd_h)
        self.count = int(node[stays].max(initial=0))


@dataclass(slots=True)
class SloShadowPrice:
    """The price of a late request, and the share of requests that were in time in about the last week."""

    target: float
    moved: float = 0.0
    """The integral part of the price's logarithm."""
    day_requests: float = 0.0
    requests: float = 0.0
    missed: float = 0.0
    per_day: float = 1.0
    """The requests per day at the larger of the last day's mean rate and the usual rate."""
    days: float = 0.0
    """The number of days observed."""
    predicted: Floats = field(default_factory=lambda: np.zeros(PRICES))
    """The late requests predicted for about the last week if each of `log_prices` had been in force."""
    expected: float = 0.0
    """The late requests predicted at the prices that were in force."""

    @property
    def attained(self) -> float | None:
        """The share of the last week's requests that were in time. None if there were no requests."""
        return 1.0 - self.missed / self.requests if self.requests > 0 else None

    @property
    def log_prices(self) -> Floats:
        """The logarithms of the candidate prices, relative to the initial price. `predicted` has one rate per price."""
        low, high = self._bounds
        prices: Floats = np.linspace(low, high, PRICES)
        return prices

    def observe(self, requests: int, missed: int, rate_rps: float, dt_s: float) -> None:
        allowed, fade = self._allowed, math.exp(-dt_s / BUDGET_S)
        self.requests = self.requests * fade + requests
        self.missed = self.missed * fade + missed
        self.day_requests += (rate_rps * _DAY_S - self.day_requests) * min(1.0, dt_s / _DAY_S)
        self.per_day = max(self.day_requests, rate_rps * _DAY_S, 1.0)
        gain = GAIN * (1.0 + FIRST_GAIN / (1.0 + self.days))
        self.days += dt_s / _DAY_S
        step = gain * math.sqrt(allowed) * (missed / allowed - requests) / self.per_day
        self.moved = self._bounded(self.moved + step)

    def predict(self, late_per_h: Floats, dt_s: float) -> None:
        """Adds the predictions for `dt_s` seconds: the late requests per hour at each price of `log_prices`."""
        fade, now = math.exp(-dt_s / BUDGET_S), float(np.interp(self._log_price, self.log_prices, late_per_h))
        self.predicted = self.predicted * fade + late_per_h * dt_s / 3600.0
        self.expected = self.expected * fade + now * dt_s / 3600.0

    def usd(self, request_s: float, ondemand_usd_h: float) -> float:
        """Returns the price of a late request in dollars. `request_s` are the replica-seconds of one request."""
        return self._initial_usd(request_s, ondemand_usd_h) * math.exp(self._log_price)

    def usd_by_price(self, request_s: float, ondemand_usd_h: float) -> Floats:
        """Returns the candidate prices of a late request in dollars, in the order of `log_prices`."""
        return self._initial_usd(request_s, ondemand_usd_h) * np.exp(self.log_prices)

    def restore(self, past: SavedModel) -> None:
        self.moved, self.day_requests = past.price_moved, past.day_requests
        self.requests, self.missed, self.per_day = past.week_requests, past.week_missed, max(past.per_day, 1.0)
        self.days = past.days
        if len(past.predicted) == PRICES:
            self.predicted, self.expected = np.array(past.predicted), past.expected

    @property
    def _allowed(self) -> float:
        return 1.0 - self.target

    def _initial_usd(self, request_s: float, ondemand_usd_h: float) -> float:
        return START_PRICE_FACTOR / math.sqrt(self._allowed) * request_s * ondemand_usd_h / 3600.0

    @property
    def _log_price(self) -> float:
        """The logarithm of the present price relative to the initial price."""
        debt_days = (self.missed / self._allowed - self.requests) / self.per_day
        debt_days = min(max(debt_days, -MOST_DEBT_DAYS), MOST_DEBT_DAYS)
        log_price = min(self.moved, self._sufficient)
        return self._bounded(log_price + BUDGET_GAIN * math.sqrt(self._allowed) * debt_days)

    @property
    def _sufficient(self) -> float:
        """The logarithm of the price at which the allowed share is predicted to be late, weighted by the days observed;
        infinite without a prediction. Predictions are corrected by the ratio of observed to expected late requests."""
        if self.requests <= 0 or not self.predicted.any():
            return math.inf
        day = self._allowed * self.per_day
        correction = (self.missed + day) / (self.expected + day)
        share = np.maximum(correction * self.predicted / self.requests, 1e-12)
        found = float(np.interp(-math.log(self._allowed), -np.log(share), self.log_prices))
        return found * self.days / (self.days + KNOWN_DAYS)

    def _bounded(self, log_price: float) -> float:
        low, high = self._bounds
        return min(max(log_price, low), high)

    @property
    def _bounds(self) -> tuple[float, float]:
        start = math.log(START_PRICE_FACTOR * math.sqrt(self._allowed))
        return math.log(LEAST_WORTH) - start, max(MOST_UP, math.log(MOST_WORTH) - start)


@dataclass(slots=True)
class ReplicaValueModel:
    goal: ServingGoal
    simulator: CounterfactualFleets
    price: SloShadowPrice
    usual_rate: RateForecast = field(default_factory=RateForecast)
    late_per_h: Floats = field(default_factory=lambda: np.zeros(1))
    """Expected late requests with 0, 1, 2... replicas, without reclaims."""
    spot: HysteresisCount = field(default_factory=HysteresisCount)
    """Replicas worth the price of spot, beside those on standby."""
    standby: HysteresisCount = field(default_factory=HysteresisCount)
    """Replicas worth the on-demand price while spot is available, since they are never reclaimed."""
    ondemand: HysteresisCount = field(default_factory=HysteresisCount)
    """Replicas worth the on-demand price while no spot is available beyond what is held."""
    has_served: bool = False
    """True once a replica was ready: requests before the first ready replica were late at any price."""
    burst_count: int = 0
    """Replicas that would be worth the price of spot if none were ever lost."""
    _usual_at: deque[tuple[float, float]] = field(default_factory=deque)
    """(time, requests per second), back to one cold start before the last settled requests."""

    @classmethod
    def from_goal(cls, goal: ServingGoal) -> ReplicaValueModel:
        return cls(
            goal, CounterfactualFleets(goal.max_replicas, goal.speed, goal.slo_ttft_s), SloShadowPrice(goal.slo_target)
        )

    def learn(self, stats: IntervalStats, hazard: ReclaimHazard) -> None:
        """Learns from one interval. `hazard` must already have observed all losses of spot replicas up to now."""
        self.usual_rate.observe(stats.requests, stats.dt_s, self._recovery_s)
        self._usual_at.append((stats.at_s, self.usual_rate.rps))
        while len(self._usual_at) > 1 and self._usual_at[1][0] <= stats.settled.from_s - self._recovery_s:
            self._usual_at.popleft()
        self.simulator.observe(stats.settled, self._usual_at[0][1])
        self.has_served = self.has_served or stats.ready > 0
        if self.has_served:
            self.price.observe(stats.requests, stats.missed, self.usual_rate.rps, stats.dt_s)
        self.late_per_h = self.simulator.late_per_h(self.usual_rate.rps)
        self._count(stats, hazard)

    def value(self, hazard: ReclaimHazard) -> ReplicaValue:
        count, work = min(self.spot.count + self.standby.count, self.goal.max_replicas), math.ceil(self._work)
        return ReplicaValue(
            spot=count,
            standby=self.standby.count,
            ondemand=self.ondemand.count,
            late_usd=self._late_usd,
            late_per_h=tuple(self.late_per_h.tolist()),
            usual_rps=self.usual_rate.rps,
            together=hazard.region_correlation,
            slo_target=self.goal.slo_target,
            attained=self.price.attained,
            busy=min(work, count),
            for_bursts=max(0, min(self.burst_count, count) - work),
        )

    @property
    def saved(self) -> SavedModel:
        return SavedModel(
            slo_ttft_s=self.goal.slo_ttft_s,
            slo_target=self.goal.slo_target,
            max_replicas=self.goal.max_replicas,
            paper=self.simulator.saved,
            price_moved=self.price.moved,
            day_requests=self.price.day_requests,
            week_requests=self.price.requests,
            week_missed=self.price.missed,
            per_day=self.price.per_day,
            days=self.price.days,
            predicted=tuple(self.price.predicted.tolist()),
            expected=self.price.expected,
        )

    def restore(self, past: SavedModel) -> None:
        """Restores a stored model. Does nothing if the model was learned for another goal."""
        if _identity(past) == _identity(self.goal):
            self.simulator.restore(past.paper)
            self.price.restore(past)

    def is_for(self, goal: ServingGoal) -> bool:
        """Returns whether the model was learned for the SLO and the maximum in `goal`. Prices and speeds may differ."""
        return _identity(self.goal) == _identity(goal)

    def set_goal(self, goal: ServingGoal) -> None:
        """Sets a new goal. `is_for` must be true for the new goal."""
        self.goal = goal
        self.simulator.set_speed(goal.speed)

    @property
    def _recovery_s(self) -> float:
        """The time from a loss to the first request of its replacement."""
        return self.goal.cold_start_s + DETECTION_S

    @property
    def _late_usd(self) -> float:
        """The value of avoiding one late request."""
        return self.price.usd(self.simulator.request_s, self.goal.ondemand_usd_h)

    @property
    def _work(self) -> float:
        """The number of replicas that the usual rate keeps busy; with fewer, the backlog would grow without end."""
        return self.usual_rate.rps * self.simulator.request_s

    def _count(self, stats: IntervalStats, hazard: ReclaimHazard) -> None:
        """Updates the replica counts from the predicted late requests of every fleet of spot and on-demand replicas."""
        goal, late_usd, held = self.goal, self._late_usd, int(sum(stats.held.values()))
        losses = self._losses(stats, hazard)
        replicas, start_h = np.arange(len(self.late_per_h)), goal.cold_start_s / 3600.0
        some = self.simulator.sizes
        late = late_with_losses(self.late_per_h, losses, replicas[:, None], some)
        spot_usd_h = min(goal.spot_usd_h.values(), default=goal.ondemand_usd_h)
        alone = -np.diff(self.late_per_h) * late_usd
        self.burst_count = int(replicas[1:][alone > spot_usd_h].max(initial=0))
        least = max(goal.min_replicas, min(math.ceil(self._work), goal.max_replicas))

        def update(count: HysteresisCount, cost: Floats, usd_h: float, least: int) -> None:
            count.update(-np.diff(cost), usd_h, usd_h * start_h, stats.dt_s)
            count.count = max(count.count, least)

        with_best_spot = (late_usd * late + spot_usd_h * replicas[:, None]).min(axis=0)
        if goal.spot_usd_h:
            update(self.standby, np.interp(replicas, some, with_best_spot), goal.ondemand_usd_h, 0)
        beside = late_with_losses(self.late_per_h, losses, replicas, self.standby.count)
        update(self.spot, late_usd * beside, spot_usd_h, least - self.standby.count)
        bought = np.maximum(replicas - held, 0)
        without_more_spot = late_with_losses(self.late_per_h, losses, replicas - bought, bought)
        update(self.ondemand, late_usd * without_more_spot, goal.ondemand_usd_h, least)
        if self.has_served:
            is_scarce, spot = held < self.spot.count, replicas[:, None]
            is_open = (spot + some >= least) & (spot <= (held if is_scarce else goal.max_replicas))
            usd_h = spot_usd_h * spot + goal.ondemand_usd_h * some
            self.price.predict(self._late_by_price(late[is_open], usd_h[is_open]), stats.dt_s)

    def _losses(self, stats: IntervalStats, hazard: ReclaimHazard) -> Sequence[tuple[float, float]]:
        """Returns pairs (share of the time, share of the spot replicas that is missing then)."""
        held = stats.held
        losses = hazard.losses(held, stats.at_s, self._recovery_s)
        part = hazard.lost_share / max(sum(held.values()), 1)
        return [(share, part * sum(held[zone] for zone in zones)) for share, zones in losses]

    def _late_by_price(self, late: Floats, usd_h: Floats) -> Floats:
        """Returns, for each of `log_prices`, the late requests per hour of the fleet that is cheapest at that price."""
        late_usd = self.price.usd_by_price(self.simulator.request_s, self.goal.ondemand_usd_h)
        best: Floats = late[(late_usd[:, None] * late + usd_h).argmin(axis=1)]
        return best


def _identity(goal: ServingGoal | SavedModel) -> tuple[float, float, int]:
    return goal.slo_ttft_s, goal.slo_target, goal.max_replicas


def late_with_losses(
    late_per_h: Floats, losses: Iterable[tuple[float, float]], spot: NDArray[np.intp], ondemand: NDArray[np.intp] | int
) -> Floats:
    """Returns the late requests per hour of a fleet of `spot` spot replicas and `ondemand` on-demand replicas. The rate
    is the average over the times with and without losses. `late_per_h[n]` is the rate for `n` replicas without losses.
    Each loss is a pair: a share of the time, and the share of the spot replicas that are lost during that time. Each
    loss takes at least one spot replica if the fleet has any."""
    sizes = np.arange(len(late_per_h))
    without_losses: Floats = np.interp(spot + ondemand, sizes, late_per_h)
    total = without_losses.copy()
    for share, part in losses:
        left = spot + ondemand - np.maximum(part * spot, np.minimum(spot, 1))
        with_loss: Floats = np.interp(left, sizes, late_per_h)
        total += share * (with_loss - without_losses)
    return total
