"""Rates from the replicas' counters, and the forecast of one cold start ahead."""

from __future__ import annotations

import pytest

from raytide.autoscaler.traffic import TrafficMeter, Traffics, speed_of
from raytide.core.endpoint import (
    Counters,
    Endpoint,
    EndpointLoad,
    EndpointState,
    ReplicaLoad,
    Replicas,
    ServeSpec,
    Speed,
    Traffic,
)
from raytide.core.fleet import Market, Node, NodeState

SPEED = Speed(prefill_tps=1000.0, slots=8, tpot_ms=50.0)
SPEEDS = {"l4": SPEED}


def meter(speeds: dict[str, Speed] | None = None) -> TrafficMeter:
    return TrafficMeter(ServeSpec(name="m", model="/m", replicas=Replicas(speed=speeds or {})))


def on(ray_node_id: str, node_type: str) -> Node:
    """A node that joined."""
    return Node(ray_node_id, node_type, "a", Market.SPOT, 1, NodeState.READY, 0.0, 0.0, 0.0, ray_node_id=ray_node_id)


def load(at_s: float, **requests: float) -> EndpointLoad:
    """Each request has 500 tokens in, 100 out, and its first after half a second."""
    replicas = tuple(
        ReplicaLoad(name, at_s, counters=Counters(count, 500 * count, 100 * count, count, 0.5 * count))
        for name, count in requests.items()
    )
    return EndpointLoad(at_s, 0.0, len(replicas), replicas=replicas)


def test_rates_are_those_of_the_last_half_minute() -> None:
    watch = meter(SPEEDS)
    watch.observe(load(0.0, a=1000.0), {})
    for second in range(1, 61):
        rate = 2.0 if second <= 30 else 4.0
        before = 1000.0 + min(second, 30) * 2.0 + max(0, second - 30) * 4.0
        traffic = watch.observe(load(float(second), a=before), {})
    assert traffic.requests_rps == pytest.approx(rate)
    assert (traffic.prompt_tps, traffic.output_tps) == (pytest.approx(2000.0), pytest.approx(400.0))
    assert traffic.ttft_s == pytest.approx(0.5)
    assert traffic.request_s == pytest.approx((0.5 + 5.0) / 8)


def test_replicas_come_go_and_are_silent_for_a_while_without_a_request_too_many() -> None:
    watch = meter()
    watch.observe(load(0.0, a=100.0), {})
    watch.observe(load(1.0, a=101.0, b=3.0), {})
    watch.observe(load(2.0), {})
    watch.observe(load(3.0, a=102.0, b=3.0), {})
    assert watch.observe(load(10.0, b=5.0), {}).requests_rps == pytest.approx((1 + 1 + 2) / 30)


def test_without_requests_the_last_price_of_one_holds_and_without_a_speed_there_is_none() -> None:
    watch = meter(SPEEDS)
    watch.observe(load(0.0, a=0.0), {})
    known = watch.observe(load(1.0, a=4.0), {}).request_s
    quiet = watch.observe(load(100.0, a=4.0), {})
    assert (quiet.requests_rps, quiet.ttft_s, quiet.request_s) == (0.0, None, known)
    watch.serve(ServeSpec(name="m", model="/m"), ())
    assert watch.observe(load(101.0, a=4.0), {}).request_s is None


def test_what_is_usual_is_expected_again_in_a_lull_and_what_comes_now_in_a_rush() -> None:
    watch, said = meter(SPEEDS), []
    for at_s, count in ((0.0, 0.0), (3600.0, 7200.0), (3640.0, 7200.0), (3641.0, 7300.0)):
        said.append(watch.observe(load(at_s, a=count), {}))
    steady, lull, rush = said[1:]
    assert steady.ahead_rps == pytest.approx(2.0)
    assert (lull.requests_rps, round(lull.ahead_rps, 1)) == (0.0, 1.9)
    assert rush.ahead_rps == rush.requests_rps > 3.0


def test_one_early_request_is_no_rush() -> None:
    watch = meter(SPEEDS)
    watch.observe(load(0.0, a=0.0), {})
    assert watch.observe(load(0.5, a=1.0), {}).ahead_rps == pytest.approx(1 / 30)


def test_the_speed_is_that_of_the_node_types_that_serve() -> None:
    speeds = {"l4": Speed(prefill_tps=1000, slots=8, tpot_ms=50), "h100": Speed(prefill_tps=9000, slots=64, tpot_ms=10)}
    mean = Speed(prefill_tps=5000, slots=36, tpot_ms=30)
    assert speed_of(speeds, ["h100"]) == speeds["h100"]
    assert speed_of(speeds, ["h100", "l4"]) == mean
    assert speed_of(speeds, ["h100", "l4", "l4", "l4"]) == Speed(prefill_tps=3000, slots=22, tpot_ms=40)
    assert speed_of(speeds, []) == speed_of(speeds, ["unknown"]) == mean
    assert speed_of({}, ["l4"]) is None


def test_the_speed_moves_by_one_replica_s_share_when_one_comes_on_another_node() -> None:
    speeds = {"l4": Speed(prefill_tps=1000, slots=8, tpot_ms=50), "h100": Speed(prefill_tps=9000, slots=64, tpot_ms=10)}
    types = {"ray-1": "l4", "ray-2": "l4", "ray-3": "l4", "ray-4": "h100"}
    hosts = {ray_node_id: on(ray_node_id, node_type) for ray_node_id, node_type in types.items()}
    seen = meter(speeds).observe(EndpointLoad(0.0, 0.0, 4, tuple(types)), hosts)
    assert seen.speed is not None and seen.speed.slots == 22


def test_an_endpoint_made_anew_under_an_old_name_begins_anew() -> None:
    spec = ServeSpec(
        name="m", model="/m", replicas=Replicas(speed={"l4": Speed(prefill_tps=1000, slots=8, tpot_ms=50)})
    )
    traffics = Traffics(())

    def seen(created_at_s: float, at_s: float, count: float) -> Traffic:
        endpoint = Endpoint(spec, "me", EndpointState.RUNNING, created_at_s, 1)
        found = traffics.measured({"m": load(at_s, a=count)}, [endpoint], ())["m"].traffic
        assert found is not None
        return found

    seen(0.0, 1.0, 10.0)
    assert seen(0.0, 2.0, 40.0).requests_rps == pytest.approx(1.0)
    assert seen(5.0, 6.0, 30.0).requests_rps == 0.0
    assert traffics.measured({}, [Endpoint(spec, "me", EndpointState.RUNNING, 0.0, 1)], ()) == {}


def test_word_that_stands_still_and_replicas_that_are_gone_take_no_memory() -> None:
    watch = meter()
    for _ in range(5):
        watch.observe(load(0.0, a=1.0), {})
    assert len(watch.window) == 1
    watch.observe(load(1000.0, b=1.0), {})
    assert set(watch.words.before) == {"b"}
