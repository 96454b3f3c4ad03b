"""The idle time of each node. It is measured in two ways. Raytide's own clock measures how long a node has been idle in
Ray. The node's meters show how long it has been idle physically.

Ray's own idle clock is not used: it restarts whenever work queues on any node (ray#60546), and it covers only processes
that Ray started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from raytide.autoscaler.ray_gcs import RayNode
from raytide.core.clock import utc
from raytide.core.objects.node import FRESH_S, NodeType, Use


@dataclass(frozen=True, slots=True)
class QuietInterval:
    """An unbroken series of readings in which no meter of a node was above its limit."""

    since_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class IdleClock:
    """The time at which each idle node's present idle period began. A new controller starts to count at zero. This is
    safe, because the only effect is that idle nodes are kept for longer.
    """

    since_s: Mapping[str, float] = field(default_factory=dict)
    quiet: Mapping[str, QuietInterval] = field(default_factory=dict)

    def observe(self, ray_nodes: Iterable[RayNode], now_s: float) -> IdleClock:
        """Returns the clock after an observation of Ray. After a failed observation, callers keep the old clock."""
        idle = [n.node_id for n in ray_nodes if n.node_id and n.is_alive and not n.is_busy]
        return replace(self, since_s={node_id: self.since_s.get(node_id, now_s) for node_id in idle})

    def observe_meters(self, uses: Mapping[str, Use], types: Mapping[str, NodeType]) -> IdleClock:
        """Returns a clock that includes new readings of the nodes' meters. `uses` maps the id of a node to its
        readings, and `types` maps the id of a node to its node type.
        """
        quiet = {}
        for node_id, node_type in types.items():
            last_s = _quiet_at_s(node_type, uses.get(node_id, {}))
            if last_s is not None:
                before = self.quiet.get(node_id)
                goes_on = before is not None and last_s - before.last_s <= FRESH_S
                quiet[node_id] = QuietInterval(before.since_s if before is not None and goes_on else last_s, last_s)
        return replace(self, quiet=quiet)

    def idle_s(self, node_id: str, now_s: float) -> float:
        since_s = self.since_s.get(node_id)
        return 0.0 if since_s is None else now_s - since_s

    def busy_reason(self, node_id: str, node_type: NodeType, use: Use, now_s: float) -> str:
        """Returns the reason why a node that is idle in Ray may still be busy. Returns an empty string if the node is
        idle. The text stays the same while nothing changes.
        """
        for meter, limit in node_type.busy_above.items():
            reading, name = use.get(meter), meter.upper()
            if reading is None:
                return f"idle in Ray, but its {name} use was never measured (no meter? `busy_above: {{}}` for its type)"
            if not reading.is_fresh(now_s):
                last = f"last measured at {utc(reading.at_s)}, over {FRESH_S:.0f} s ago"
                return f"idle in Ray, but its {name} use was {last}"
            if reading.value > limit:
                return f"idle in Ray, but its {name} is in use, over {limit:.0%}: work that Ray did not start"
        quiet = self.quiet.get(node_id)
        if quiet is None or not node_type.busy_above or quiet.last_s - quiet.since_s >= node_type.idle_timeout_s:
            return ""
        return f"idle in Ray, but physically only since {utc(quiet.since_s)}"


def _quiet_at_s(node_type: NodeType, use: Use) -> float | None:
    """Returns the time of the oldest of the meters' readings if all are within their limits. Returns None if a meter is
    above its limit or has no reading, or if the node type has no meters.
    """
    readings = [(use.get(meter), limit) for meter, limit in node_type.busy_above.items()]
    if not readings or any(reading is None or reading.value > limit for reading, limit in readings):
        return None
    return min(reading.at_s for reading, _ in readings if reading is not None)
