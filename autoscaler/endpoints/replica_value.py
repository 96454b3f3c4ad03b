"""What the replicas of one endpoint are worth, learned from what was served: how many spare enough late requests for
the price of spot, and how many for that of on demand. No clock and no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.queue_simulator import (
    CounterfactualFleets,
    Floats,
    ReplicaSpeed,
    RequestBatch,
    SavedCounts,
)
from raytide.autoscaler.endpoints.replica_placement import DETECTION_S
from raytide.autoscaler.endpoints.traffic import RequestRate
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.config import Config
from raytide.core.objects.endpoint import ReplicaValue

SETTLE_S = 120.0
"""What a request brought is told this long after it arrived: nearly all have their last token by then."""


LEAST_SPARE = 0.25
"""Replicas: a fleet without any to spare is taken to work off what waits at this pace."""
START_PRICE_FACTOR = 3.0
"""At the start a miss costs so many times what serving a request on demand costs, over the root of the share of misses
that is allowed: the ever fewer that are late with ever more replicas need no price beyond all measure."""
GAIN = 6.0
"""How far the logarithm moves when a day misses twice what is allowed, times the root of that share: rare misses come
many at once, with a lost zone, and a day of them tells less."""
MOST_UP, MOST_DOWN = math.log(3.0), math.log(8.0)
"""A target that no fleet reaches is not chased at any price."""
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class ServingGoal:
    slo_ttft_s: float
    slo_target: float
    min_replicas: int
    max_replicas: int
    """While on-demand replicas wait for their spot replacements there may be more."""
    cold_start_s: float
    speed: ReplicaSpeed
    ondemand_usd_h: float
    spot_usd_h: Mapping[str, float]
    """By pool."""


@dataclass(frozen=True, slots=True)
class IntervalStats:
    """What the replicas told since the last look."""

    at_s: float
    dt_s: float
    requests: int
    missed: int
    """Requests of which it is certain since the last look that their first token was late."""
    ongoing: float
    """Requests in flight and waiting."""
    settled: RequestBatch
    held: Mapping[str, float]
    """Spot replicas that stay, those that start included, by pool; where replicas do not all do alike, what they do,
    in units of one where it does least."""
    ready: float
    """The same of those that answer, whatever they run on."""


class SavedModel(Config):
    """What takes days to learn, as it is kept for the next controller."""

    slo_ttft_s: float
    slo_target: float
    max_replicas: int
    paper: SavedCounts
    price_moved: float
    day_requests: float


@dataclass(slots=True)
class HysteresisCount:
    """How many nodes at one price."""

    count: int = 0
    _regret_usd: Floats = field(default_factory=lambda: np.zeros(0))
    """By node: what it has cost beyond its worth since it was last worth it."""

    def update(self, worth_usd_h: Floats, usd_h: float, start_usd: float, dt_s: float) -> None:
        """`worth_usd_h`: of the first node, the second..."""
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
        return (
            START_PRICE_FACTOR
            * request_s
            * ondemand_usd_h
            / 3600.0
            / math.sqrt(1.0 - self.target)
            * math.exp(self.moved)
        )


@dataclass(slots=True)
class ReplicaValueModel:
    goal: ServingGoal
    simulator: CounterfactualFleets
    price: SloShadowPrice
    usual_rate: RequestRate = field(default_factory=RequestRate)
    late_per_h: Floats = field(default_factory=lambda: np.zeros(1))
    """That are expected with 0, 1, 2... replicas while nothing is taken back."""
    spot: HysteresisCount = field(default_factory=HysteresisCount)
    ondemand: HysteresisCount = field(default_factory=HysteresisCount)
    _usual_at: deque[tuple[float, float]] = field(default_factory=deque)
    """(when, requests a second), back to one cold start before the last requests that were served."""

    @classmethod
    def from_goal(cls, goal: ServingGoal) -> ReplicaValueModel:
        return cls(
            goal, CounterfactualFleets(goal.max_replicas, goal.speed, goal.slo_ttft_s), SloShadowPrice(goal.slo_target)
        )

    def learn(self, heard: IntervalStats, hazard: ReclaimHazard) -> None:
        """`hazard` has seen all that was lost until now."""
        self.usual_rate.observe(heard.requests, heard.dt_s)
        self._usual_at.append((heard.at_s, self.usual_rate.rps))
        while len(self._usual_at) > 1 and self._usual_at[1][0] <= heard.settled.from_s - self._recovery_s:
            self._usual_at.popleft()
        self.simulator.observe(heard.settled, self._usual_at[0][1])
        self.price.observe(heard.requests, heard.missed, self.usual_rate.rps, heard.dt_s)
        self.late_per_h = self.simulator.late_per_h(self.usual_rate.rps)
        self._count(heard, hazard)

    def value(self, hazard: ReclaimHazard) -> ReplicaValue:
        return ReplicaValue(
            spot=self.spot.count,
            ondemand=self.ondemand.count,
            late_usd=self._late_usd,
            late_per_h=tuple(self.late_per_h.tolist()),
            usual_rps=self.usual_rate.rps,
            together=hazard.region_correlation,
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
        )

    def restore(self, past: SavedModel) -> None:
        """Nothing, if it was of another goal."""
        if _identity(past) == _identity(self.goal):
            self.simulator.restore(past.paper)
            self.price.moved, self.price.day_requests = past.price_moved, past.day_requests

    def is_for(self, goal: ServingGoal) -> bool:
        """Prices and speeds change with time; what the paper fleets count is another goal's."""
        return _identity(self.goal) == _identity(goal)

    def set_goal(self, goal: ServingGoal) -> None:
        """At a goal that it is for."""
        self.goal = goal
        self.simulator.set_speed(goal.speed)

    @property
    def _recovery_s(self) -> float:
        """From a loss to the first request of what replaces it."""
        return self.goal.cold_start_s + DETECTION_S

    @property
    def _late_usd(self) -> float:
        """What it is worth that a request is not late."""
        return self.price.usd(self.simulator.request_s, self.goal.ondemand_usd_h)

    @property
    def _work(self) -> float:
        """The replicas that the usual requests keep busy; fewer would fall behind for ever."""
        return self.usual_rate.rps * self.simulator.request_s

    def _count(self, heard: IntervalStats, hazard: ReclaimHazard) -> None:
        """More spot would be spread as what is held; more on demand would not be lost with it."""
        goal, held, total = self.goal, heard.held, np.arange(self.goal.max_replicas + 1)
        losses = list(hazard.losses(held, heard.at_s, self._recovery_s))
        shares = np.array([share for share, _ in losses])
        lost = np.array([[sum(held[zone] for zone in zones)] for _, zones in losses]).reshape(-1, 1)
        as_now, fixed = total * lost / max(sum(held.values()), 1), np.minimum(total, lost)
        drained = self._drained(heard.ongoing, heard.ready)
        spot_usd_h = min(goal.spot_usd_h.values(), default=goal.ondemand_usd_h)
        for nodes, usd_h, gone in ((self.spot, spot_usd_h, as_now), (self.ondemand, goal.ondemand_usd_h, fixed)):
            missing = np.maximum(gone * hazard.lost_share, 1.0)
            spared = -np.diff(late_with_losses(self.late_per_h, shares, missing))
            nodes.update(spared * self._late_usd + drained, usd_h, usd_h * goal.cold_start_s / 3600.0, heard.dt_s)
            nodes.count = max(nodes.count, goal.min_replicas, min(math.ceil(self._work), goal.max_replicas))

    def _drained(self, ongoing: float, ready: float) -> Floats:
        """What each node is worth for working off what will wait when a launch of now is ready."""
        goal, waiting = self.goal, ongoing - self.usual_rate.rps * self.simulator.in_flight_s
        backlog_s = waiting * self.simulator.request_s + (self._work - ready) * goal.cold_start_s
        if waiting <= 0 or backlog_s <= 0:
            return np.zeros(goal.max_replicas)
        return spared_by_draining(
            self._late_usd, self.usual_rate.rps, self._work, backlog_s, goal.cold_start_s, goal.max_replicas
        )


def _identity(goal: ServingGoal | SavedModel) -> tuple[float, float, int]:
    return goal.slo_ttft_s, goal.slo_target, goal.max_replicas


def late_with_losses(late_per_h: Floats, shares: Floats, missing: Floats) -> Floats:
    """`late_per_h` of 0, 1, 2... nodes when for a `share` [loss] of the time some are `missing` [loss, nodes]."""
    nodes = np.arange(len(late_per_h))
    without = np.interp(nodes - missing, nodes, late_per_h)
    total: Floats = late_per_h + shares @ (without - late_per_h)
    return total


def spared_by_draining(
    late_usd: float, rate_rps: float, work: float, backlog_s: float, cold_start_s: float, most: int
) -> Floats:
    """What the first node, the second... is worth an hour while `backlog_s` replica-seconds wait beside the usual
    `work` (replicas): all that arrives until then is late, and who is faster is needed for a shorter time."""
    spare = np.maximum(np.arange(most + 1) - work, LEAST_SPARE)
    drain_s = backlog_s / spare
    worth: Floats = late_usd * rate_rps * -np.diff(drain_s) * 3600.0 / (cold_start_s + drain_s[1:])
    return worth
