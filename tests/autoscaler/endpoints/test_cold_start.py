"""The time that replicas take to start is learned from the starts that were seen, and from nothing else."""

from __future__ import annotations

import pytest
from tests.autoscaler.endpoints.test_traffic import meter

from raytide.autoscaler.endpoints.cold_start import ENOUGH, FORGET_S, LONGEST_S, StartMeter
from raytide.autoscaler.endpoints.load_target import cold_start_s
from raytide.core.objects.endpoint import Replicas
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.node import CapacityType, Node, NodeState


def node(name: str, requested_s: float, ready_s: float, subject: str = "m") -> Node:
    return Node(
        name, "l4", "a", CapacityType.SPOT, 1, NodeState.READY, requested_s, requested_s, ready_s,
        ray_node_id=name, subject=subject,
    )  # fmt: skip


def load(at_s: float, seated: str, answering: str = "") -> EndpointLoad:
    """Each letter a replica, on the node of that name."""
    said = tuple(ReplicaLoad(f"r{name}", at_s, node=name) for name in answering)
    return EndpointLoad(at_s, 0.0, len(said), tuple(seated), said)


def start(watch: StartMeter, host: Node, at_s: float, took_s: float) -> None:
    """Starts a replica on its node: its process is seen, and then it answers."""
    hosts = {host.ray_node_id: host}
    watch.observe(load(at_s, host.id), hosts, "m")
    watch.observe(load(at_s + took_s, host.id, host.id), hosts, "m")
    watch.observe(load(at_s + took_s + 1.0, ""), {}, "m")
    watch.observe(load(at_s + took_s + FORGET_S + 2.0, ""), {}, "m")


def test_the_time_of_a_bought_node_counts_from_its_order_and_is_a_high_quantile_of_enough_of_them() -> None:
    watch = StartMeter()
    watch.observe(load(0.0, ""), {}, "m")
    for number, ready_s in enumerate((40.0, 50.0, 60.0, 70.0, 80.0)):
        assert watch.cold_start_s is None
        begin_s = 10_000.0 * (number + 1)
        start(watch, node("a", begin_s, begin_s + ready_s), begin_s + ready_s + 1.0, 19.0)
    assert [s.seconds for s in watch.starts] == [60.0, 70.0, 80.0, 90.0, 100.0]
    assert all(s.is_bought for s in watch.starts)
    assert watch.cold_start_s == pytest.approx(96.0)


def test_a_node_that_was_there_tells_only_where_none_is_bought() -> None:
    watch = StartMeter()
    watch.observe(load(0.0, ""), {}, "m")
    for number in range(ENOUGH):
        start(watch, node("a", 0.0, 10.0, subject="minimum"), 10_000.0 * (number + 1), 15.0)
    assert watch.cold_start_s == pytest.approx(15.0)
    start(watch, node("b", 90_000.0, 90_100.0), 90_101.0, 15.0)
    assert watch.cold_start_s is None  # one is not enough to say it of bought ones


def test_a_replica_that_comes_to_a_bought_node_later_or_second_found_it_there() -> None:
    watch, hosts = StartMeter(), {"a": node("a", 0.0, 100.0)}
    watch.observe(load(0.0, ""), {}, "m")
    start(watch, hosts["a"], 5000.0, 15.0)
    assert [(s.is_bought, s.seconds) for s in watch.starts] == [(False, 15.0)]
    both, first = ReplicaLoad("r2", 6030.0, node="a"), ReplicaLoad("r1", 6020.0, node="a")
    watch.observe(EndpointLoad(6000.0, 0.0, 0, ("a", "a")), hosts, "m")
    watch.observe(EndpointLoad(6020.0, 0.0, 1, ("a", "a"), (first,)), hosts, "m")
    watch.observe(EndpointLoad(6030.0, 0.0, 2, ("a", "a"), (first, both)), hosts, "m")
    assert [s.seconds for s in watch.starts][1:] == [20.0, 30.0]


def test_who_is_there_at_the_first_look_or_only_fell_silent_tells_nothing() -> None:
    watch, hosts = StartMeter(), {"a": node("a", 0.0, 100.0), "b": node("b", 0.0, 100.0)}
    watch.observe(load(110.0, "ab", "a"), hosts, "m")
    watch.observe(load(120.0, "ab", "ab"), hosts, "m")
    watch.observe(load(130.0, "ab", "b"), hosts, "m")
    watch.observe(load(140.0, "ab", "ab"), hosts, "m")
    assert not watch.starts


def test_clocks_that_jump_leave_no_start_behind() -> None:
    watch, host = StartMeter(), node("a", 0.0, 10.0)
    watch.observe(load(0.0, ""), {}, "m")
    for until_s in (5.0, 30.0 + LONGEST_S + 1.0):
        watch.observe(load(20.0, "a"), {"a": host}, "m")
        watch.observe(load(until_s, "a", "a"), {"a": host}, "m")
        watch.observe(load(until_s + 2 * FORGET_S, ""), {}, "m")
    assert not watch.starts


def test_what_was_learned_goes_before_what_is_configured() -> None:
    watch, spec = meter(), Replicas(cold_start_s=60.0)
    watch.observe(load(0.0, ""), {})
    assert cold_start_s(spec, None) == 60.0
    for number in range(ENOUGH):
        begin_s = 10_000.0 * (number + 1)
        start(watch.starts, node("a", begin_s, begin_s + 80.0), begin_s + 81.0, 9.0)
    told = EndpointLoad(0.0, 0.0, 0, traffic=watch.observe(load(90_000.0, ""), {}))
    assert cold_start_s(spec, told) == pytest.approx(90.0)
