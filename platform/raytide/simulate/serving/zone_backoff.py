"""Which zones it is worth asking for spot nodes, as far as launches and losses have told.

One that refused a node or took one back rests, twice as long after each further refusal (pools.py), but never for long:
asking is free, and each minute in which a zone is not known to be back is paid at the price of on demand. After the
rest it is tried with one node, and with more once that was given.
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
    """Those that did not give the last node."""

    def max_launches(self, zone: str, now_s: float) -> int | None:
        """How many more it is worth asking for now; None when there is no limit."""
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
