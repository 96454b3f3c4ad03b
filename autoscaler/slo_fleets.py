"""The endpoints with an SLO, from tick to tick: the memory of each hears what its replicas say, and the snapshot gets
what more and fewer replicas would be worth. A new controller takes nothing away until it has watched an old
endpoint for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytide.autoscaler.forecast import MEMORY_S
from raytide.autoscaler.hazard import Hazard
from raytide.autoscaler.hosts import Hosts
from raytide.autoscaler.live_fleet import prices, spot_held
from raytide.autoscaler.paper_fleets import ReplicaSpeed
from raytide.autoscaler.serving_memory import TOLD_AFTER_S, Heard, Memory, Past, ServingGoal
from raytide.autoscaler.traffic import Key
from raytide.autoscaler.words import Arrivals, Words
from raytide.core.endpoint import Counters, EndpointLoad, Worth
from raytide.core.market import Market
from raytide.core.replicas import is_fresh, replica_shape
from raytide.core.snapshot import EndpointView, Snapshot

Fleets = dict[Key, Past]
"""What was learned, by endpoint."""

LOOK_S = 20.0
"""As often as the policies of the simulator decide."""
YOUNG_S = 300.0
"""An endpoint that is watched since it was so young has no past that is not known."""


@dataclass(slots=True)
class _Watched:
    memory: Memory
    since_s: float
    looked_s: float
    words: Words = field(default_factory=Words)
    arrivals: Arrivals = field(default_factory=Arrivals)
    counted: Counters = field(default_factory=Counters)
    """Since the last look."""
    worth: Worth | None = None

    def hear(self, load: EndpointLoad) -> None:
        for word in self.words.new(load):
            self.arrivals.hear(word)
            self.counted = self.counted.plus(word.counted)

    def look(self, view: EndpointView, load: EndpointLoad, seen: Snapshot, hazard: Hazard) -> None:
        at_s, since_s = seen.at_s, self.since_s
        heard = Heard(
            at_s=at_s,
            dt_s=at_s - self.looked_s,
            requests=round(self.counted.requests),
            missed=round(self.counted.late),
            ongoing=load.ongoing,
            served=self.arrivals.served(max(self.looked_s - TOLD_AFTER_S, since_s), max(at_s - TOLD_AFTER_S, since_s)),
            held=spot_held(view, Hosts.of(seen)),
            ready=load.ready,
        )
        self.memory.learn(heard, hazard)
        is_sure = at_s - since_s >= MEMORY_S or since_s - view.endpoint.created_at_s <= YOUNG_S
        self.worth = replace(self.memory.worth(hazard), is_sure=is_sure)
        self.looked_s, self.counted = at_s, Counters()


class SloFleets:
    """`known`: what an earlier controller learned of each endpoint."""

    def __init__(self, known: Fleets | None = None) -> None:
        self._known = known or {}
        self._watched: dict[Key, _Watched] = {}

    @property
    def learned(self) -> Fleets:
        """Of endpoints that were not heard of yet, as before."""
        return {**self._known, **{key: watched.memory.past for key, watched in self._watched.items()}}

    def on(self, seen: Snapshot, hazard: Hazard) -> Snapshot:
        """The snapshot with what replicas are worth, where that can be told: it takes an SLO, and their speed."""
        served = {(v.endpoint.name, v.endpoint.created_at_s): v for v in seen.endpoints}
        self._watched = {key: watched for key, watched in self._watched.items() if key in served}
        self._known = {key: told for key, told in self._known.items() if key in served}
        for key, view in served.items():
            if view.load is not None and view.endpoint.spec.replicas.slo_target is not None:
                self._watch(key, view, view.load, seen, hazard)
        worth = {key: watched.worth for key, watched in self._watched.items()}
        views = (replace(view, worth=worth[key]) if key in worth else view for key, view in served.items())
        return replace(seen, endpoints=tuple(views))

    def _watch(self, key: Key, view: EndpointView, load: EndpointLoad, seen: Snapshot, hazard: Hazard) -> None:
        watched = self._watched.get(key)
        if watched is not None:
            watched.hear(load)
        if (watched is not None and seen.at_s - watched.looked_s < LOOK_S) or not is_fresh(load, seen.at_s):
            return
        if (goal := _goal(view, load, seen)) is None:
            return
        if watched is None or not watched.memory.is_for(goal):
            watched = self._watched[key] = _Watched(Memory.of(goal), seen.at_s, seen.at_s)
            if (past := self._known.pop(key, None)) is not None:
                watched.memory.recall(past)
            watched.hear(load)
        watched.memory.aim(goal)
        watched.look(view, load, seen, hazard)


def _goal(view: EndpointView, load: EndpointLoad, seen: Snapshot) -> ServingGoal | None:
    """None while nobody knows how fast a replica is."""
    spec, speed = view.endpoint.spec.replicas, load.traffic.speed if load.traffic is not None else None
    if speed is None or spec.slo_target is None or spec.slo_ttft_s is None:
        return None
    ondemand_usd_h, spot_usd_h = prices(Market.of(seen), replica_shape(view))
    return ServingGoal(
        slo_ttft_s=spec.slo_ttft_s,
        slo_target=spec.slo_target,
        min_replicas=spec.min,
        max_replicas=spec.max,
        cold_start_s=spec.cold_start_s,
        speed=ReplicaSpeed(speed.prefill_tps, speed.slots, speed.tpot_ms / 1e3),
        ondemand_usd_h=ondemand_usd_h,
        spot_usd_h=spot_usd_h,
    )
