"""Spot pools as our own nodes show them.

A pool is there while it gives nodes and keeps them, and gone once it refused one or took one back, until it gives one
again or nobody has asked it for a while.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raytide.autoscaler.nodes.lifecycle import was_cancelled, was_taken_back
from raytide.autoscaler.spot.availability_model import AvailabilityModel
from raytide.autoscaler.spot.availability_model import ReclaimRates as Rates
from raytide.autoscaler.spot.reclaim_hazard import STALE_S
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.snapshot import SpotForecast

UPDATE_S = STALE_S / 2
"""A spell grows older between two looks only; at the past one looks so often."""
PAST_S = 14 * 86400.0
"""What lies longer ago has no weight."""

UNUSED_S = 86400.0
"""A market of which nobody asks for so long is not watched any more; asked again, it is made up for."""

_LOST = (NodeState.TERMINATING, NodeState.GONE)


def pool_name(node_type: str, zone: str) -> str:
    return f"{node_type}/{zone}"


def forecast_from_rates(
    pools: Sequence[str], is_up: Sequence[bool], since_s: Sequence[float], rates: Rates
) -> SpotForecast:
    return SpotForecast(
        pools=tuple(pools),
        is_up=tuple(is_up),
        since_s=tuple(since_s),
        lost=tuple(rates.lost.tolist()),
        switched=tuple(tuple(row) for row in rates.switched.tolist()),
        found=tuple(rates.found.tolist()),
        zone_hazard=tuple(tuple(row) for row in rates.zone_hazard.tolist()),
    )


@dataclass(slots=True)
class PoolAvailability:
    """Kept from tick to tick. What was seen is kept too, so that pools can be watched as one market later on."""

    _events: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    """By pool: when it gave a node (True), refused one or took one back."""
    _recorded: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Nodes that have told so already, and of when."""
    _models: dict[tuple[str, ...], AvailabilityModel] = field(default_factory=dict)
    _last_used_s: dict[tuple[str, ...], float] = field(default_factory=dict)

    def observe(self, nodes: Iterable[Node], now_s: float) -> None:
        for node in nodes:
            if node.market is CapacityType.SPOT:
                self._record_node(node, now_s)
        self._forget(now_s)
        for pools, spells in self._models.items():
            self._update(spells, pools, now_s)

    def forecast(self, pools: Sequence[str], now_s: float) -> SpotForecast:
        """Of these pools as one market; watched from now on."""
        key = tuple(pools)
        self._last_used_s[key] = now_s
        if key not in self._models:
            self._models[key] = self._replay(key, now_s)
        spells = self._models[key]
        return forecast_from_rates(key, spells.up.tolist(), spells.since_s.tolist(), spells.cached_rates(now_s))

    def _record_node(self, node: Node, now_s: float) -> None:
        pool = pool_name(node.type, node.zone)
        if node.ready_at_s is not None:
            self._record(node.id, pool, node.ready_at_s, now_s, is_given=True)
        never_was = node.ready_at_s is None and node.state in _LOST and not was_cancelled(node)
        if was_taken_back(node) or never_was:
            self._record(node.id, pool, min(now_s, node.ended_at_s or now_s), now_s, is_given=False)

    def _forget(self, now_s: float) -> None:
        past_s = now_s - PAST_S
        if any(told[0][0] < past_s for told in self._events.values()):
            kept = {pool: [one for one in told if one[0] >= past_s] for pool, told in self._events.items()}
            self._events = {pool: told for pool, told in kept.items() if told}
            self._recorded = {key: at_s for key, at_s in self._recorded.items() if at_s >= past_s}
        for key in [key for key, asked_s in self._last_used_s.items() if now_s - asked_s > UNUSED_S]:
            del self._last_used_s[key], self._models[key]

    def _record(self, node_id: str, pool: str, at_s: float, now_s: float, *, is_given: bool) -> None:
        if (node_id, is_given) not in self._recorded and at_s >= now_s - PAST_S:
            self._recorded[node_id, is_given] = at_s
            insort(self._events.setdefault(pool, []), (at_s, is_given))

    def _replay(self, pools: tuple[str, ...], now_s: float) -> AvailabilityModel:
        """Watched over the time of which there is word."""
        told = [at_s for pool in pools for at_s, _ in self._events.get(pool, ())]
        began_s = max(min(told, default=now_s), now_s - PAST_S)
        looks = [began_s + UPDATE_S * step for step in range(int((now_s - began_s) / UPDATE_S) + 1)]
        spells = AvailabilityModel(len(pools))
        for at_s in sorted({*looks, *(at_s for at_s in told if at_s >= began_s), now_s}):
            self._update(spells, pools, at_s)
        return spells

    def _update(self, spells: AvailabilityModel, pools: tuple[str, ...], at_s: float) -> None:
        """Seldom while nothing changes: it is done for every market at every tick."""
        at_s = max(at_s, spells.at_s)  # a clock may be set back
        up = [self._is_up(pool, at_s) for pool in pools]
        if up != spells.up.tolist() or not at_s - spells.at_s < UPDATE_S:
            spells.observe(at_s, up)

    def _is_up(self, pool: str, at_s: float) -> bool:
        told = self._events.get(pool, [])
        place = bisect_right(told, (at_s, True))
        return place == 0 or told[place - 1][1] or at_s - told[place - 1][0] > STALE_S
