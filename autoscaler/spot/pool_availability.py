"""The availability of spot pools, derived from the cluster's own nodes.

A pool is up while it sells nodes and keeps them. A refusal or a reclaim takes the pool down. The pool is up again when
it sells a node, or when the refusal or reclaim is older than `STALE_S`. A pool about which nothing is known is up.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raytide.autoscaler.nodes.lifecycle import was_cancelled, was_taken_back
from raytide.autoscaler.spot.availability_model import AvailabilityModel, ReclaimRates
from raytide.autoscaler.spot.reclaim_hazard import STALE_S, pool_name
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.snapshot import SpotForecast

UPDATE_S = STALE_S / 2
"""The period of model updates while nothing changes."""
PAST_S = 14 * 86400.0
"""Events older than this are forgotten."""
UNUSED_S = 86400.0
"""The time after which an unused model is dropped; the next request replays its events."""

_LOST = (NodeState.TERMINATING, NodeState.GONE)


def forecast_from_rates(
    pools: Sequence[str], is_up: Sequence[bool], since_s: Sequence[float], rates: ReclaimRates
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
    """Availability models: one model for each set of spot pools. The models persist from tick to tick. Past events are
    also kept, because the model of a new set of pools is trained on them.
    """

    _events: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    """Events by pool: times at which it sold a node (True), or refused or reclaimed one (False)."""
    _recorded: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Event times by node id and kind, so that each counts once."""
    _models: dict[tuple[str, ...], AvailabilityModel] = field(default_factory=dict)
    _last_used_s: dict[tuple[str, ...], float] = field(default_factory=dict)

    def observe(self, nodes: Iterable[Node], now_s: float) -> None:
        for node in nodes:
            if node.market is CapacityType.SPOT:
                self._record_node(node, now_s)
        self._forget(now_s)
        for pools, model in self._models.items():
            self._update(model, pools, now_s)

    def forecast(self, pools: Sequence[str], now_s: float) -> SpotForecast:
        """Returns the spot forecast of the market that consists of these pools. The model of this market is kept, and
        later observations update it.
        """
        key = tuple(pools)
        self._last_used_s[key] = now_s
        if key not in self._models:
            self._models[key] = self._replay(key, now_s)
        model = self._models[key]
        return forecast_from_rates(key, model.up.tolist(), model.since_s.tolist(), model.cached_rates(now_s))

    def _record_node(self, node: Node, now_s: float) -> None:
        pool = pool_name(node.type, node.zone)
        if node.ready_at_s is not None:
            self._record(node.id, pool, node.ready_at_s, now_s, is_given=True)
        never_was = node.ready_at_s is None and node.state in _LOST and not was_cancelled(node)
        if was_taken_back(node) or never_was:
            self._record(node.id, pool, min(now_s, node.ended_at_s or now_s), now_s, is_given=False)

    def _forget(self, now_s: float) -> None:
        past_s = now_s - PAST_S
        if any(events[0][0] < past_s for events in self._events.values()):
            recent = {pool: [event for event in events if event[0] >= past_s] for pool, events in self._events.items()}
            self._events = {pool: events for pool, events in recent.items() if events}
            self._recorded = {key: at_s for key, at_s in self._recorded.items() if at_s >= past_s}
        for key in [key for key, used_s in self._last_used_s.items() if now_s - used_s > UNUSED_S]:
            del self._last_used_s[key], self._models[key]

    def _record(self, node_id: str, pool: str, at_s: float, now_s: float, *, is_given: bool) -> None:
        if (node_id, is_given) not in self._recorded and at_s >= now_s - PAST_S:
            self._recorded[node_id, is_given] = at_s
            insort(self._events.setdefault(pool, []), (at_s, is_given))

    def _replay(self, pools: tuple[str, ...], now_s: float) -> AvailabilityModel:
        """Returns a model of these pools that has seen all recorded events."""
        events = [at_s for pool in pools for at_s, _ in self._events.get(pool, ())]
        began_s = max(min(events, default=now_s), now_s - PAST_S)
        times = [began_s + UPDATE_S * step for step in range(int((now_s - began_s) / UPDATE_S) + 1)]
        model = AvailabilityModel(len(pools))
        for at_s in sorted({*times, *(at_s for at_s in events if at_s >= began_s), now_s}):
            self._update(model, pools, at_s)
        return model

    def _update(self, model: AvailabilityModel, pools: tuple[str, ...], at_s: float) -> None:
        """Updates the model on a change, and otherwise rarely: this runs for every model at every tick."""
        at_s = max(at_s, model.at_s)  # the clock may be set back
        up = [self._is_up(pool, at_s) for pool in pools]
        if up != model.up.tolist() or not at_s - model.at_s < UPDATE_S:
            model.observe(at_s, up)

    def _is_up(self, pool: str, at_s: float) -> bool:
        events = self._events.get(pool, [])
        place = bisect_right(events, (at_s, True))
        return place == 0 or events[place - 1][1] or at_s - events[place - 1][0] > STALE_S
