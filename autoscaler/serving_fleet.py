"""Where the replicas of one endpoint should be bought and which should go: what they are worth and what there is to buy
goes in, a plan comes out. The controller and the simulator both call it.

So many replicas are wanted at the price of spot, and, if spot cannot be had, so many at that of on demand. On-demand
replicas stay until the spot replicas that replace them serve. No clock, no memory and no I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raytide.autoscaler.hazard import holds, losses, region
from raytide.core.endpoint import Worth

NOTICED_S = 20.0
"""From a loss to the launch of what replaces it, at most."""


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """A place to buy replicas."""

    name: str
    """A spot zone, or a node type in one; what it ends in after its region tells the zones of a region apart."""
    usd_h: float
    """Of one replica."""
    is_spot: bool
    losses_per_h: float = 0.0
    most: int | None = None
    """How many more it is worth asking for now; None when there is no limit."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """The place of one replica."""

    id: str
    pool: str
    is_spot: bool
    """Or costs no more than spot does: nothing is saved by leaving it for spot."""
    is_ready: bool
    busy: int = 0


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

    worth: Worth
    pools: Mapping[str, ReplicaPool]
    nodes: Sequence[FleetNode]
    cold_start_s: float

    def plan(self) -> FleetPlan:
        worth, nodes = self.worth, self.nodes
        spot = [node for node in nodes if node.is_spot]
        ondemand = [node for node in nodes if not node.is_spot]
        launch = self._spot_launches(worth.spot - len(spot))
        launch += self._ondemand_launches(worth.ondemand - len(nodes) - len(launch))
        release = self._dearest(len(spot) - max(worth.spot, worth.ondemand - sum(n.is_ready for n in ondemand)))
        ready = sum(node.is_ready for node in nodes) - sum(node.is_ready for node in release)
        kept = len(spot) - len(release)  # what is about to be launched replaces nothing yet
        surplus = len(ondemand) - max(0, worth.ondemand - kept)
        for node in sorted(ondemand, key=lambda node: (node.is_ready, node.busy, node.id))[: max(0, surplus)]:
            if not node.is_ready:
                release.append(node)
            elif ready - 1 >= worth.ondemand:
                release.append(node)
                ready -= 1
        reason = (
            f"{worth.usual_rps:.2f} requests/s are usual and a late one costs ${worth.late_usd:.4f}: "
            f"{worth.spot} replicas are worth the price of spot, {worth.ondemand} that of on demand"
        )
        return FleetPlan(tuple(launch), tuple(node.id for node in release), reason)

    def _spot_launches(self, count: int) -> list[str]:
        """Each where one more costs least, its risk included."""
        held, total, bought = self._spot_by_region(self.nodes), len(self.nodes), Counter[str]()
        ondemand_usd_h = [pool.usd_h for pool in self.pools.values() if not pool.is_spot and pool.most != 0]
        dear_usd_h = min(ondemand_usd_h, default=float("inf"))
        open_pools = [pool for pool in self.pools.values() if pool.is_spot and pool.usd_h < dear_usd_h]
        chosen: list[str] = []
        while len(chosen) < count:
            there = [pool.name for pool in open_pools if pool.most is None or pool.most > bought[pool.name]]
            if not there:
                break
            cost = {name: self._usd_h(name, held[region(name)], total) for name in there}
            name = min(there, key=lambda name: (cost[name], held[region(name)].get(name, 0)))
            near = held[region(name)]
            near[name] = near.get(name, 0) + 1
            total += 1
            bought[name] += 1
            chosen.append(name)
        return chosen

    def _ondemand_launches(self, count: int) -> list[str]:
        chosen: list[str] = []
        for pool in sorted((pool for pool in self.pools.values() if not pool.is_spot), key=lambda pool: pool.usd_h):
            left = max(0, count - len(chosen))
            chosen += [pool.name] * (left if pool.most is None else min(left, pool.most))
        return chosen

    def _dearest(self, count: int) -> list[FleetNode]:
        """The spot nodes to let go: those that are not ready, then of the zones where one more costs most."""
        left = list(self.nodes)
        chosen: list[FleetNode] = []
        while len(chosen) < count:
            held = self._spot_by_region(left)
            spot = [node for node in left if node.is_spot]
            there = dict.fromkeys(node.pool for node in spot)
            cost = {name: self._usd_h(name, _less(held[region(name)], name), len(left) - 1) for name in there}
            node = min(spot, key=lambda node: (node.is_ready, -cost[node.pool], node.busy, node.id))
            left.remove(node)
            chosen.append(node)
        return chosen

    def _spot_by_region(self, nodes: Iterable[FleetNode]) -> dict[str, dict[str, int]]:
        """Replicas by region and spot pool: what is lost in one region does not tell of another."""
        held: dict[str, dict[str, int]] = defaultdict(dict)
        for name, count in holds(node.pool for node in nodes).items():
            if self.pools[name].is_spot:
                held[region(name)][name] = count
        return held

    def _usd_h(self, name: str, near: Mapping[str, int], total: int) -> float:
        """An hour of one more replica there: what starting again costs, and that it is missing just when others are.

        `near`: those in the spot pools of its region, of `total`.
        """
        pool, late = self.pools[name], self.worth.late_per_h
        held = {**near, name: near.get(name, 0) + 1}
        rates = {other: self.pools[other].losses_per_h for other in held}
        late_per_h = 0.0
        for share, names in losses(rates, self.worth.together, self.cold_start_s + NOTICED_S):
            if name in names:
                left = min(total + 1 - sum(held[other] for other in names), len(late) - 2)
                late_per_h += share * (late[left] - late[left + 1])
        return pool.usd_h * (1.0 + pool.losses_per_h * self.cold_start_s / 3600.0) + self.worth.late_usd * late_per_h


def _less(held: Mapping[str, int], name: str) -> dict[str, int]:
    """With one replica fewer there."""
    left = {other: count - (other == name) for other, count in held.items()}
    return {other: count for other, count in left.items() if count}
