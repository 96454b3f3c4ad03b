"""The traffic of each endpoint, measured from the counters of its replicas.

The traffic includes the request rate of the last half minute and a forecast of the request rate. Replica speeds and
start-up times that are not configured are learned.

A new controller starts with the stored speeds and start-up times. In its first half minute, the measured request
rates are too low, because there are no measurements of the time before its start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from raytide.autoscaler.endpoints.cold_start import Start, StartMeter
from raytide.autoscaler.endpoints.load_target import request_s
from raytide.autoscaler.endpoints.replica_throughput import ThroughputMeter
from raytide.autoscaler.endpoints.request_log import CounterDeltas
from raytide.core.objects.endpoint import Endpoint, ServeSpec, Speed
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, Traffic
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import Node, NodeType
from raytide.core.objects.snapshot import Throughputs
from raytide.scheduling.diagnosis import copies_that_fit, open_zones
from raytide.scheduling.throughput import AcceleratorClasses, cost_per_work

MEMORY_S = 900.0
MEMORIES_S = tuple(MEMORY_S * 1.5**steps for steps in (0, -3, -2, -1, 1, 2))
"""The lengths of memory, in seconds, among which a forecast chooses. The first one is used while no other is better."""
ERROR_MEMORY_S = 3 * 86400.0


@dataclass(slots=True)
class RequestRate:
    """The usual request rate: an exponentially weighted mean of the observed rates. Its default memory is a quarter of
    an hour.
    """

    memory_s: float = MEMORY_S
    _sum: float = 0.0
    _weight: float = 0.0

    def observe(self, requests: int, dt_s: float) -> None:
        if dt_s <= 0:
            return
        fade = math.exp(-dt_s / self.memory_s)
        self._sum = self._sum * fade + requests / dt_s * (1.0 - fade)
        self._weight = self._weight * fade + 1.0 - fade

    @property
    def rps(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


@dataclass(slots=True)
class RateForecast:
    """The usual request rate, used as a forecast. Several mean rates are computed, with memories of different lengths,
    and each of them forecasts the rate. The forecast with the least error so far is used. It follows a smooth rate
    closely. It averages over bursts, because a burst is over before a new replica has started.

    The error of a forecast is its squared difference from the rate one cold start later, relative to the variance of
    random arrivals. Forecasts that use a second rate (a trend, or the shape of the day before) were no better.
    """

    rates: tuple[RequestRate, ...] = field(default_factory=lambda: tuple(map(RequestRate, MEMORIES_S)))
    _errors: list[float] = field(default_factory=lambda: [0.0] * len(MEMORIES_S))
    _made: deque[tuple[float, list[float]]] = field(default_factory=deque)
    """(time, forecasts), back to one cold start ago."""
    _now_s: float = 0.0

    def observe(self, requests: int, dt_s: float, ahead_s: float) -> None:
        """Counts the requests of an interval of `dt_s` seconds. Compares the request rate of the interval with the
        forecasts that were made `ahead_s` seconds earlier.
        """
        if dt_s <= 0:
            return
        self._now_s += dt_s
        while len(self._made) > 1 and self._made[1][0] <= self._now_s - ahead_s:
            self._made.popleft()
        if self._made and self._made[0][0] <= self._now_s - ahead_s:
            forecasts, fade = self._made[0][1], math.exp(-dt_s / ERROR_MEMORY_S)
            scale = dt_s * dt_s / max(fmean(forecasts) * dt_s, 1.0)
            self._errors = [
                error * fade + scale * (requests / dt_s - forecast) ** 2
                for error, forecast in zip(self._errors, forecasts, strict=True)
            ]
        for rate in self.rates:
            rate.observe(requests, dt_s)
        self._made.append((self._now_s, [rate.rps for rate in self.rates]))

    @property
    def best(self) -> RequestRate:
        """The estimator whose forecasts of the request rate had the least error."""
        errors = [round(error, 6) for error in self._errors]
        return self.rates[errors.index(min(errors))]

    @property
    def rps(self) -> float:
        return self.best.rps


WINDOW_S = 30.0
MANY = 100
"""The number of requests after which their mean size replaces `TYPICAL`."""
TYPICAL = 1000.0, 250.0
"""Prompt and output tokens of a typical request."""

Key = tuple[str, float, str]
"""An endpoint's name, creation time and served model: a later endpoint of the same name, or another model, is learned
anew."""
Speeds = Mapping[Key, dict[str, Speed]]
"""Keyed by endpoint and node type."""
Starts = Mapping[Key, tuple[Start, ...]]
"""The last starts by endpoint."""


@dataclass(slots=True)
class TrafficMeter:
    """Measures the traffic of one endpoint."""

    spec: ServeSpec
    node_types: Mapping[str, NodeType] = field(default_factory=dict)
    """Node types that could hold a replica."""
    accelerators: AcceleratorClasses = field(default_factory=AcceleratorClasses)
    usual: RequestRate = field(default_factory=RequestRate)
    deltas: CounterDeltas = field(default_factory=CounterDeltas)
    speeds: dict[str, ThroughputMeter] = field(default_factory=dict)
    """The learned speed of a replica, by node type."""
    starts: StartMeter = field(default_factory=StartMeter)
    total: Counters = field(default_factory=Counters)
    window: deque[tuple[float, Counters]] = field(default_factory=deque)
    """(time, counters until then)."""
    began_s: float | None = None
    request_s: float | None = None

    def set_spec(self, spec: ServeSpec, node_types: Iterable[NodeType]) -> None:
        """Sets the endpoint's spec, and selects those `node_types` that can hold a replica."""
        shape = Shape(resources=spec.resources, labels=spec.labels)
        open_types = (t for t in node_types if t.max_nodes and open_zones(shape, t))
        able = [t for t in open_types if copies_that_fit(spec.resources, t.resources)]
        self.spec, self.accelerators = spec, AcceleratorClasses.of(able, spec.resources)
        self.node_types = {node_type.name: node_type for node_type in able}

    def observe(self, load: EndpointLoad, hosts: Mapping[str, Node]) -> Traffic:
        """Returns the endpoint's traffic after a new load report. `hosts` maps Ray's node ids to nodes."""
        self._count(load, hosts)
        self.starts.observe(load, hosts, self.spec.name)
        if self.window and load.at_s > self.window[-1][0]:
            at_s, total = self.window[-1]
            self.usual.observe(round(self.total.requests - total.requests), load.at_s - at_s)
        if self.window and load.at_s < self.window[-1][0]:  # the clock was set back
            self.window.clear()
            self.began_s = None
        if not self.window or load.at_s > self.window[-1][0]:  # the same report may come at several ticks
            self.window.append((load.at_s, self.total))
        while self.window[0][0] < load.at_s - WINDOW_S:
            self.window.popleft()
        lately = self.total.since(self.window[0][1])
        types = [hosts[node].type if node in hosts else "" for node in load.replica_nodes]
        speeds = {**self.learned, **self.spec.replicas.speed}
        too_slow, paces = self._paces(speeds)
        speed = _slowest(speeds, paces) if paces else speed_of(speeds, types)
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
            paces=paces,
            held=tuple(paces.get(node_type, 1.0) for node_type in types) if paces else (),
            next_pace=self._next_pace(paces) if paces else 1.0,
            too_slow=too_slow,
            cold_start_s=self.starts.cold_start_s,
        )

    @property
    def learned(self) -> dict[str, Speed]:
        """The learned speed of a replica, by node type."""
        return {name: speed for name, meter in self.speeds.items() if (speed := meter.speed) is not None}

    def _paces(self, speeds: Mapping[str, Speed]) -> tuple[tuple[str, ...], Throughputs]:
        """Returns the node types on which even the mean prompt is late (an empty tuple if it is late on all types), and
        the relative throughputs of the node types.
        """
        if self.spec.members > 1 or len(self.accelerators.declared) < 2:
            return (), {}
        mean_tokens, slo_s = self._mean_tokens, self.spec.replicas.slo_ttft_s
        known = {name: speed for name, speed in speeds.items() if name in self.node_types}
        late = {
            name for name, speed in known.items() if slo_s is not None and mean_tokens[0] / speed.prefill_tps > slo_s
        }
        kinds = {self.accelerators.types[name] for name in late}
        too_slow = tuple(name for name, kind in self.accelerators.types.items() if kind in kinds)
        paces = self.accelerators.relative(
            {name: 1.0 / request_s(*mean_tokens, speed) for name, speed in known.items()}
        )
        return too_slow if len(too_slow) < len(self.node_types) else (), paces

    @property
    def _mean_tokens(self) -> tuple[float, float]:
        """The mean numbers of prompt and output tokens of a request."""
        done, prompt, output = self.total.finished, self.total.prompt_tokens, self.total.output_tokens
        return TYPICAL if done < MANY or prompt + output <= 0 else (prompt / done, output / done)

    def _next_pace(self, paces: Throughputs) -> float:
        costs = {
            name: t.price_micro_usd_h / copies_that_fit(self.spec.resources, t.resources)
            for name, t in self.node_types.items()
        }
        return paces[min(costs, key=lambda name: (cost_per_work(costs[name], name, paces), -paces[name]))]

    def _count(self, load: EndpointLoad, hosts: Mapping[str, Node]) -> None:
        for delta in self.deltas.update(load):
            self.total = self.total.plus(delta.delta)
            if (host := hosts.get(delta.replica.node)) is not None:
                self.speeds.setdefault(host.type, ThroughputMeter()).observe(delta)
        for meter in self.speeds.values():
            meter.retain(load.replicas)

    def _price(self, lately: Counters, speed: Speed | None) -> None:
        """Updates `request_s`; the last value stays while no requests arrive."""
        if speed is None:
            self.request_s = None
        elif lately.requests >= 1:
            each = lately.prompt_tokens / lately.requests, lately.output_tokens / lately.requests
            self.request_s = request_s(*each, speed)


class TrafficMonitor:
    """Measures the traffic of all endpoints. `speeds` and `starts` are the values that an earlier controller
    learned.
    """

    def __init__(
        self, node_types: Sequence[NodeType], speeds: Speeds | None = None, starts: Starts | None = None
    ) -> None:
        self._node_types, self._speeds, self._starts = node_types, speeds or {}, starts or {}
        self._meters: dict[Key, TrafficMeter] = {}

    @property
    def learned(self) -> Speeds:
        return {key: found for key, meter in self._meters.items() if (found := meter.learned)}

    @property
    def starts(self) -> Starts:
        return {key: tuple(meter.starts.starts) for key, meter in self._meters.items() if meter.starts.starts}

    def with_traffic(
        self, loads: Mapping[str, EndpointLoad], endpoints: Iterable[Endpoint], nodes: Iterable[Node]
    ) -> dict[str, EndpointLoad]:
        """Returns the loads by endpoint name, each with its traffic added."""
        hosts = {node.ray_node_id: node for node in nodes if node.ray_node_id} if loads else {}
        measured, before = {}, self._meters
        self._meters = {}
        for endpoint in endpoints:
            key = key_of(endpoint)
            meter = self._meters[key] = before.get(key) or self._meter(key, endpoint.spec)
            if meter.spec != endpoint.spec:
                meter.set_spec(endpoint.spec, self._node_types)
            if (load := loads.get(endpoint.name)) is not None:
                measured[endpoint.name] = replace(load, traffic=meter.observe(load, hosts))
        return measured

    def _meter(self, key: Key, spec: ServeSpec) -> TrafficMeter:
        meter = TrafficMeter(spec)
        meter.set_spec(spec, self._node_types)
        meter.speeds = {name: ThroughputMeter(speed) for name, speed in self._speeds.get(key, {}).items()}
        meter.starts.starts.extend(self._starts.get(key, ()))
        return meter


def key_of(endpoint: Endpoint) -> Key:
    return endpoint.name, endpoint.created_at_s, endpoint.spec.served


def _slowest(speeds: Mapping[str, Speed], paces: Throughputs) -> Speed | None:
    """Returns the speed on the slowest node type, derived from the speed on the slowest measured type; None without any
    measurement.
    """
    known = [name for name in speeds if name in paces]
    if not known:
        return speed_of(speeds, ())
    name = min(known, key=lambda name: (paces[name], name))
    speed, pace = speeds[name], paces[name]
    return Speed(prefill_tps=speed.prefill_tps / pace, slots=speed.slots, tpot_ms=speed.tpot_ms * pace)


def speed_of(speeds: Mapping[str, Speed], node_types: Iterable[str]) -> Speed | None:
    """Returns the mean replica speed over the given node types. If no speed is known for any of them, returns the mean
    over all types with a known speed. Returns None if no speed is known at all.
    """
    known = [speeds[name] for name in node_types if name in speeds] or list(speeds.values())
    if not known:
        return None
    return Speed(
        prefill_tps=fmean(speed.prefill_tps for speed in known),
        slots=round(fmean(speed.slots for speed in known)),
        tpot_ms=fmean(speed.tpot_ms for speed in known),
    )
