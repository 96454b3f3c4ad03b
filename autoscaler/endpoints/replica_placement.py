"""Where the replicas of one endpoint should be bought and which should go: what they are worth and what there is to buy
goes in, a plan comes out. The controller and the simulator both call it.

So many replicas are wanted at the price of spot, and, if spot cannot be had, so many at that of on demand. On-demand
replicas stay until the spot replicas that replace them serve. No clock, no memory and no I/O.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raytide.autoscaler.spot.reclaim_hazard import losses, region
from raytide.core.objects.endpoint import ReplicaValue

DETECTION_S = 20.0
"""From a loss to the launch of what replaces it, at most."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """A place to buy replicas."""

    name: str
    """A spot zone, or a node type in one; what it ends in after its region tells the zones of a region apart."""
    usd_h: float
    """Of one unit of work: see `FleetNode.work`."""
    is_spot: bool
    losses_per_h: float = 0.0
    most: int | None = None
    """How many more it is worth asking for now; None when there is no limit."""
    work: float = 1.0
    """What a replica there does."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """The place of one replica."""

    id: str
    pool: str
    is_spot: bool
    """Or costs no more than spot does: nothing is saved by leaving it for spot."""
    is_ready: bool
    busy: int = 0
    work: float = 1.0
    """What it does, in the units in which `ReplicaValue` counts replicas: those of a replica where they are slowest."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    launch: tuple[str, ...] = ()
    """Pools, one for each replica to launch."""
    release: tuple[str, ...] = ()
    """Ids of nodes."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetState:
    """`pools`: those of all `nodes` included. More spot is bought where it costs least, its risk included."""

    replica_value: ReplicaValue
    pools: Mapping[str, ReplicaPool]
    nodes: Sequence[FleetNode]
    cold_start_s: float

    def plan(self) -> FleetPlan:
        worth, nodes = self.replica_value, self.nodes
        spot = [node for node in nodes if node.is_spot]
        ondemand = [node for node in nodes if not node.is_spot]
        launch = self._spot_launches(worth.spot - work_of(spot))
        bought = sum(self.pools[name].work for name in launch)
        launch += self._ondemand_launches(worth.ondemand - work_of(nodes) - bought)
        release = self._spot_releases(work_of(spot) - max(worth.spot, worth.ondemand - work_of(_ready(ondemand))))
        ready = work_of(_ready(nodes)) - work_of(_ready(release))
        kept = work_of(spot) - work_of(release)  # what is about to be launched replaces nothing yet
        surplus = work_of(ondemand) - max(0, worth.ondemand - kept)
        for node in sorted(ondemand, key=lambda node: (node.is_ready, node.busy, node.id)):
            if node.work > surplus + _EPS:
                continue
            surplus -= node.work
            if not node.is_ready:
                release.append(node)
            elif ready - node.work >= worth.ondemand - _EPS:
                release.append(node)
                ready -= node.work
        reason = (
            f"{worth.usual_rps:.2f} requests/s are usual and a late one costs ${worth.late_usd:.4f}: "
            f"{worth.spot} replicas are worth the price of spot, {worth.ondemand} that of on demand"
        )
        return FleetPlan(tuple(launch), tuple(node.id for node in release), reason)

    def _spot_launches(self, work: float) -> list[str]:
        """Each where what it does of that costs least, its risk included."""
        held, total, bought = self._spot_by_region(self.nodes), work_of(self.nodes), Counter[str]()
        ondemand_usd_h = [pool.usd_h for pool in self.pools.values() if not pool.is_spot and pool.most != 0]
        dear_usd_h = min(ondemand_usd_h, default=float("inf"))
        open_pools = [pool for pool in self.pools.values() if pool.is_spot and pool.usd_h < dear_usd_h]
        chosen: list[str] = []
        while work > _EPS:
            there = [pool.name for pool in open_pools if pool.most is None or pool.most > bought[pool.name]]
            if not there:
                break
            cost = {name: self._usd_h(name, held[region(name)], total) * self._beyond(name, work) for name in there}
            name = min(there, key=lambda name: (cost[name], held[region(name)].get(name, 0)))
            near, done = held[region(name)], self.pools[name].work
            near[name] = near.get(name, 0) + done
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
        """How many times the work that is wanted a replica there does, and is paid for."""
        return max(1.0, self.pools[name].work / work)

    def _spot_releases(self, work: float) -> list[FleetNode]:
        """The spot nodes to let go, which do no more than that: those that are not ready, then of the zones where one
        more costs most."""
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
        """Work by region and spot pool: what is lost in one region does not tell of another."""
        held: dict[str, dict[str, float]] = defaultdict(dict)
        for node in nodes:
            if self.pools[node.pool].is_spot:
                near = held[region(node.pool)]
                near[node.pool] = near.get(node.pool, 0.0) + node.work
        return held

    def _usd_h(self, name: str, near: Mapping[str, float], total: float) -> float:
        """An hour of one unit more there: what starting again costs, and that it is missing just when others are.

        `near`: the work in the spot pools of its region, of `total`.
        """
        pool, late = self.pools[name], self.replica_value.late_per_h
        held = {**near, name: near.get(name, 0) + 1}
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


def _less(held: Mapping[str, float], name: str, work: float) -> dict[str, float]:
    """With so much less there."""
    left = {other: there - work * (other == name) for other, there in held.items()}
    return {other: there for other, there in left.items() if there > _EPS}


def _first_to_go(node: FleetNode) -> tuple[bool, int, str]:
    """The order within one pool, where all do and cost the same."""
    return node.is_ready, node.busy, node.id


def work_of(nodes: Iterable[FleetNode]) -> float:
    return sum(node.work for node in nodes)


def _ready(nodes: Iterable[FleetNode]) -> list[FleetNode]:
    return [node for node in nodes if node.is_ready]
