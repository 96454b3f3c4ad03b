"""What each endpoint is asked, from the counters of its replicas: rates of the last half minute, and the usual rate,
which is the forecast; and what a replica of it does, where that was not configured. A new controller begins anew, with
rates too low rather than too high, and with the speeds that were learned before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from raytide.autoscaler.forecast import UsualRate
from raytide.autoscaler.replica_need import request_s
from raytide.autoscaler.speed import SpeedMeter
from raytide.autoscaler.words import Words
from raytide.core.endpoint import Counters, Endpoint, EndpointLoad, Speed, Traffic
from raytide.core.fleet import Node

WINDOW_S = 30.0

Key = tuple[str, float]
"""An endpoint's name and time of creation: a later one of that name is another."""
Speeds = Mapping[Key, dict[str, Speed]]
"""By endpoint and node type."""


@dataclass(slots=True)
class TrafficMeter:
    """Of one endpoint."""

    usual: UsualRate = field(default_factory=UsualRate)
    words: Words = field(default_factory=Words)
    speeds: dict[str, SpeedMeter] = field(default_factory=dict)
    """By node type."""
    total: Counters = field(default_factory=Counters)
    window: deque[tuple[float, Counters]] = field(default_factory=deque)
    """(when, total until then)"""
    began_s: float | None = None
    request_s: float | None = None

    def observe(self, load: EndpointLoad, speeds: Mapping[str, Speed], node_types: Mapping[str, str]) -> Traffic:
        """`speeds`: those that are configured. `node_types`: by Ray's id of the node."""
        self._count(load, node_types)
        if self.window and load.at_s > self.window[-1][0]:
            at_s, total = self.window[-1]
            self.usual.observe(round(self.total.requests - total.requests), load.at_s - at_s)
        if not self.window or load.at_s > self.window[-1][0]:  # the same word is looked at at every tick
            self.window.append((load.at_s, self.total))
        while self.window[0][0] < load.at_s - WINDOW_S:
            self.window.popleft()
        lately = self.total.since(self.window[0][1])
        types = [node_types[node] for node in load.replica_nodes if node in node_types]
        speed = speed_of({**self.learned, **speeds}, types)
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
            speed=speed,
        )

    @property
    def learned(self) -> dict[str, Speed]:
        """By node type."""
        return {name: speed for name, meter in self.speeds.items() if (speed := meter.speed) is not None}

    def _count(self, load: EndpointLoad, node_types: Mapping[str, str]) -> None:
        for word in self.words.new(load):
            self.total = self.total.plus(word.counted)
            if (node_type := node_types.get(word.replica.node)) is not None:
                self.speeds.setdefault(node_type, SpeedMeter()).hear(word)
        for meter in self.speeds.values():
            meter.forget_others(load.replicas)

    def _price(self, lately: Counters, speed: Speed | None) -> None:
        """The last one holds while nothing is asked."""
        if speed is None:
            self.request_s = None
        elif lately.requests >= 1:
            each = lately.prompt_tokens / lately.requests, lately.output_tokens / lately.requests
            self.request_s = request_s(*each, speed)


class Traffics:
    """All endpoints'. `known`: speeds that were learned before."""

    def __init__(self, known: Speeds | None = None) -> None:
        self._meters: dict[Key, TrafficMeter] = {
            key: TrafficMeter(speeds={name: SpeedMeter(speed) for name, speed in by_type.items()})
            for key, by_type in (known or {}).items()
        }

    @property
    def learned(self) -> Speeds:
        return {key: found for key, meter in self._meters.items() if (found := meter.learned)}

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
                traffic = meter.observe(load, endpoint.spec.replicas.speed, node_types)
                measured[endpoint.name] = replace(load, traffic=traffic)
        return measured


def node_types(nodes: Iterable[Node]) -> dict[str, str]:
    """By Ray's id of the node; those that have not joined have none."""
    return {node.ray_node_id: node.type for node in nodes if node.ray_node_id}


def speed_of(speeds: Mapping[str, Speed], node_types: Iterable[str]) -> Speed | None:
    """The mean over replicas on these node types, over all types if none of these was measured; None when none was."""
    known = [speeds[name] for name in node_types if name in speeds] or list(speeds.values())
    if not known:
        return None
    return Speed(
        prefill_tps=fmean(speed.prefill_tps for speed in known),
        slots=round(fmean(speed.slots for speed in known)),
        tpot_ms=fmean(speed.tpot_ms for speed in known),
    )
