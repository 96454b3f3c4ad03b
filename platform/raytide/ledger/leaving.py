"""Who has let go of a node while Ray has not got the resources back yet: it is still theirs, not nobody's.

Between the end of a lease and the end of its placement group's workers, and while a replica that was taken away answers
its last requests, Ray shows a use that no record explains. Kept in memory: a controller that starts anew knows of none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.node import Resources, minus, plus
from raytide.ledger.occupancy import Held, Holder

GRACE_S = 30.0
"""What is in use for longer after its holder let go is somebody else's."""


@dataclass(frozen=True, slots=True)
class _Released:
    resources: Resources
    until_s: float


@dataclass(frozen=True, slots=True)
class RecentlyReleased:
    """`observe` at each look; `held` is what `occupancies` wants."""

    before: Held = field(default_factory=dict)
    released: Mapping[tuple[str, Holder], _Released] = field(default_factory=dict)

    @property
    def held(self) -> Held:
        held: dict[str, dict[Holder, Resources]] = {}
        for (node_id, holder), gone in self.released.items():
            held.setdefault(node_id, {})[holder] = gone.resources
        return held

    def observe(self, now: Held, now_s: float) -> RecentlyReleased:
        """Whoever holds less than at the last look has let go of the difference."""
        left = {key: gone for key, gone in self.released.items() if now_s < gone.until_s}
        for node_id, holders in self.before.items():
            for holder, had in holders.items():
                rest = minus(had, now.get(node_id, {}).get(holder, {}))
                if less := {name: amount for name, amount in rest.items() if amount > 0}:
                    key = (node_id, holder)
                    earlier = left[key].resources if key in left else {}
                    left[key] = _Released(plus(earlier, less), now_s + GRACE_S)
        return RecentlyReleased(now, left)
