"""How many spot nodes each zone would give us, as far as launches and losses have told.

A refusal while we hold nodes says that the zone is full at that number, one while we hold none that it is empty; either
lets it rest, twice as long after each further refusal (pools.py). After the rest it is tried with few nodes, and with
more as they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.autoscaler import pools
from raytide.core.snapshot import Pool


@dataclass(slots=True)
class _Zone:
    pool: Pool
    room: int | None = None
    """What it is known to hold at most; None when nothing was refused since the last success."""


@dataclass(slots=True)
class Stock:
    node_type: str = "spot"
    _zones: dict[str, _Zone] = field(default_factory=dict)

    def most(self, zone: str, held: int, now_s: float) -> int:
        """How many nodes it is worth trying to hold there."""
        known = self._zones.get(zone)
        if known is None or known.room is None:
            return held + max(1, held)
        if known.pool.retry_at_s > now_s:
            return max(known.room, held)
        return max(known.room, held + 1)

    def gave(self, zone: str) -> None:
        self._zones[zone] = _Zone(Pool(self.node_type, zone))

    def refused(self, zone: str, held: int, now_s: float) -> None:
        known = self._zones.get(zone)
        before = known.pool if known and known.room == held else Pool(self.node_type, zone)
        self._zones[zone] = _Zone(pools.after_failure(before, now_s, "refused"), held)

    def took_back(self, zone: str, held: int, now_s: float) -> None:
        """`held`: what it left us."""
        self._zones[zone] = _Zone(pools.after_failure(Pool(self.node_type, zone), now_s, "taken back"), held)
