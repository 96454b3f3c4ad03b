"""Recently released resources: while Ray still reports them in use, their former holder pays for them.

Between the end of a lease and the end of its placement group's workers, and while a removed replica answers its last
requests, Ray reports usage that no record explains. Kept in memory: a new controller starts without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.node import Resources, minus, plus
from raytide.ledger.occupancy import Held, Holder

GRACE_S = 30.0
"""Usage that lasts longer after a release belongs to something else."""


@dataclass(frozen=True, slots=True)
class _Released:
    resources: Resources
    until_s: float


@dataclass(frozen=True, slots=True)
class RecentlyReleased:
    """The resources that were released but may still be in use.

    Call `observe` at each tick; `held` is an argument of `occupancies`.
    """

    before: Held = field(default_factory=dict)
    released: Mapping[tuple[str, Holder], _Released] = field(default_factory=dict)

    @property
    def held(self) -> Held:
        held: dict[str, dict[Holder, Resources]] = {}
        for (node_id, holder), released in self.released.items():
            held.setdefault(node_id, {})[holder] = released.resources
        return held

    def observe(self, now: Held, now_s: float) -> RecentlyReleased:
        """Adds what holders have released since the last call."""
        left = {key: released for key, released in self.released.items() if now_s < released.until_s}
        for node_id, holders in self.before.items():
            for holder, previous in holders.items():
                rest = minus(previous, now.get(node_id, {}).get(holder, {}))
                if less := {name: amount for name, amount in rest.items() if amount > 0}:
                    key = (node_id, holder)
                    earlier = left[key].resources if key in left else {}
                    left[key] = _Released(plus(earlier, less), now_s + GRACE_S)
        return RecentlyReleased(now, left)
