"""The endpoints with an SLO, from tick to tick: the memory of each hears what its replicas say, and the snapshot gets
what more and fewer replicas would be worth. A new controller takes nothing away until it has watched an old
endpoint for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from raytide.autoscaler.endpoints.load_target import cold_start_s, ready_work
from raytide.autoscaler.endpoints.queue_simulator import ReplicaSpeed
from raytide.autoscaler.endpoints.replica_hosts import EndpointHosts
from raytide.autoscaler.endpoints.replica_value import (
    SETTLE_S,
    IntervalStats,
    ReplicaValueModel,
    SavedModel,
    ServingGoal,
)
from raytide.autoscaler.endpoints.request_log import Arrivals, CounterDeltas, RouterQueue
from raytide.autoscaler.endpoints.slo_policy import kv_least, prices, spot_held
from raytide.autoscaler.endpoints.traffic import MEMORY_S, Key, key_of
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.objects.endpoint import Counters, EndpointLoad, ReplicaValue
from raytide.core.objects.node import FRESH_S
from raytide.core.objects.snapshot import EndpointView, Snapshot, Throughputs
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.replicas import is_fresh, replica_throughputs

SavedModels = dict[Key, SavedModel]
"""What was learned, by endpoint."""

LEARN_PERIOD_S = 20.0
"""As often as the policies of the simulator decide."""
NEW_ENDPOINT_S = 300.0
"""An endpoint that is watched since it was so young has no past that is not known."""

MOST_UNITS = 2048
"""Of the slowest replicas, what is counted for an endpoint at most whose replicas are not four times as many."""


@dataclass(slots=True)
class EndpointMonitor:
    model: ReplicaValueModel
    usual_since_s: float
    """Since when what is usual is learned."""
    complete_since_s: float
    """Since when all that came was heard of."""
    learned_at_s: float
    deltas: CounterDeltas = field(default_factory=CounterDeltas)
    arrivals: Arrivals = field(default_factory=Arrivals)
    queue: RouterQueue = field(default_factory=RouterQueue)
    counted: Counters = field(default_factory=Counters)
    """Since the last look."""
    kv_least: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and how many replicas the KV caches asked for, over the last `downscale_delay_s`."""
    _replica_value: ReplicaValue | None = None

    @property
    def replica_value(self) -> ReplicaValue | None:
        least = max((least for _, least in self.kv_least), default=0)
        return None if self._replica_value is None else replace(self._replica_value, least=least)

    def update(self, view: EndpointView, load: EndpointLoad, at_s: float) -> None:
        for word in self.deltas.update(load):
            self.arrivals.add(word)
            self.counted = self.counted.plus(word.delta)
        if is_fresh(load, at_s):
            self.kv_least.append((at_s, kv_least(view)))
        while self.kv_least and self.kv_least[0][0] < at_s - view.endpoint.spec.replicas.downscale_delay_s:
            self.kv_least.popleft()

    def resume(self, at_s: float) -> None:
        """After a silence: what came in it was not seen, whoever answers now. After a long one nobody knows what is
        usual."""
        if at_s - self.learned_at_s > MEMORY_S:
            self.usual_since_s = at_s
        self.learned_at_s = self.complete_since_s = at_s
        self.counted, self.queue = Counters(), RouterQueue()
        self.arrivals.arrival_s.clear()

    def learn(
        self, view: EndpointView, load: EndpointLoad, at_s: float, hosts: EndpointHosts, hazard: ReclaimHazard
    ) -> None:
        """While no replica answers, requests are not counted, and what was usual before stays so."""
        from_s, taken, goal = self.learned_at_s, round(self.counted.requests), self.model.goal
        came = self.queue.record_interval(taken, round(load.queued), from_s, at_s)
        late, inside = round(self.counted.late), round(sum(r.running + r.waiting for r in load.replicas))
        late -= self.queue.deduplicate_late(round(self.counted.first_tokens), late, inside)
        self.arrivals.correct(came - taken, from_s, at_s)
        told_s = (max(at - SETTLE_S, self.complete_since_s) for at in (from_s, at_s))
        heard = IntervalStats(
            at_s=at_s,
            dt_s=at_s - from_s if load.ready else 0.0,
            requests=came,
            missed=late + self.queue.count_newly_late(at_s - goal.slo_ttft_s),
            ongoing=load.ongoing,
            settled=self.arrivals.take_batch(*told_s),
            held=spot_held(view, hosts),
            ready=ready_work(load),
        )
        self.model.learn(heard, hazard)
        is_sure = (
            at_s - self.usual_since_s >= MEMORY_S or self.usual_since_s - view.endpoint.created_at_s <= NEW_ENDPOINT_S
        )
        self._replica_value = replace(self.model.value(hazard), is_sure=is_sure)
        self.learned_at_s, self.counted = at_s, Counters()


class SloController:
    """`known`: what an earlier controller learned of each endpoint."""

    def __init__(self, known: SavedModels | None = None) -> None:
        self._known = known or {}
        self._monitors: dict[Key, EndpointMonitor] = {}

    @property
    def learned(self) -> SavedModels:
        """Of endpoints that were not heard of yet, as before."""
        return {**self._known, **{key: watched.model.saved for key, watched in self._monitors.items()}}

    def with_replica_values(self, seen: Snapshot, hazard: ReclaimHazard) -> Snapshot:
        """The snapshot with what replicas are worth, where that can be told: it takes an SLO, and their speed."""
        served = {key_of(view.endpoint): view for view in seen.endpoints}
        self._known = {key: told for key, told in self._known.items() if key in served}
        for key, watched in tuple(self._monitors.items()):
            if key not in served:
                del self._monitors[key]
            elif not _has_slo(served[key]) or seen.at_s < watched.learned_at_s:  # no longer; the clock was set back
                self._known[key] = self._monitors.pop(key).model.saved
        fleet = cache(lambda: (Offerings.of(seen), EndpointHosts.of(seen)))
        for key, view in served.items():
            if view.load is not None and _has_slo(view):
                self._update(key, view, view.load, seen.at_s, fleet, hazard)
        worth = {key: watched.replica_value for key, watched in self._monitors.items()}
        views = (replace(view, worth=worth[key]) if key in worth else view for key, view in served.items())
        return replace(seen, endpoints=tuple(views))

    def _update(
        self,
        key: Key,
        view: EndpointView,
        load: EndpointLoad,
        at_s: float,
        fleet: Callable[[], tuple[Offerings, EndpointHosts]],
        hazard: ReclaimHazard,
    ) -> None:
        watched = self._monitors.get(key)
        if watched is not None:
            watched.update(view, load, at_s)
        if (watched is not None and at_s - watched.learned_at_s < LEARN_PERIOD_S) or not is_fresh(load, at_s):
            return
        market, hosts = fleet()
        past = self._known.get(key) if watched is None else watched.model.goal
        if (goal := _goal(view, load, market, past.max_replicas if past is not None else 0)) is None:
            return
        if watched is None or not watched.model.is_for(goal):
            watched = self._monitors[key] = EndpointMonitor(ReplicaValueModel.from_goal(goal), at_s, at_s, at_s)
            if (past := self._known.pop(key, None)) is not None:
                watched.model.restore(past)
            watched.update(view, load, at_s)
        elif at_s - watched.learned_at_s > LEARN_PERIOD_S + FRESH_S:
            watched.resume(at_s)
        watched.model.set_goal(goal)
        watched.learn(view, load, at_s, hosts, hazard)


def _has_slo(view: EndpointView) -> bool:
    return view.endpoint.spec.replicas.slo_target is not None


def _goal(view: EndpointView, load: EndpointLoad, market: Offerings, most: int) -> ServingGoal | None:
    """None while nobody knows how fast a replica is. `most`: of the goal before."""
    spec, speed = view.endpoint.spec.replicas, load.traffic.speed if load.traffic is not None else None
    if speed is None or spec.slo_target is None or spec.slo_ttft_s is None:
        return None
    ondemand_usd_h, spot_usd_h = prices(view, market)
    return ServingGoal(
        slo_ttft_s=spec.slo_ttft_s,
        slo_target=spec.slo_target,
        min_replicas=spec.min,
        max_replicas=_most(spec.max, replica_throughputs(view), most),
        cold_start_s=cold_start_s(spec, load),
        speed=ReplicaSpeed(speed.prefill_tps, speed.slots, speed.tpot_ms / 1e3),
        ondemand_usd_h=ondemand_usd_h,
        spot_usd_h=spot_usd_h,
    )


def _most(replicas: int, paces: Throughputs, before: int) -> int:
    """What so many do where they do most, in units of where they do least. With room to spare, and kept while it will
    do, also where all seem to do alike for a while: the paper fleets begin anew when it changes."""
    most = min(math.ceil(replicas * max(paces.values(), default=1.0)), max(4 * replicas, MOST_UNITS))
    return before if most <= before <= 4 * most else 2 * most if paces else most
