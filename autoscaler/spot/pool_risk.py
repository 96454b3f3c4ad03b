"""The reclaim rate of each spot pool, learned from the cluster's own nodes. Losses in other zones raise the rate."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raytide.autoscaler.nodes.lifecycle import was_taken_back
from raytide.autoscaler.spot.reclaim_hazard import STALE_S, ReclaimHazard, pool_name
from raytide.core.objects.hardware.transfer import region
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import Quote

RECENT_S = 900.0
REPLAY_STEP_S = STALE_S / 2
MAX_REPLAY_STEPS = 2000
"""The most steps of one replay: those of a week."""
SAME_REGION, ELSEWHERE = 0.4, 0.16
"""Correlation of zones on recorded V100 spot traces: within a region, and across."""

_HELD = (NodeState.READY, NodeState.DRAINING)


@dataclass(slots=True)
class PoolRisk:
    """Reclaim rates of spot pools, learned from node records. A new controller learns them from the stored records."""

    hazard: ReclaimHazard = field(default_factory=ReclaimHazard)
    """Keyed by `pool_name`."""
    _lost: set[str] = field(default_factory=set)
    """Ids of nodes whose loss has been counted."""
    _recent: deque[tuple[float, str, str]] = field(default_factory=deque)
    """Time, node type and zone of recent losses."""
    _at_s: float | None = None

    def replay(self, nodes: Iterable[Node], now_s: float) -> None:
        """Learns from the records of all stored nodes, including live ones, up to now."""
        spot = [node for node in nodes if node.market is CapacityType.SPOT and node.ready_at_s is not None]
        at_s = max(
            min((node.ready_at_s or 0.0 for node in spot), default=now_s), now_s - MAX_REPLAY_STEPS * REPLAY_STEP_S
        )
        ends = [(node.ended_at_s, node.id, node) for node in spot if node.ended_at_s is not None]
        for end_s, _, node in sorted(end for end in ends if at_s <= end[0] <= now_s):
            at_s = self._advance(spot, at_s, end_s)
            self.observe((*_held(spot, end_s), node), end_s)
        self._advance(spot, at_s, now_s)

    def _advance(self, spot: Sequence[Node], at_s: float, until_s: float) -> float:
        """Observes in steps so short that the age of no zone starts again between two of them. Returns `until_s`."""
        while at_s < until_s:
            self.observe(_held(spot, at_s), at_s)
            at_s += REPLAY_STEP_S
        return until_s

    def observe(self, nodes: Iterable[Node], now_s: float) -> None:
        spot = [node for node in nodes if node.market is CapacityType.SPOT and node.ready_at_s is not None]
        lost = [node for node in spot if was_taken_back(node) and node.id not in self._lost]
        held = Counter(
            pool_name(node.type, node.zone) for node in spot if node.state in _HELD and not was_taken_back(node)
        )
        dt_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self.hazard.observe(held, Counter(pool_name(node.type, node.zone) for node in lost), now_s, dt_s)
        self._at_s = now_s
        self._lost |= {node.id for node in lost}
        self._recent.extend((now_s, node.type, node.zone) for node in lost)
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()

    def quotes(
        self, node_types: Iterable[NodeType], prices: Mapping[tuple[str, str], int], now_s: float
    ) -> tuple[Quote, ...]:
        """Returns a quote for each spot pool, and for each on-demand pool that has a known price.

        The quote of a spot pool has its price, if known, and its expected reclaims per hour.
        """
        found = []
        for node_type in node_types:
            for zone in node_type.zones:
                price = prices.get((node_type.name, zone))
                if node_type.market is CapacityType.SPOT:
                    found.append(Quote(node_type.name, zone, price, self._per_h(node_type.name, zone, now_s)))
                elif price is not None:
                    found.append(Quote(node_type.name, zone, price))
        return tuple(found)

    def _per_h(self, node_type: str, zone: str, now_s: float) -> float:
        """Returns the pool's expected reclaims per hour: its own rate, raised by recent losses of its node type in
        other zones.
        """
        others = {place for at_s, type_, place in self._recent if type_ == node_type and place != zone}
        near = sum(SAME_REGION if region(place) == region(zone) else ELSEWHERE for place in others)
        return round(self.hazard.per_h(pool_name(node_type, zone), now_s) + near, 2)


def _held(nodes: Iterable[Node], at_s: float) -> list[Node]:
    """Returns the nodes that were ready at that time, with the state that they had then."""
    return [
        replace(node, state=NodeState.READY, reason="")
        for node in nodes
        if node.ready_at_s is not None and node.ready_at_s <= at_s < (node.ended_at_s or float("inf"))
    ]
