"""A load demands replicas: for requests, KV caches, work, first tokens. The largest counts; more never needs fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.endpoints.load_target import load_target, replicas_for, request_s
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec, Speed
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.snapshot import EndpointView

REPLICAS = Replicas(min=1, max=8, target_ongoing=8, downscale_delay_s=20)
SPEC = ServeSpec(name="m", model="/m", replicas=REPLICAS)
ENDPOINT = Endpoint(SPEC, "me", EndpointState.RUNNING, 0.0, target_replicas=1)


def load(*kv: float, ongoing: float = 2.0, waiting: float = 0.0, traffic: Traffic | None = None) -> EndpointLoad:
    replicas = tuple(ReplicaLoad(str(n), 100.0, running=2.0, waiting=waiting, kv_use=use) for n, use in enumerate(kv))
    return EndpointLoad(100.0, ongoing, len(kv), replicas=replicas, traffic=traffic)


def mixed(*held: float, next_pace: float = 1.0) -> Traffic:
    """Replicas that do so much, in units of the slowest."""
    return Traffic(paces={"l4": 1.0, "h100": 3.0}, held=held, next_pace=next_pace)


@pytest.mark.parametrize(
    ("held", "next_pace", "ongoing", "replicas"),
    [
        ((), 1.0, 24.0, 3),
        ((), 3.0, 24.0, 1),
        ((3.0,), 1.0, 24.0, 1),
        ((3.0,), 1.0, 32.0, 2),
        ((3.0,), 3.0, 56.0, 3),
        ((3.0, 1.0, 1.0), 1.0, 16.0, 2),  # whichever goes, the fast one included
        ((3.0, 1.0, 1.0), 1.0, 24.0, 3),
        ((1.0, 1.0, 1.0), 1.0, 16.0, 2),
    ],
)
def test_a_faster_replica_carries_more_requests(
    held: tuple[float, ...], next_pace: float, ongoing: float, replicas: int
) -> None:
    told = load(*(0.1 for _ in held), ongoing=ongoing, traffic=mixed(*held, next_pace=next_pace))
    assert targets.wanted(ENDPOINT, told) == replicas
    assert "where they are slowest" in load_target(REPLICAS, told).reason


@given(
    held=st.lists(st.sampled_from([1.0, 1.7, 3.0]), max_size=6),
    next_pace=st.sampled_from([1.0, 1.7, 3.0]),
    work=st.tuples(st.floats(0, 30), st.floats(0, 30)).map(sorted),
)
def test_more_work_never_asks_for_fewer_replicas_whoever_is_there(
    held: list[float], next_pace: float, work: list[float]
) -> None:
    told = mixed(*held, next_pace=next_pace)
    less, more = (replicas_for(each, told) for each in work)
    assert less <= more
    if less <= len(held):
        assert sum(sorted(held)[: round(less)]) >= work[0] - 1e-6


@pytest.mark.parametrize(("kv", "replicas"), [((0.5,), 1), ((0.85,), 1), ((0.9,), 2), ((0.9, 0.9), 3), ((0.4, 0.4), 1)])
def test_kv_caches_that_fill_ask_for_more_at_the_same_number_of_requests(kv: tuple[float, ...], replicas: int) -> None:
    assert targets.wanted(ENDPOINT, load(*kv)) == replicas
    if replicas > 1:
        assert "KV caches are full, the target is 0.85 of each" in load_target(REPLICAS, load(*kv)).reason


def test_requests_that_wait_for_room_ask_for_the_room_that_they_will_fill() -> None:
    assert targets.wanted(ENDPOINT, load(0.8, ongoing=6.0, waiting=4.0)) == 3


def test_the_rate_of_work_asks_by_the_measured_speed_and_for_what_piles_up_until_a_replica_answers() -> None:
    speed = Speed(prefill_tps=1000.0, slots=8, tpot_ms=50.0)
    assert request_s(2000.0, 100.0, speed) == 2.0
    assert request_s(100.0, 400.0, speed) == pytest.approx(20.1 / 8)
    busy = Traffic(requests_rps=1.0, ahead_rps=1.9, request_s=2.0)
    enough, one = load(0.1, 0.1, 0.1, 0.1, traffic=busy), load(0.1, traffic=busy)
    assert load_target(REPLICAS, enough).replicas == pytest.approx(4.0)
    assert "1.90 requests/s of 2.00 replica-seconds each" in load_target(REPLICAS, enough).reason
    assert load_target(REPLICAS, one).replicas == pytest.approx(4.0 + (3.8 - 1) * REPLICAS.cold_start_s / 120)
    queue = replace(one, replicas=tuple(replace(replica, waiting=30.0, kv_use=0.0) for replica in one.replicas))
    assert load_target(REPLICAS, queue).replicas == pytest.approx(4.0 + (2.8 * REPLICAS.cold_start_s + 30 * 2.0) / 120)


def test_late_first_tokens_ask_for_one_more_than_answer() -> None:
    spec, late = REPLICAS.model_copy(update={"slo_ttft_s": 1.0}), Traffic(ttft_s=1.5)
    assert load_target(spec, load(0.1, 0.1, traffic=late)).replicas == 3
    assert load_target(spec, load(0.1, 0.1, traffic=replace(late, ttft_s=0.5))).replicas < 1
    assert load_target(REPLICAS, load(0.1, 0.1, traffic=late)).replicas < 1


amounts = st.floats(0, 50)
loads = st.builds(load, st.floats(0, 1), st.floats(0, 1), ongoing=amounts, waiting=amounts)


@given(less=loads, kv=st.floats(0, 1), ongoing=amounts)
def test_i5_more_load_never_wants_fewer_replicas(less: EndpointLoad, kv: float, ongoing: float) -> None:
    fuller = tuple(replace(r, kv_use=max(r.kv_use, kv)) for r in less.replicas)
    more = replace(less, ongoing=less.ongoing + ongoing, replicas=fuller)
    assert targets.wanted(ENDPOINT, less) <= targets.wanted(ENDPOINT, more)


@given(load=loads, silent_s=st.floats(10.1, 1e4), silent=st.integers(1, 2))
def test_i8_a_replica_that_said_nothing_lately_takes_none_away_and_it_is_said(
    load: EndpointLoad, silent_s: float, silent: int
) -> None:
    old = tuple(replace(r, at_s=r.at_s - silent_s) if n < silent else r for n, r in enumerate(load.replicas))
    for said in (replace(load, replicas=old), replace(load, replicas=load.replicas[silent:])):
        endpoint = Endpoint(SPEC, "me", EndpointState.RUNNING, 0.0, target_replicas=8, low_since_s=0.0)
        assert targets.observe(endpoint, said, 100.0).low_since_s is None
        assert targets.decide(EndpointView(endpoint, said), 100.0) is None
        if targets.wanted(ENDPOINT, said) < 8:
            assert f"{silent} of its 2 replicas" in targets.stale_signal(EndpointView(endpoint, said), 100.0)


@pytest.mark.parametrize(
    ("target", "ready", "ongoing", "rate_rps", "replicas"),
    [
        (1, 1, 0.0, 0.0, 0),
        (1, 1, 1.0, 0.0, 1),
        (1, 1, 0.0, 0.1, 1),  # a request of the last half minute
        (1, 0, 0.0, 0.0, 1),  # it starts
        (0, 0, 0.0, 0.0, 0),
        (0, 0, 1.0, 0.0, 1),  # a request waits in a gateway
        (0, 0, 17.0, 0.0, 3),
    ],
)
def test_only_a_minimum_of_zero_allows_no_replica(
    target: int, ready: int, ongoing: float, rate_rps: float, replicas: int
) -> None:
    spec = SPEC.model_copy(update={"replicas": REPLICAS.model_copy(update={"min": 0})})
    seen = EndpointLoad(100.0, ongoing, ready, traffic=Traffic(requests_rps=rate_rps))
    assert targets.wanted(replace(ENDPOINT, spec=spec, target_replicas=target), seen) == replicas
    assert targets.wanted(replace(ENDPOINT, target_replicas=target), seen) >= 1


def test_an_endpoint_that_a_hosted_api_answers_has_no_replicas_whatever_its_load() -> None:
    hosted = ServeSpec.parse(
        {"name": "m", "backend": {"base_url": "https://api.example/v1", "model": "big"}}, where="test"
    )
    endpoint = replace(ENDPOINT, spec=hosted)
    assert targets.wanted(endpoint, load(0.9, ongoing=100.0)) == 0
    scale = targets.decide(EndpointView(endpoint, load(0.9, ongoing=100.0)), 100.0)
    assert scale is not None
    assert scale.replicas == 0
