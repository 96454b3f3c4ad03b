"""Adds the values of replicas to the snapshot. Each endpoint with an SLO has a value model, which is kept from one tick
to the next.

A new controller releases no replicas of an existing endpoint until it has observed the endpoint for `MEMORY_S`.
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
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaValue
from raytide.core.objects.node import FRESH_S
from raytide.core.objects.snapshot import EndpointView, Snapshot, Throughputs
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.replicas import is_fresh, replica_throughputs

SavedModels = dict[Key, SavedModel]
"""Keyed by endpoint."""

LEARN_PERIOD_S = 20.0
"""The least time between two calls of `learn`, which is the period of the simulator's policies."""
NEW_ENDPOINT_S = 300.0
"""An endpoint that was at most this old when monitoring began has no unknown past."""

MOST_UNITS = 2048
"""The largest simulated fleet in units of the slowest replica, or four times the maximum if that is more."""


@dataclass(slots=True)
class EndpointMonitor:
    model: ReplicaValueModel
    usual_since_s: float
    """The time since which the usual rate has been learned."""
    complete_since_s: float
    """The time since which all arrivals have been observed."""
    learned_at_s: float
    deltas: CounterDeltas = field(default_factory=CounterDeltas)
    arrivals: Arrivals = field(default_factory=Arrivals)
    queue: RouterQueue = field(default_factory=RouterQueue)
    counted: Counters = field(default_factory=Counters)
    """Counts since the last `learn`."""
    kv_least: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, replicas needed by KV use) over the last `downscale_delay_s`."""
    _replica_value: ReplicaValue | None = None

    @property
    def replica_value(self) -> ReplicaValue | None:
        least = max((least for _, least in self.kv_least), default=0)
        return None if self._replica_value is None else replace(self._replica_value, least=least)

    def update(self, view: EndpointView, load: EndpointLoad, at_s: float) -> None:
        for delta in self.deltas.update(load):
            self.arrivals.add(delta)
            self.counted = self.counted.plus(delta.delta)
        if is_fresh(load, at_s):
            self.kv_least.append((at_s, kv_least(view)))
        while self.kv_least and self.kv_least[0][0] < at_s - view.endpoint.spec.replicas.downscale_delay_s:
            self.kv_least.popleft()

    def resume(self, at_s: float) -> None:
        """Restarts the observation after a gap in the reports, because arrivals in the gap were not seen. After a long
        gap the usual request rate counts as unknown.
        """
        if at_s - self.learned_at_s > MEMORY_S:
            self.usual_since_s = at_s
        self.learned_at_s = self.complete_since_s = at_s
        self.counted, self.queue = Counters(), RouterQueue()
        self.arrivals.arrival_s.clear()

    def learn(
        self, view: EndpointView, load: EndpointLoad, at_s: float, hosts: EndpointHosts, hazard: ReclaimHazard
    ) -> None:
        """Learns from the interval since the last call. While no replica is ready, the usual request rate does not
        change.
        """
        from_s, taken, goal = self.learned_at_s, round(self.counted.requests), self.model.goal
        came = self.queue.record_interval(taken, round(load.queued), from_s, at_s)
        late, inside = round(self.counted.late), round(sum(r.running + r.waiting for r in load.replicas))
        late -= self.queue.deduplicate_late(late, inside)
        self.arrivals.correct(came - taken, from_s, at_s)
        settled_s = (max(at - SETTLE_S, self.complete_since_s) for at in (from_s, at_s))
        stats = IntervalStats(
            at_s=at_s,
            dt_s=at_s - from_s if load.ready else 0.0,
            requests=came,
            missed=late + self.queue.count_newly_late(at_s - goal.slo_ttft_s),
            settled=self.arrivals.take_batch(*settled_s),
            held=spot_held(view, hosts),
            ready=ready_work(load),
        )
        self.model.learn(stats, hazard)
        is_sure = (
            at_s - self.usual_since_s >= MEMORY_S or self.usual_since_s - view.endpoint.created_at_s <= NEW_ENDPOINT_S
        )
        self._replica_value = replace(self.model.value(hazard), is_sure=is_sure)
        self.learned_at_s, self.counted = at_s, Counters()


class SloController:
    """The models that estimate the value of replicas, for all endpoints with an SLO. `known` are the models that an
    earlier controller stored.
    """

    def __init__(self, known: SavedModels | None = None) -> None:
        self._known = known or {}
        self._monitors: dict[Key, EndpointMonitor] = {}

    @property
    def learned(self) -> SavedModels:
        """The learned models of all endpoints, as they should be stored. An endpoint that has not reported yet keeps
        the model that the earlier controller stored.
        """
        return {**self._known, **{key: monitor.model.saved for key, monitor in self._monitors.items()}}

    def with_replica_values(self, seen: Snapshot, hazard: ReclaimHazard) -> Snapshot:
        """Returns the snapshot with replica values added. Only endpoints with an SLO and a known replica speed get a
        value.
        """
        served = {key_of(view.endpoint): view for view in seen.endpoints}
        self._known = {key: saved for key, saved in self._known.items() if key in served}
        for key, monitor in tuple(self._monitors.items()):
            if key not in served:
                del self._monitors[key]
            elif not _has_slo(served[key]) or seen.at_s < monitor.learned_at_s:  # SLO removed, or clock set back
                self._known[key] = self._monitors.pop(key).model.saved
        indexes = cache(lambda: (Offerings.from_snapshot(seen), EndpointHosts.of(seen)))
        for key, view in served.items():
            if view.load is not None and _has_slo(view):
                self._update(key, view, view.load, seen.at_s, indexes, hazard)
        values = {key: monitor.replica_value for key, monitor in self._monitors.items()}
        views = (replace(view, worth=values[key]) if key in values else view for key, view in served.items())
        return replace(seen, endpoints=tuple(views))

    def _update(
        self,
        key: Key,
        view: EndpointView,
        load: EndpointLoad,
        at_s: float,
        indexes: Callable[[], tuple[Offerings, EndpointHosts]],
        hazard: ReclaimHazard,
    ) -> None:
        monitor = self._monitors.get(key)
        if monitor is not None:
            monitor.update(view, load, at_s)
        if (monitor is not None and at_s - monitor.learned_at_s < LEARN_PERIOD_S) or not is_fresh(load, at_s):
            return
        offerings, hosts = indexes()
        known_model = self._known.get(key) if monitor is None else monitor.model.goal
        if (goal := _goal(view, load, offerings, known_model.max_replicas if known_model is not None else 0)) is None:
            return
        if monitor is None or not monitor.model.is_for(goal):
            monitor = self._monitors[key] = EndpointMonitor(ReplicaValueModel.from_goal(goal), at_s, at_s, at_s)
            if (known_model := self._known.pop(key, None)) is not None:
                monitor.model.restore(known_model)
            monitor.update(view, load, at_s)
        elif at_s - monitor.learned_at_s > LEARN_PERIOD_S + FRESH_S:
            monitor.resume(at_s)
        monitor.model.set_goal(goal)
        monitor.learn(view, load, at_s, hosts, hazard)


def _has_slo(view: EndpointView) -> bool:
    return view.endpoint.spec.replicas.slo_target is not None


def _goal(view: EndpointView, load: EndpointLoad, offerings: Offerings, most: int) -> ServingGoal | None:
    """Returns the goal; None without an SLO or while the speed is unknown. `most`: the present `max_replicas` of the
    model.
    """
    spec, speed = view.endpoint.spec.replicas, load.traffic.speed if load.traffic is not None else None
    if speed is None or spec.slo_target is None or spec.slo_ttft_s is None:
        return None
    ondemand_usd_h, spot_usd_h = prices(view, offerings)
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
    """Returns the work that `replicas` can do on the fastest node type, in units of a replica on the slowest. The
    result has slack and stays at `before` while that suffices, because the simulated fleets start anew when it changes.
    """
    most = min(math.ceil(replicas * max(paces.values(), default=1.0)), max(4 * replicas, MOST_UNITS))
    return before if most <= before <= 4 * most else 2 * most if paces else most
