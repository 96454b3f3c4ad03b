"""Baseline serving policies: a fixed fleet, Ray Serve's target with only on-demand or only spot nodes, and SkyServe's
SpotHedge.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.router import SimulatedReplica

TICK_S = 20.0
"""The decision period of every policy."""

TARGET_ONGOING = 5.0
UPSCALE_DELAY_S = 30.0
DOWNSCALE_DELAY_S = 600.0


@dataclass(slots=True)
class ServeTarget:
    """Ray Serve's scaling rule: one replica for every `TARGET_ONGOING` requests in flight, rounded up.

    The target rises once the rule has asked for more replicas for 30 s. Once the rule has asked for fewer replicas
    for 600 s, the target falls to the highest number that it asked for in these 600 s.
    """

    most: int
    current: int = 1
    _high_since_s: float | None = None
    _low: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, now_s: float, mean_ongoing: float) -> int:
        wanted = min(max(math.ceil(mean_ongoing / TARGET_ONGOING - 1e-9), 1), self.most)
        if wanted > self.current:
            self._low.clear()
            self._high_since_s = now_s if self._high_since_s is None else self._high_since_s
            if now_s - self._high_since_s >= UPSCALE_DELAY_S:
                self.current, self._high_since_s = wanted, None
            return self.current
        self._high_since_s = None
        if wanted == self.current:
            self._low.clear()
            return self.current
        self._low.append((now_s, wanted))
        if now_s - self._low[0][0] >= DOWNSCALE_DELAY_S:
            self.current = max(seen for _, seen in self._low)
            self._low.clear()
        return self.current


@dataclass(slots=True)
class Static:
    replicas: int

    def tick(self, fleet: SimulatedFleet) -> None:
        for _ in range(self.replicas - len(fleet.alive)):
            fleet.launch_ondemand()


@dataclass(slots=True)
class ServeOnDemand:
    target: ServeTarget

    def tick(self, fleet: SimulatedFleet) -> None:
        target = self.target.update(fleet.now_s, fleet.mean_ongoing())
        match_ondemand(fleet, target)


@dataclass(slots=True)
class SpotNaive:
    """A policy that buys only spot nodes, from one zone after the other. A zone that refuses is skipped until the next
    tick.
    """

    target: ServeTarget
    turn: int = 0

    def tick(self, fleet: SimulatedFleet) -> None:
        target = self.target.update(fleet.now_s, fleet.mean_ongoing())
        spot = fleet.of(CapacityType.SPOT)
        release(fleet, spot, len(spot) - target)
        missing, zones = target - len(spot), len(fleet.zones.names)
        refused: set[int] = set()
        while missing > 0 and len(refused) < zones:
            zone, self.turn = self.turn, (self.turn + 1) % zones
            if zone in refused:
                continue
            if fleet.launch_spot(zone) is None:
                refused.add(zone)
            else:
                missing -= 1


@dataclass(slots=True)
class SpotHedge:
    """SkyServe's policy (EuroSys'25). It spreads spot nodes over the zones without a recent failure, and buys `extra`
    nodes beyond the target. An on-demand node stands in for each spot node that is not ready.
    """

    target: ServeTarget
    extra: int
    active: set[int] = field(default_factory=set)
    preempted: set[int] = field(default_factory=set)
    lost_seen: int = 0

    def tick(self, fleet: SimulatedFleet) -> None:
        target = self.target.update(fleet.now_s, fleet.mean_ongoing())
        if not self.active and not self.preempted:
            self.active = set(range(len(fleet.zones.names)))
        tried: set[int] = set()
        for replica in fleet.lost_nodes[self.lost_seen :]:
            if replica.zone is not None:
                self._failed(replica.zone, tried)
        self.lost_seen = len(fleet.lost_nodes)
        spot = fleet.of(CapacityType.SPOT)
        release(fleet, spot, len(spot) - target - self.extra)
        self._launch(fleet, target + self.extra - len(spot), tried)
        ready = sum(fleet.is_ready(replica) for replica in fleet.of(CapacityType.SPOT))
        match_ondemand(fleet, max(0, min(target, target + self.extra - ready)))

    def _launch(self, fleet: SimulatedFleet, missing: int, tried: set[int]) -> None:
        while missing > 0 and (open_zones := self.active - tried):
            spot = fleet.of(CapacityType.SPOT)
            zone = min(open_zones, key=lambda zone: (sum(replica.zone == zone for replica in spot), zone))
            if fleet.launch_spot(zone) is None:
                self._failed(zone, tried)
            else:
                missing -= 1

    def _failed(self, zone: int, tried: set[int]) -> None:
        self.active.discard(zone)
        self.preempted.add(zone)
        tried.add(zone)
        if len(self.active) < 2:
            self.active |= self.preempted
            self.preempted = set()


def match_ondemand(fleet: SimulatedFleet, target: int) -> None:
    there = fleet.of(CapacityType.ON_DEMAND)
    release(fleet, there, len(there) - target)
    for _ in range(target - len(there)):
        fleet.launch_ondemand()


def release(fleet: SimulatedFleet, replicas: Iterable[SimulatedReplica], count: int) -> None:
    """Ends `count` replicas. Unready replicas go first, then the least busy ones. Among equals, the youngest goes
    first.
    """
    order = sorted(replicas, key=lambda r: (fleet.is_ready(r), fleet.busy(r), -r.number))
    for replica in order[: max(0, count)]:
        fleet.release(replica)
