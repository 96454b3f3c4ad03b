"""Decides in which pools to buy replicas of one endpoint and which replicas to release, based on the replicas' value.
The controller and the simulator both use this module.

The inputs in `ReplicaValue` are three numbers of replicas:

- `spot`: the replicas that are worth the spot price.
- `standby`: the number of these replicas that should be on-demand replicas. They are worth the on-demand
  price, because on-demand replicas are never reclaimed.
- `ondemand`: the replicas that are worth the on-demand price while spot is unavailable.

The number of on-demand replicas may exceed these numbers for a while: surplus on-demand replicas stay until the spot
replicas that replace them are ready. This module has no clock, no memory and no I/O.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raytide.autoscaler.spot.reclaim_hazard import losses
from raytide.core.objects.endpoint_load import ReplicaValue
from raytide.core.objects.hardware.transfer import region

DETECTION_S = 20.0
"""The longest time from a loss to the launch of its replacement."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """A pool (a node type in a zone) in which replicas can be bought."""

    name: str
    """A zone, or `node type/zone`; zones of one region differ in the last letter only."""
    usd_h: float
    """The price of one unit of work; see `FleetNode.work`."""
    is_spot: bool
    losses_per_h: float = 0.0
    most: int | None = None
    """The number of further replicas to request now; None for no limit."""
    work: float = 1.0
    """The work of a replica in this pool."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A replica, or free capacity for one replica."""

    id: str
    pool: str
    is_spot: bool
    """True also for capacity that costs no more than spot, because a move to spot would save nothing."""
    is_ready: bool
    busy: int = 0
    work: float = 1.0
    """The replica's work in the units of `ReplicaValue`: replicas on the slowest node type."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    launch: tuple[str, ...] = ()
    """The pool of each replica to launch."""
    release: tuple[str, ...] = ()
    """The ids of the nodes to release."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetState:
    """The inputs of a plan. `pools` includes the pools of all `nodes`. Spot replicas are bought in the pool with the
    lowest cost. The cost includes the risk of a reclaim.
    """

    replica_value: ReplicaValue
    pools: Mapping[str, ReplicaPool]
    nodes: Sequence[FleetNode]
    cold_start_s: float

    def plan(self) -> FleetPlan:
        value, nodes = self.replica_value, self.nodes
        spot = [node for node in nodes if node.is_spot]
        ondemand = [node for node in nodes if not node.is_spot]
        standby = value.standby - work_of(ondemand)
        can_stand_by = work_of(ondemand) + sum(self.pools[name].work for name in self._ondemand_launches(standby))
        launch = self._spot_launches(value.spot - min(value.standby, can_stand_by) - work_of(spot))
        bought = sum(self.pools[name].work for name in launch)
        launch += self._ondemand_launches(max(value.ondemand - work_of(nodes) - bought, standby))
        serving = work_of(_ready(ondemand))
        release = self._spot_releases(
            work_of(spot) - max(value.spot - min(value.standby, serving), value.ondemand - serving)
        )
        ready = work_of(_ready(nodes)) - work_of(_ready(release))
        kept = work_of(spot) - work_of(release)  # launches replace nothing yet
        surplus = work_of(ondemand) - max(value.standby, value.ondemand - kept)
        for node in sorted(ondemand, key=lambda node: (node.is_ready, node.busy, node.id)):
            if node.work > surplus + _EPS:
                continue
            surplus -= node.work
            if not node.is_ready:
                release.append(node)
            elif ready - node.work >= value.ondemand - _EPS:
                release.append(node)
                ready -= node.work
        return FleetPlan(tuple(launch), tuple(node.id for node in release), _reason(value))

    def _spot_launches(self, work: float) -> list[str]:
        """Returns the pools of the spot replicas to launch, one for each: always the pool whose work costs least, risk
        included.
        """
        held, total, bought = self._spot_by_region(self.nodes), work_of(self.nodes), Counter[str]()
        ondemand_usd_h = [pool.usd_h for pool in self.pools.values() if not pool.is_spot and pool.most != 0]
        limit_usd_h = min(ondemand_usd_h, default=float("inf"))
        open_pools = [pool for pool in self.pools.values() if pool.is_spot and pool.usd_h < limit_usd_h]
        chosen: list[str] = []
        while work > _EPS:
            available = [pool.name for pool in open_pools if pool.most is None or pool.most > bought[pool.name]]
            if not available:
                break
            cost = {name: self._usd_h(name, held[region(name)], total) * self._beyond(name, work) for name in available}
            name = min(available, key=lambda name: (cost[name], held[region(name)].get(name, 0)))
            regional, done = held[region(name)], self.pools[name].work
            regional[name] = regional.get(name, 0) + done
            total += done
            work -= done
            bought[name] += 1
            chosen.append(name)
        return chosen

    def _ondemand_launches(self, work: float) -> list[str]:
        chosen: list[str] = []
        for pool in sorted((pool for pool in self.pools.values() if not pool.is_spot), key=lambda pool: pool.usd_h):
            count = math.ceil(max(0.0, work) / pool.work - _EPS)
            count = count if pool.most is None else min(count, pool.most)
            chosen += [pool.name] * count
            work -= count * pool.work
        return chosen

    def _beyond(self, name: str, work: float) -> float:
        """Returns the work of a replica in this pool divided by the needed work, but at least 1: the excess is paid for
        too.
        """
        return max(1.0, self.pools[name].work / work)

    def _spot_releases(self, work: float) -> list[FleetNode]:
        """Returns spot nodes to release that do at most `work` in total: unready nodes first, then those in the zones
        where another replica would cost most.
        """
        held, total = self._spot_by_region(self.nodes), work_of(self.nodes)
        queues: dict[str, list[FleetNode]] = defaultdict(list)
        for node in sorted(self.nodes, key=_first_to_go, reverse=True):
            if node.is_spot:
                queues[node.pool].append(node)
        chosen: list[FleetNode] = []
        while heads := [queue[-1] for queue in queues.values() if queue and queue[-1].work <= work + _EPS]:
            if not all(node.is_ready for node in heads):
                heads = [node for node in heads if not node.is_ready]
            cost = {
                node.pool: self._usd_h(
                    node.pool, _less(held[region(node.pool)], node.pool, node.work), total - node.work
                )
                for node in heads
            }
            node = min(heads, key=lambda node: (-cost[node.pool], node.busy, node.id))
            chosen.append(queues[node.pool].pop())
            held[region(node.pool)] = _less(held[region(node.pool)], node.pool, node.work)
            total -= node.work
            work -= node.work
        return chosen

    def _spot_by_region(self, nodes: Iterable[FleetNode]) -> dict[str, dict[str, float]]:
        """Returns work by region and spot pool; losses in different regions are independent."""
        held: dict[str, dict[str, float]] = defaultdict(dict)
        for node in nodes:
            if self.pools[node.pool].is_spot:
                regional = held[region(node.pool)]
                regional[node.pool] = regional.get(node.pool, 0.0) + node.work
        return held

    def _usd_h(self, name: str, regional: Mapping[str, float], total: float) -> float:
        """Returns the cost in dollars an hour of one more unit of work in this pool: price, restarts and correlated
        losses.

        `regional`: the work in each spot pool of the same region; `total`: the work of all nodes.
        """
        pool, late = self.pools[name], self.replica_value.late_per_h
        held = {**regional, name: regional.get(name, 0) + 1}
        rates = {other: self.pools[other].losses_per_h for other in held}
        late_per_h = 0.0
        for share, names in losses(rates, self.replica_value.together, self.cold_start_s + DETECTION_S):
            if name in names:
                left = min(max(0, int(total + 1 - sum(held[other] for other in names))), len(late) - 2)
                late_per_h += share * (late[left] - late[left + 1])
        return (
            pool.usd_h * (1.0 + pool.losses_per_h * self.cold_start_s / 3600.0)
            + self.replica_value.late_usd * late_per_h
        )


def _reason(value: ReplicaValue) -> str:
    """Returns the reason in words: the SLO, the share of requests that was in time, and the purpose of the replicas."""
    asked = ""
    if value.slo_target is not None:
        attained = "none so far" if value.attained is None else f"{100 * value.attained:.2f} % in the last week"
        spare = value.spot - value.busy - value.for_bursts
        standby = f"; {value.standby} of them on demand, since all spot may be lost" if value.standby else ""
        asked = (
            f"; {100 * value.slo_target:g} % in time are asked, {attained}; of the {value.spot}, the usual rate needs "
            f"{value.busy}, bursts {value.for_bursts} more, lost nodes {spare} more{standby}"
        )
    return (
        f"{value.usual_rps:.2f} requests/s are usual and a late one costs ${value.late_usd:.4f}: "
        f"{value.spot} replicas are worth the spot price, {value.ondemand} the on-demand price{asked}"
    )


def _less(held: Mapping[str, float], name: str, work: float) -> dict[str, float]:
    """Returns a copy of `held` in which one pool has `work` less."""
    left = {other: amount - work * (other == name) for other, amount in held.items()}
    return {other: amount for other, amount in left.items() if amount > _EPS}


def _first_to_go(node: FleetNode) -> tuple[bool, int, str]:
    """Returns the sort key for releasing nodes of one pool, which are alike in work and price."""
    return node.is_ready, node.busy, node.id


def work_of(nodes: Iterable[FleetNode]) -> float:
    return sum(node.work for node in nodes)


def _ready(nodes: Iterable[FleetNode]) -> list[FleetNode]:
    return [node for node in nodes if node.is_ready]
