"""How many replicas a load asks for: the largest of what requests, KV caches, work and first tokens need. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from raytide.core.objects.endpoint import EndpointLoad, Replicas, Speed, Traffic

MAX_BUSY = 0.95
"""No replica is meant to be busier."""
DRAIN_S = 120.0
"""In which time work that has piled up should be gone."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    replicas: float
    reason: str


def load_target(spec: Replicas, load: EndpointLoad) -> LoadTarget:
    return max(_targets(spec, load), key=lambda need: need.replicas)


def request_s(prompt_tokens: float, output_tokens: float, speed: Speed) -> float:
    """Replica-seconds of one request: of prefill, or of its share of the slots."""
    prefill_s = prompt_tokens / speed.prefill_tps
    return max(prefill_s, (prefill_s + output_tokens * speed.tpot_ms / 1e3) / speed.slots)


def _targets(spec: Replicas, load: EndpointLoad) -> Iterator[LoadTarget]:
    traffic = load.traffic or Traffic()
    each = f"{spec.target_ongoing:g} for each replica"
    in_flight = replicas_for(load.ongoing / spec.target_ongoing, traffic)
    yield LoadTarget(in_flight, f"{load.ongoing:g} requests in flight, {each}{_where(traffic)}")
    yield kv_target(spec, load)
    if traffic.request_s is not None:
        yield _work_target(spec, load, traffic.ahead_rps, traffic.request_s)
    if spec.slo_ttft_s is not None and traffic.ttft_s is not None and traffic.ttft_s > spec.slo_ttft_s:
        yield LoadTarget(load.ready + 1, f"first tokens take {traffic.ttft_s:.2f} s, {spec.slo_ttft_s:g} s are wanted")


def kv_target(spec: Replicas, load: EndpointLoad) -> LoadTarget:
    """The caches that are full, and what the requests that wait would fill at the mean of those that run."""
    full = sum(replica.kv_use for replica in load.replicas)
    running = sum(replica.running for replica in load.replicas)
    waiting = sum(replica.waiting for replica in load.replicas)
    asked = full * (1 + waiting / running) if running else full
    queue = f", {waiting:g} requests wait for room" if waiting else ""
    meant = f"{spec.target_kv:.2f} of each is meant to be"
    return LoadTarget(asked / spec.target_kv, f"{full:.2f} KV caches are full{queue}, {meant}")


def _work_target(spec: Replicas, load: EndpointLoad, rate_rps: float, each_s: float) -> LoadTarget:
    """What keeps up, and works off what will wait when a replica that is asked for now answers."""
    busy, traffic = rate_rps * each_s, load.traffic or Traffic()
    waiting = sum(replica.waiting for replica in load.replicas)
    backlog_s = waiting * each_s + (busy - ready_work(load)) * cold_start_s(spec, load)
    rate = f"{rate_rps:.2f} requests/s of {each_s:.2f} replica-seconds each{_where(traffic)}"
    asked = replicas_for(busy / MAX_BUSY + max(0.0, backlog_s) / DRAIN_S, traffic)
    return LoadTarget(asked, f"{rate}, {waiting:g} waiting")


def replicas_for(work: float, traffic: Traffic) -> float:
    """How many replicas do as much as so many would where they do least: those that are there, then others where the
    next one costs least for what it does. Which of too many goes is Serve's choice: the fastest, at worst."""
    if not traffic.paces:
        return work
    held = sorted(traffic.held, reverse=True)
    spare = sum(held) - work
    if spare < 0:
        return len(held) - spare / traffic.next_pace
    going = sum(lost <= spare + 1e-9 for lost in accumulate(held))
    return len(held) - going


def cold_start_s(spec: Replicas, load: EndpointLoad | None) -> float:
    """From the decision for a replica to its first answer: as learned, else as configured."""
    learned = load.traffic.cold_start_s if load is not None and load.traffic is not None else None
    return spec.cold_start_s if learned is None else learned


def cold_start_source(load: EndpointLoad | None) -> str:
    is_learned = load is not None and load.traffic is not None and load.traffic.cold_start_s is not None
    return "learned from its own" if is_learned else "configured"


def ready_work(load: EndpointLoad) -> float:
    """What the replicas that answer do, in units of one where it does least."""
    held = load.traffic.held if load.traffic is not None else ()
    return load.ready * fmean(held) if held else load.ready


def _where(traffic: Traffic) -> str:
    return " where they are slowest" if traffic.paces else ""
