"""How long nothing has run on each node, by our own clock: Ray's restarts whenever work queues anywhere (ray#60546)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raytide.autoscaler.ray_node import RayNode


@dataclass(frozen=True, slots=True)
class IdleClock:
    """Since when each node has been seen idle without a break. A new controller starts at zero: the safe side."""

    since_s: Mapping[str, float] = field(default_factory=dict)

    def observe(self, ray_nodes: Iterable[RayNode], now_s: float) -> IdleClock:
        """The clock after one look at Ray. After a look that failed keep the old clock: it is not an empty look."""
        idle = [n.node_id for n in ray_nodes if n.node_id and n.is_alive and not n.is_busy]
        return IdleClock({node_id: self.since_s.get(node_id, now_s) for node_id in idle})

    def idle_s(self, node_id: str, now_s: float) -> float:
        since_s = self.since_s.get(node_id)
        return 0.0 if since_s is None else now_s - since_s
