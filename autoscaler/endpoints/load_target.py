"""The number of replicas that a load needs. It is the largest of several targets: for requests in flight, for KV
caches, for work, for configured signals, and for the time to first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from raytide.core.objects.endpoint import METERS, Replicas, ScaleSignal, Speed
from raytide.core.objects.endpoint_load import EndpointLoad, Traffic

MAX_BUSY = 0.95
"""The highest planned utilization of a replica."""
DRAIN_S = 120.0
"""The time in which a backlog should be worked off."""
TOLERANCE = 0.1
"""The relative distance from a meter's target within which replicas stay as they are (the default of Kubernetes'
horizontal pod autoscaler)."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    replicas: float
    reason: str


def load_target(spec: Replicas, load: EndpointLoad) -> LoadTarget:
    return max(_targets(spec, load), key=lambda need: need.replicas)


def request_s(prompt_tokens: float, output_tokens: float, speed: Speed) -> float:
    """Returns the replica-seconds that one request takes: `max(prefill, (prefill + decoding) / slots)`. The times are
    in seconds. `slots` is the number of requests that a replica can run at once.
    """
    prefill_s = prompt_tokens / speed.prefill_tps
    return max(prefill_s, (prefill_s + output_tokens * speed.tpot_ms / 1e3) / speed.slots)


def _targets(spec: Replicas, load: EndpointLoad) -> Iterator[LoadTarget]:
    traffic = load.traffic or Traffic()
    per_replica = f"{spec.target_ongoing:g} for each replica"
    in_flight = replicas_for(load.ongoing / spec.target_ongoing, traffic)
    yield LoadTarget(in_flight, f"{load.ongoing:g} requests in flight, {per_replica}{_where(traffic)}")
    yield kv_target(spec, load)
    yield from signal_targets(spec, load)
    if traffic.request_s is not None:
        yield _work_target(spec, load, traffic.ahead_rps, traffic.request_s)
    if spec.slo_ttft_s is not None and traffic.ttft_s is not None and traffic.ttft_s > spec.slo_ttft_s:
        yield LoadTarget(load.ready + 1, f"first tokens take {traffic.ttft_s:.2f} s, the SLO is {spec.slo_ttft_s:g} s")


def signal_targets(spec: Replicas, load: EndpointLoad) -> Iterator[LoadTarget]:
    """Yields the target for each signal in `scale_on` whose value is in the load report."""
    for signal in spec.scale_on:
        if (value := load.signals.get(signal.name)) is not None:
            yield _signal_target(signal, value, load.ready)


def _signal_target(signal: ScaleSignal, value: float, ready: int) -> LoadTarget:
    """Returns the number of replicas at which the nodes' mean use would be at the target, or at which each replica
    carries at most the target of a value that users report.
    """
    if signal.name not in METERS:
        return LoadTarget(value / signal.target, f"{signal.name} is {value:g}, {signal.target:g} for each replica")
    ratio = value / signal.target
    replicas = ready if abs(ratio - 1.0) <= TOLERANCE else ready * ratio
    return LoadTarget(replicas, f"{signal.name} is {value:.2f} of the nodes, the target is {signal.target:.2f}")


def kv_target(spec: Replicas, load: EndpointLoad) -> LoadTarget:
    """Returns the number of replicas at which the mean KV cache use is `target_kv`. Each waiting request is assumed to
    need as much of the cache as the mean running request.
    """
    full = sum(replica.kv_use for replica in load.replicas)
    running = sum(replica.running for replica in load.replicas)
    waiting = sum(replica.waiting for replica in load.replicas)
    target = full * (1 + waiting / running) if running else full
    queue = f", {waiting:g} requests wait" if waiting else ""
    reason = f"{full:.2f} KV caches are full{queue}, the target is {spec.target_kv:.2f} of each"
    return LoadTarget(target / spec.target_kv, reason)


def _work_target(spec: Replicas, load: EndpointLoad, rate_rps: float, each_s: float) -> LoadTarget:
    """Returns the number of replicas that keep up with the request rate and work off the backlog that will exist after
    a cold start.
    """
    busy, traffic = rate_rps * each_s, load.traffic or Traffic()
    waiting = sum(replica.waiting for replica in load.replicas)
    backlog_s = waiting * each_s + (busy - ready_work(load)) * cold_start_s(spec, load)
    rate = f"{rate_rps:.2f} requests/s of {each_s:.2f} replica-seconds each{_where(traffic)}"
    target = replicas_for(busy / MAX_BUSY + max(0.0, backlog_s) / DRAIN_S, traffic)
    return LoadTarget(target, f"{rate}, {waiting:g} waiting")


def replicas_for(work: float, traffic: Traffic) -> float:
    """Returns the number of replicas that are needed for `work`. One unit of `work` is what one replica on the slowest
    node type can do.

    If more replicas are needed than exist, the new ones are assumed to run on the node type where a unit of work is
    cheapest. If fewer are needed, the fastest replicas are assumed to stop: Serve chooses which replicas stop, so
    the worst choice is assumed.
    """
    if not traffic.paces:
        return work
    held = sorted(traffic.held, reverse=True)
    spare = sum(held) - work
    if spare < 0:
        return len(held) - spare / traffic.next_pace
    going = sum(lost <= spare + 1e-9 for lost in accumulate(held))
    return len(held) - going


def cold_start_s(spec: Replicas, load: EndpointLoad | None) -> float:
    """Returns the duration of a replica's cold start, in seconds. It is the time from the decision to add the replica
    to the replica's first answer. If the duration has been learned, returns the learned value. Otherwise returns the
    configured value.
    """
    learned = load.traffic.cold_start_s if load is not None and load.traffic is not None else None
    return spec.cold_start_s if learned is None else learned


def cold_start_source(load: EndpointLoad | None) -> str:
    is_learned = load is not None and load.traffic is not None and load.traffic.cold_start_s is not None
    return "learned from its own" if is_learned else "configured"


def ready_work(load: EndpointLoad) -> float:
    """Returns how much work all ready replicas together can do. The unit is the work of one replica on the slowest node
    type.
    """
    held = load.traffic.held if load.traffic is not None else ()
    return load.ready * fmean(held) if held else load.ready


def _where(traffic: Traffic) -> str:
    return " where they are slowest" if traffic.paces else ""
