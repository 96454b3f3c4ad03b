"""The back-off of spot zones in the serving simulation. It begins when a zone refuses a launch or reclaims a node.

The back-off doubles with each refusal (launch_backoff.py), up to a short maximum. The maximum is short because a
request for a node costs nothing, but each minute in which the policy misses an available zone costs the on-demand
price. After the back-off, only one node may be requested from the zone. Once that node is launched, any number may
be requested.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytide.autoscaler.nodes import launch_backoff
from raytide.core.objects.snapshot import Pool

LONGEST_BACKOFF_S = 300.0


@dataclass(slots=True)
class ZoneBackoff:
    node_type: str = "spot"
    _zones: dict[str, Pool] = field(default_factory=dict)
    """Zones whose last launch or node failed."""

    def max_launches(self, zone: str, now_s: float) -> int | None:
        """Returns the number of nodes that may be requested from the zone now. None means any number."""
        known = self._zones.get(zone)
        if known is None:
            return None
        return 1 if known.retry_at_s <= now_s else 0

    def on_launched(self, zone: str) -> None:
        self._zones.pop(zone, None)

    def on_refused(self, zone: str, now_s: float) -> None:
        self._back_off(self._zones.get(zone, Pool(self.node_type, zone)), now_s, "refused")

    def on_reclaimed(self, zone: str, now_s: float) -> None:
        self._back_off(Pool(self.node_type, zone), now_s, "taken back")

    def _back_off(self, pool: Pool, now_s: float, reason: str) -> None:
        rests = launch_backoff.after_failure(pool, now_s, reason)
        self._zones[pool.zone] = replace(rests, retry_at_s=min(rests.retry_at_s, now_s + LONGEST_BACKOFF_S))
