"""A node as Ray sees it, matched to ours by the instance id that every raylet is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.node import Resources


@dataclass(frozen=True, slots=True)
class RayNode:
    ray_node_id: str
    """Hex, as every other call of Ray wants it."""
    node_id: str
    """Ours; empty for the head and for nodes that somebody else started."""
    is_alive: bool = True
    is_draining: bool = False
    total: Resources = field(default_factory=dict)
    available: Resources = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    idle_ms: int = 0
    """Ray's own clock. It restarts whenever work queues anywhere (ray#60546), so decisions use `IdleClock`."""
    activity: tuple[str, ...] = ()
    """Why Ray calls it busy, in its words. They stay when it becomes idle, so they count only while `idle_ms` is 0."""

    @property
    def is_busy(self) -> bool:
        is_used = any(self.available.get(name, 0.0) < amount for name, amount in self.total.items())
        return is_used or (bool(self.activity) and self.idle_ms == 0)
