"""Replica targets, the idle clock, the fake provider and the words of `autoscaler explain`."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.explain import lines
from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.nodes.lifecycle import requested
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.ray_gcs import RayNode
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.gang import Lease, LeaseState, Shape
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Admit, Assign, Drain, Launch, Plan, Scale, Terminate, Wait
from raytide.core.objects.snapshot import EndpointView

CPU4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=200_000)
SPEC = ServeSpec(
    name="m", model="/m", replicas=Replicas(min=1, max=8, target_ongoing=4, upscale_delay_s=5, downscale_delay_s=20)
)
ENDPOINT = Endpoint(SPEC, "me", EndpointState.RUNNING, 0.0, target_replicas=2)


def heard(ongoing: float, at_s: float = 100.0) -> EndpointLoad:
    return EndpointLoad(at_s, ongoing, 2, replicas=tuple(ReplicaLoad(name, at_s) for name in "ab"))


@given(less=st.floats(0, 100), more=st.floats(0, 100))
def test_i5_more_load_never_wants_fewer_replicas(less: float, more: float) -> None:
    few, many = sorted((less, more))
    assert 1 <= targets.wanted(ENDPOINT, heard(few)) <= targets.wanted(ENDPOINT, heard(many)) <= 8


@pytest.mark.parametrize(("ongoing", "replicas"), [(0, 1), (4, 1), (4.5, 2), (8, 2), (400, 8)])
def test_the_target_is_the_load_over_what_one_replica_carries(ongoing: float, replicas: int) -> None:
    assert targets.wanted(ENDPOINT, heard(ongoing)) == replicas


def test_the_clocks_of_load_start_go_on_and_stop() -> None:
    low = targets.observe(ENDPOINT, heard(1), 100.0)
    assert (low.low_since_s, low.high_since_s) == (100.0, None)
    assert targets.observe(low, heard(1, 110.0), 110.0).low_since_s == 100.0
    assert targets.observe(low, heard(8, 110.0), 110.0).low_since_s is None
    assert targets.observe(low, None, 110.0).low_since_s is None
    assert targets.observe(low, heard(1, 90.0), 110.0).low_since_s is None


def test_a_target_changes_only_after_its_delay() -> None:
    high = targets.observe(ENDPOINT, heard(30), 100.0)
    assert targets.decide(EndpointView(high, heard(30)), 104.0) is None
    scale = targets.decide(EndpointView(high, heard(30)), 105.0)
    assert scale == Scale("m", 8, "2 -> 8: 30 requests in flight, 4 for each replica")
    after = targets.scaled(high, scale)
    assert (after.target_replicas, after.high_since_s) == (8, None)


def test_bounds_that_were_changed_hold_at_once_even_in_silence() -> None:
    wide = replace(ENDPOINT, target_replicas=9)
    scale = targets.decide(EndpointView(wide, None), 100.0)
    assert scale is not None
    assert scale.replicas == 8


def test_an_endpoint_that_is_being_deleted_is_left_alone() -> None:
    going = replace(ENDPOINT, state=EndpointState.DELETING, target_replicas=9)
    assert targets.decide(EndpointView(going, heard(100)), 100.0) is None


def test_the_idle_clock_runs_while_nothing_runs_and_starts_over_after_work() -> None:
    free = RayNode("r", "node-1", total={"CPU": 4}, available={"CPU": 4})
    taken = replace(free, available={"CPU": 3})
    clock = IdleClock().observe([free], 10.0).observe([free], 15.0)
    assert clock.idle_s("node-1", 15.0) == 5.0
    assert clock.observe([taken], 16.0).idle_s("node-1", 16.0) == 0.0
    assert clock.observe([taken], 16.0).observe([free], 17.0).idle_s("node-1", 20.0) == 3.0
    assert clock.idle_s("node-2", 15.0) == 0.0


def test_work_without_resources_is_work_and_words_that_ray_left_behind_are_not() -> None:
    actor = RayNode("r", "node-1", total={"CPU": 4}, available={"CPU": 4}, activity=("Busy workers on node.",))
    assert actor.is_busy
    assert not replace(actor, idle_ms=500).is_busy


def test_ray_s_own_idle_clock_starting_over_does_not_start_ours_over() -> None:
    node = RayNode("r", "node-1", total={"CPU": 4}, available={"CPU": 4}, idle_ms=9000)
    clock = IdleClock().observe([node], 0.0).observe([replace(node, idle_ms=0)], 9.0)
    assert clock.idle_s("node-1", 9.0) == 9.0


def test_the_fake_provider_never_buys_the_same_node_twice_and_bills_until_the_end() -> None:
    clock = VirtualClock(10.0)
    provider = FakeProvider(clock, launch_delay_s=5)
    node = requested(Launch("node-1", "cpu4", "local", "x", ""), CPU4, 10.0)
    told: list[str] = []
    provider.watch(lambda: told.append("x"))
    provider.launch(node, CPU4)
    provider.launch(node, CPU4)
    assert not provider.is_up("node-1")
    clock.advance(5)
    assert provider.is_up("node-1")
    provider.give_notice("node-1", 30)
    assert provider.notices()[0].deadline_s == 45.0
    clock.advance(60)
    (machine,) = provider.machines()
    assert (machine.started_at_s, machine.ended_at_s, machine.reason) == (10.0, 45.0, "reclaimed")
    assert provider.notices() == ()
    assert told == ["x", "x"]


def test_a_poll_that_fails_is_not_the_last() -> None:
    results = iter([ClusterError("no answer"), ValueError("nonsense"), "before", OSError("no file"), "after"])
    is_made, told = threading.Event(), list[str]()

    def look() -> str:
        is_made.wait()
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    def on_change() -> None:
        told.append("x")
        watcher._stop.set()

    watcher = PollWatcher("x", 0.0, look, on_change)
    is_made.set()
    watcher._thread.join()
    assert told == ["x"]


def test_the_fake_provider_has_stock_and_prices_by_pool() -> None:
    provider = FakeProvider(VirtualClock())
    provider.set_stock("cpu4", "local", 1)
    provider.set_price("cpu4", "local", 7)
    for n in (1, 2):
        node = requested(Launch(f"node-{n}", "cpu4", "local", "x", ""), CPU4, 0.0)
        if n == 1:
            provider.launch(node, CPU4)
        else:
            with pytest.raises(ProviderError, match="local has no cpu4 left"):
                provider.launch(node, CPU4)
    assert [machine.price_micro_usd_h for machine in provider.machines()] == [7]


def test_explain_says_each_deed_with_its_reason_and_a_wait_once() -> None:
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 1}), LeaseState.WAITING, ())
    wait = Wait("job-2", "behind", "job-2 waits behind job-1.", "It starts after job-1.")
    first = Plan(
        0.0,
        (
            Admit("job-1", lease, "first in the queue"),
            Launch("node-1", "cpu4", "local", "lease-1", "no room"),
            Assign("lease-1", 0, "node-1", "bought for it"),
            wait,
        ),
    )
    second = Plan(
        60.0, (wait, Scale("m", 2, "1 -> 2"), Drain("node-1", "idle", 90.0, "idle"), Terminate("node-1", "x"))
    )
    text = lines([first.to_json(), second.to_json()])
    assert len(text) == 7
    assert "admit      job-1 gets lease-1: 1 x (1 CPU)" in text[0]
    assert "launch     node-1 cpu4 in local for lease-1" in text[1]
    assert text[1].endswith("no room")
    assert "assign     lease-1 member 0 -> node-1" in text[2]
    assert text[3].endswith("job-2 waits behind job-1. It starts after job-1.")
    assert "scale      m to 2 replicas" in text[4]
    assert "drain      node-1 (idle)" in text[5]
