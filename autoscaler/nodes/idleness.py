"""How long nothing has run on each node: in Ray, by our own clock, and physically, by the word of the node's meters.

Ray's own clock starts over whenever work queues anywhere (ray#60546), and it knows only of what Ray started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from raytide.autoscaler.ray_gcs import RayNode
from raytide.core.clock import utc
from raytide.core.objects.node import FRESH_S, NodeType, Use


@dataclass(frozen=True, slots=True)
class QuietInterval:
    """From the first to the last word, without a break, that no meter was over its limit."""

    since_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class IdleClock:
    """Since when each node has been seen idle without a break. A new controller starts at zero: the safe side."""

    since_s: Mapping[str, float] = field(default_factory=dict)
    quiet: Mapping[str, QuietInterval] = field(default_factory=dict)

    def observe(self, ray_nodes: Iterable[RayNode], now_s: float) -> IdleClock:
        """The clock after one look at Ray. After a look that failed keep the old clock: it is not an empty look."""
        idle = [n.node_id for n in ray_nodes if n.node_id and n.is_alive and not n.is_busy]
        return replace(self, since_s={node_id: self.since_s.get(node_id, now_s) for node_id in idle})

    def observe_meters(self, uses: Mapping[str, Use], types: Mapping[str, NodeType]) -> IdleClock:
        """The clock after a look at the meters of these nodes."""
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
        """Why a node that Ray calls idle is not: it works, or that is not known. Empty when nothing speaks against it.

        The same words at every tick while the same is true.
        """
        for meter, limit in node_type.busy_above.items():
            word, name = use.get(meter), meter.upper()
            if word is None:
                return f"idle in Ray, but its {name} use was never heard of (no meter? `busy_above: {{}}` for its type)"
            if not word.is_fresh(now_s):
                return (
                    f"idle in Ray, but its {name} use was last heard of at {utc(word.at_s)}, over {FRESH_S:.0f} s ago"
                )
            if word.value > limit:
                return f"idle in Ray, but its {name} is in use, over {limit:.0%}: something works there beside Ray"
        quiet = self.quiet.get(node_id)
        if quiet is None or not node_type.busy_above or quiet.last_s - quiet.since_s >= node_type.idle_timeout_s:
            return ""
        return f"idle in Ray, but physically only since {utc(quiet.since_s)}"


def _quiet_at_s(node_type: NodeType, use: Use) -> float | None:
    """When its meters said that none is over its limit; None when one is, was never heard, or there is none."""
    words = [(use.get(meter), limit) for meter, limit in node_type.busy_above.items()]
    if not words or any(word is None or word.value > limit for word, limit in words):
        return None
    return min(word.at_s for word, _ in words if word is not None)
