"""Rates from the replicas' counters, and the forecast of one cold start ahead."""

from __future__ import annotations

import pytest

from raytide.autoscaler.endpoints.traffic import TrafficMeter, TrafficMonitor, key_of, speed_of
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec, Speed
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

SPEED = Speed(prefill_tps=1000.0, slots=8, tpot_ms=50.0)
SPEEDS = {"l4": SPEED}


def meter(speeds: dict[str, Speed] | None = None) -> TrafficMeter:
    return TrafficMeter(ServeSpec(name="m", model="/m", replicas=Replicas(speed=speeds or {})))


def on(ray_node_id: str, node_type: str) -> Node:
    """A node that joined."""
    return Node(
        ray_node_id, node_type, "a", CapacityType.SPOT, 1, NodeState.READY, 0.0, 0.0, 0.0, ray_node_id=ray_node_id
    )


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
    watch.set_spec(ServeSpec(name="m", model="/m"), ())
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
    traffics = TrafficMonitor(())

    def seen(created_at_s: float, at_s: float, count: float) -> Traffic:
        endpoint = Endpoint(spec, "me", EndpointState.RUNNING, created_at_s, 1)
        found = traffics.with_traffic({"m": load(at_s, a=count)}, [endpoint], ())["m"].traffic
        assert found is not None
        return found

    seen(0.0, 1.0, 10.0)
    assert seen(0.0, 2.0, 40.0).requests_rps == pytest.approx(1.0)
    assert seen(5.0, 6.0, 30.0).requests_rps == 0.0
    assert traffics.with_traffic({}, [Endpoint(spec, "me", EndpointState.RUNNING, 0.0, 1)], ()) == {}


def test_word_that_stands_still_and_replicas_that_are_gone_take_no_memory() -> None:
    watch = meter()
    for _ in range(5):
        watch.observe(load(0.0, a=1.0), {})
    assert len(watch.window) == 1
    watch.observe(load(1000.0, b=1.0), {})
    assert set(watch.deltas.last_report) == {"b"}


L4 = NodeType(name="l4", resources={"GPU": 1}, price_micro_usd_h=700_000, labels={"ray.io/accelerator-type": "L4"})
H100 = NodeType(
    name="h100", resources={"GPU": 8}, price_micro_usd_h=24_000_000, labels={"ray.io/accelerator-type": "H100"}
)
FAST = Speed(prefill_tps=8000.0, slots=64, tpot_ms=50.0)


def on_gpus(*types: NodeType, **replicas: object) -> TrafficMeter:
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 1}, replicas=Replicas.parse(replicas, where="test"))
    watch = TrafficMeter(spec)
    watch.set_spec(spec, types)
    return watch


def test_where_replicas_are_not_alike_work_is_counted_in_those_that_do_least() -> None:
    watch = on_gpus(L4, H100, speed={"l4": SPEED, "h100": FAST})
    hosts = {"ray-1": on("ray-1", "h100"), "ray-2": on("ray-2", "l4")}
    seen = watch.observe(EndpointLoad(0.0, 0.0, 2, ("ray-1", "ray-2", "ray-3")), hosts)
    assert seen.paces == {"l4": 1.0, "h100": 8.6}
    assert (seen.held, seen.speed) == ((8.6, 1.0, 1.0), SPEED)
    assert seen.next_pace == 8.6  # $3 an hour for eight times the work of $0.70


def test_what_is_not_known_of_a_type_its_speed_says() -> None:
    watch = on_gpus(L4, H100.model_copy(update={"speed": 4.0}), speed={"h100": FAST})
    seen = watch.observe(EndpointLoad(0.0, 0.0, 0), {})
    assert seen.paces == {"l4": 1.0, "h100": 4.0} and seen.next_pace == 1.0
    assert seen.speed == Speed(prefill_tps=2000.0, slots=64, tpot_ms=200.0)


def test_types_on_which_the_mean_prompt_alone_is_late_are_named_while_others_are_faster() -> None:
    watch = on_gpus(L4, H100, speed={"l4": SPEED, "h100": FAST}, slo_ttft_s=0.9)
    assert watch.observe(EndpointLoad(0.0, 0.0, 0), {}).too_slow == ("l4",)
    alone = on_gpus(L4, speed={"l4": SPEED}, slo_ttft_s=0.1)
    assert alone.observe(EndpointLoad(0.0, 0.0, 0), {}).too_slow == ()


def test_spot_and_on_demand_of_one_accelerator_are_alike_however_they_were_measured() -> None:
    spot = L4.model_copy(update={"name": "l4.spot", "market": CapacityType.SPOT})
    watch = on_gpus(L4, spot, speed={"l4": SPEED, "l4.spot": FAST})
    seen = watch.observe(EndpointLoad(0.0, 0.0, 1, ("ray-1",)), {"ray-1": on("ray-1", "l4")})
    assert (seen.paces, seen.held, seen.next_pace, seen.speed) == ({}, (), 1.0, SPEED)


def test_a_clock_that_is_set_back_does_not_blow_up_the_rates() -> None:
    watch = meter()
    for second in range(100):
        watch.observe(load(1000.0 + second, a=2.0 * second), {})
    rates = [watch.observe(load(100.0 + second, a=200.0 + 2.0 * second), {}).requests_rps for second in range(100)]
    assert max(rates) <= 2.1 and rates[-1] == pytest.approx(2.0)


def test_another_model_under_the_same_name_is_learned_anew_and_another_number_of_replicas_is_not() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 1})
    endpoint = Endpoint(spec, "me", EndpointState.RUNNING, 5.0, 1)
    traffics = TrafficMonitor((L4,), {key_of(endpoint): {"l4": SPEED}})

    def speed(**changes: object) -> Speed | None:
        told = Endpoint(spec.model_copy(update=changes), "me", EndpointState.RUNNING, 5.0, 1)
        found = traffics.with_traffic({"m": EndpointLoad(0.0, 0.0, 0)}, [told], ())["m"].traffic
        assert found is not None
        return found.speed

    assert speed() == speed(replicas=Replicas(max=3)) == SPEED
    assert speed(model="/other") is None
    assert traffics.learned == {} and speed() == SPEED


def test_requests_without_a_token_of_their_own_say_nothing_of_how_fast_node_types_are() -> None:
    types = [NodeType(name=name, resources={"CPU": cpus}, price_micro_usd_h=1) for name, cpus in (("l4", 4), ("a", 8))]
    watch = meter(SPEEDS)
    watch.set_spec(watch.spec, types)
    for at_s, count in ((0.0, 0.0), (1.0, 200.0)):
        replica = ReplicaLoad("a", at_s, counters=Counters(requests=count, finished=count))
        traffic = watch.observe(EndpointLoad(at_s, 0.0, 1, replicas=(replica,)), {})
    assert traffic.speed == SPEED and not traffic.paces
