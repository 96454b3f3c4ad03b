"""Spot and on-demand nodes for one endpoint: what was seen goes into a memory, and a plan comes out.

As many nodes are wanted as spare enough late requests for their price, and there are two prices: so many at that of
spot, and, if spot cannot be had, so many at that of on demand. On-demand nodes stay until the spot nodes that replace
them serve. No clock and no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.forecast import UsualRate
from raytide.autoscaler.hazard import Hazard, holds
from raytide.autoscaler.paper_fleets import Floats, PaperFleets, ReplicaSpeed, Served
from raytide.autoscaler.slo_price import SloPrice
from raytide.autoscaler.stock import Stock
from raytide.autoscaler.worth import NodeCount, late_with_losses, spared_by_draining

ONDEMAND = ""
"""The name of the one pool that is never taken back."""
NOTICED_S = 20.0
"""From a loss to the launch of what replaces it, at most."""


@dataclass(frozen=True, slots=True)
class ServingGoal:
    slo_ttft_s: float
    slo_target: float
    min_replicas: int
    max_replicas: int
    """While on-demand nodes wait for their spot replacements there may be more nodes."""
    cold_start_s: float
    speed: ReplicaSpeed
    ondemand_usd_h: float
    spot_usd_h: Mapping[str, float]
    """By zone."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the replicas and the fleet told since the last look."""

    at_s: float
    dt_s: float
    requests: int
    missed: int
    """Requests of which it is certain since the last look that their first token was late."""
    ongoing: int
    """Requests in flight and waiting."""
    served: Served
    lost: Mapping[str, int]
    """Spot nodes taken back, by zone."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    id: str
    zone: str
    """ONDEMAND, or its spot zone."""
    is_ready: bool
    busy: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    launch: tuple[str, ...] = ()
    """Pools, one for each node to launch."""
    release: tuple[str, ...] = ()
    """Ids of nodes."""
    reason: str = ""


@dataclass(slots=True)
class Memory:
    goal: ServingGoal
    paper: PaperFleets
    price: SloPrice
    usual: UsualRate = field(default_factory=UsualRate)
    hazard: Hazard = field(default_factory=Hazard)
    stock: Stock = field(default_factory=Stock)
    late_per_h: Floats = field(default_factory=lambda: np.zeros(1))
    """That are expected with 0, 1, 2... replicas while nothing is taken back."""
    spot: NodeCount = field(default_factory=NodeCount)
    ondemand: NodeCount = field(default_factory=NodeCount)
    _usual_at: deque[tuple[float, float]] = field(default_factory=deque)
    """(when, requests a second), back to one cold start before the last requests that were served."""

    @classmethod
    def of(cls, goal: ServingGoal) -> Memory:
        return cls(goal, PaperFleets(goal.max_replicas, goal.speed, goal.slo_ttft_s), SloPrice(goal.slo_target))

    @property
    def recovery_s(self) -> float:
        """From a loss to the first request of what replaces it."""
        return self.goal.cold_start_s + NOTICED_S

    @property
    def late_usd(self) -> float:
        """What it is worth that a request is not late."""
        return self.price.usd(self.paper.request_s, self.goal.ondemand_usd_h)

    def learn(self, heard: Heard, nodes: Sequence[FleetNode]) -> None:
        self.usual.observe(heard.requests, heard.dt_s)
        self._usual_at.append((heard.at_s, self.usual.rps))
        while len(self._usual_at) > 1 and self._usual_at[1][0] <= heard.served.from_s - self.recovery_s:
            self._usual_at.popleft()
        self.paper.observe(heard.served, self._usual_at[0][1])
        self.price.observe(heard.requests, heard.missed, self.usual.rps, heard.dt_s)
        held = holds(node.zone for node in nodes if node.zone != ONDEMAND)
        self.hazard.observe(held, heard.lost, heard.at_s, heard.dt_s)
        for zone in heard.lost:
            self.stock.took_back(zone, heard.at_s)
        self.late_per_h = self.paper.late_per_h(self.usual.rps)
        self._count(held, heard, sum(node.is_ready for node in nodes))

    def _count(self, held: Mapping[str, int], heard: Heard, ready: int) -> None:
        """More spot would be spread as what is held; more on demand would not be lost with it."""
        goal, total = self.goal, np.arange(self.goal.max_replicas + 1)
        losses = list(self.hazard.losses(held, heard.at_s, self.recovery_s))
        shares = np.array([share for share, _ in losses])
        lost = np.array([[sum(held[zone] for zone in zones)] for _, zones in losses]).reshape(-1, 1)
        as_now, fixed = total * lost / max(sum(held.values()), 1), np.minimum(total, lost)
        drained = self._drained(heard.ongoing, ready)
        spot_usd_h = min(goal.spot_usd_h.values(), default=goal.ondemand_usd_h)
        for nodes, usd_h, gone in ((self.spot, spot_usd_h, as_now), (self.ondemand, goal.ondemand_usd_h, fixed)):
            missing = np.maximum(gone * self.hazard.lost_share, 1.0)
            spared = -np.diff(late_with_losses(self.late_per_h, shares, missing))
            nodes.update(spared * self.late_usd + drained, usd_h, usd_h * goal.cold_start_s / 3600.0, heard.dt_s)
            nodes.count = max(nodes.count, goal.min_replicas, min(math.ceil(self._work), goal.max_replicas))

    @property
    def _work(self) -> float:
        """The replicas that the usual requests keep busy; fewer would fall behind for ever."""
        return self.usual.rps * self.paper.request_s

    def _drained(self, ongoing: int, ready: int) -> Floats:
        """What each node is worth for working off what will wait when a launch of now is ready."""
        goal, waiting = self.goal, ongoing - self.usual.rps * self.paper.in_flight_s
        backlog_s = waiting * self.paper.request_s + (self._work - ready) * goal.cold_start_s
        if waiting <= 0 or backlog_s <= 0:
            return np.zeros(goal.max_replicas)
        return spared_by_draining(
            self.late_usd, self.usual.rps, self._work, backlog_s, goal.cold_start_s, goal.max_replicas
        )


def plan(memory: Memory, nodes: Sequence[FleetNode], now_s: float) -> FleetPlan:
    """What to launch and what to let go. Tell `memory.stock` what became of the launches."""
    wanted_spot, wanted = memory.spot.count, memory.ondemand.count
    spot = [node for node in nodes if node.zone != ONDEMAND]
    ondemand = [node for node in nodes if node.zone == ONDEMAND]
    launch = _spot_launches(memory, nodes, wanted_spot - len(spot), now_s)
    launch += [ONDEMAND] * (wanted - len(nodes) - len(launch))
    release = _dearest(memory, nodes, len(spot) - wanted_spot, now_s)
    ready = sum(node.is_ready for node in nodes)
    surplus = len(ondemand) - max(0, wanted - len(spot))  # what is only about to be launched replaces nothing yet
    for node in sorted(ondemand, key=lambda node: (node.is_ready, node.busy, node.id))[: max(0, surplus)]:
        if not node.is_ready:
            release.append(node)
        elif ready - 1 >= wanted:
            release.append(node)
            ready -= 1
    reason = (
        f"{memory.usual.rps:.2f} requests/s are usual and a late one costs ${memory.late_usd:.4f}: "
        f"{wanted_spot} nodes are worth the price of spot, {wanted} that of on demand"
    )
    return FleetPlan(tuple(launch), tuple(node.id for node in release), reason)


def _spot_launches(memory: Memory, nodes: Sequence[FleetNode], count: int, now_s: float) -> list[str]:
    """Each where one more costs least, its risk included."""
    have = holds(node.zone for node in nodes)
    left = {zone: memory.stock.most(zone, now_s) for zone in memory.goal.spot_usd_h}
    chosen: list[str] = []
    while len(chosen) < count:
        there = [zone for zone, most in left.items() if most is None or most > chosen.count(zone)]
        if not there:
            break
        zone = min(there, key=lambda zone: (_usd_h(memory, zone, have, now_s), have.get(zone, 0)))
        have[zone] = have.get(zone, 0) + 1
        chosen.append(zone)
    return chosen


def _dearest(memory: Memory, nodes: Sequence[FleetNode], count: int, now_s: float) -> list[FleetNode]:
    """The spot nodes to let go: those that are not ready, then of the zones where one more costs most."""
    left = list(nodes)
    chosen: list[FleetNode] = []
    while len(chosen) < count:
        have = holds(node.zone for node in left)
        cost = {zone: _usd_h(memory, zone, {**have, zone: have[zone] - 1}, now_s) for zone in have if zone != ONDEMAND}
        spot = [node for node in left if node.zone != ONDEMAND]
        node = min(spot, key=lambda node: (node.is_ready, -cost[node.zone], node.busy, node.id))
        left.remove(node)
        chosen.append(node)
    return chosen


def _usd_h(memory: Memory, zone: str, have: Mapping[str, int], now_s: float) -> float:
    """An hour of one more node there: what starting again costs, and that it is missing just when others are."""
    goal, late = memory.goal, memory.late_per_h
    total = sum(have.values())
    held = {name: count for name, count in have.items() if name != ONDEMAND and count} | {zone: have.get(zone, 0) + 1}
    late_per_h = 0.0
    for share, zones in memory.hazard.losses(held, now_s, memory.recovery_s):
        if zone in zones:
            left = min(total + 1 - sum(held[name] for name in zones), len(late) - 2)
            late_per_h += share * float(late[left] - late[left + 1])
    starts_per_h = memory.hazard.per_h(zone, now_s)
    usd_h = goal.spot_usd_h[zone] * (1.0 + starts_per_h * goal.cold_start_s / 3600.0)
    return usd_h + memory.late_usd * late_per_h
