"""What each endpoint is asked, from the counters of its replicas: rates of the last half minute, and the usual rate,
which is the forecast. A new controller begins anew, with rates too low rather than too high.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from raytide.autoscaler.forecast import UsualRate
from raytide.autoscaler.replica_need import request_s
from raytide.core.endpoint import Counters, Endpoint, EndpointLoad, ReplicaLoad, Speed, Traffic

WINDOW_S = 30.0
FORGET_S = 600.0
"""A replica that has been silent for longer is gone."""


@dataclass(slots=True)
class TrafficMeter:
    """Of one endpoint."""

    usual: UsualRate = field(default_factory=UsualRate)
    before: dict[str, ReplicaLoad] = field(default_factory=dict)
    """What each replica said last."""
    total: Counters = field(default_factory=Counters)
    window: deque[tuple[float, Counters]] = field(default_factory=deque)
    """(when, total until then)"""
    began_s: float | None = None
    request_s: float | None = None

    def observe(self, load: EndpointLoad, speed: Speed | None) -> Traffic:
        self._count(load)
        if self.window and load.at_s > self.window[-1][0]:
            at_s, total = self.window[-1]
            self.usual.observe(round(self.total.requests - total.requests), load.at_s - at_s)
        if not self.window or load.at_s > self.window[-1][0]:  # the same word is looked at at every tick
            self.window.append((load.at_s, self.total))
        while self.window[0][0] < load.at_s - WINDOW_S:
            self.window.popleft()
        lately = self.total.since(self.window[0][1])
        self._price(lately, speed)
        self.began_s = load.at_s if self.began_s is None else self.began_s
        rps, usual_rps = lately.requests / WINDOW_S, self.usual.rps if load.at_s - self.began_s >= WINDOW_S else 0.0
        return Traffic(
            requests_rps=rps,
            prompt_tps=lately.prompt_tokens / WINDOW_S,
            output_tps=lately.output_tokens / WINDOW_S,
            ttft_s=lately.first_token_s / lately.first_tokens if lately.first_tokens >= 1 else None,
            ahead_rps=max(rps, usual_rps),
            request_s=self.request_s,
        )

    def _count(self, load: EndpointLoad) -> None:
        """What a replica counted before its first word is left out: nobody knows when that was."""
        for replica in load.replicas:
            self.total = self.total.plus(replica.counters.since(self.before.get(replica.id, replica).counters))
            self.before[replica.id] = replica
        self.before = {id: said for id, said in self.before.items() if load.at_s - said.at_s <= FORGET_S}

    def _price(self, lately: Counters, speed: Speed | None) -> None:
        """The last one holds while nothing is asked."""
        if speed is None:
            self.request_s = None
        elif lately.requests >= 1:
            each = lately.prompt_tokens / lately.requests, lately.output_tokens / lately.requests
            self.request_s = request_s(*each, speed)


class Traffics:
    """All endpoints', by name and time of creation: a later one of that name is another."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, float], TrafficMeter] = {}

    def measured(
        self, loads: Mapping[str, EndpointLoad], endpoints: Iterable[Endpoint], node_types: Mapping[str, str]
    ) -> dict[str, EndpointLoad]:
        """The loads with their traffic. `node_types`: by Ray's id of the node."""
        measured, before = {}, self._meters
        self._meters = {}
        for endpoint in endpoints:
            key = (endpoint.name, endpoint.created_at_s)
            meter = self._meters[key] = before.get(key) or TrafficMeter()
            if (load := loads.get(endpoint.name)) is not None:
                types = {node_types[node] for node in load.replica_nodes if node in node_types}
                speed = speed_of(endpoint.spec.replicas.speed, types)
                measured[endpoint.name] = replace(load, traffic=meter.observe(load, speed))
        return measured


def speed_of(speeds: Mapping[str, Speed], node_types: Iterable[str]) -> Speed | None:
    """The mean over these node types, over all if none of them was measured; None when nothing was."""
    known = [speeds[name] for name in node_types if name in speeds] or list(speeds.values())
    if not known:
        return None
    return Speed(
        prefill_tps=fmean(speed.prefill_tps for speed in known),
        slots=round(fmean(speed.slots for speed in known)),
        tpot_ms=fmean(speed.tpot_ms for speed in known),
    )
