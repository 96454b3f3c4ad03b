"""Whatever happens to a cluster: no busy node is ended, nothing is bought twice or leaked, gangs are all or none.

The numbers are those of docs/autoscaler.md. I1, I2 and I3 are asserted inside the world, at every call.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.autoscaler import promises
from tests.autoscaler.world import CRASH_POINTS, Cluster, CrashPoint

from raytide.core.objects.cluster_config import UnmanagedSection
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import MARKET_LABEL, ZONE_LABEL, CapacityType, NodeType
from raytide.core.objects.plan import Wait
from raytide.core.objects.snapshot import Limits

CPU = NodeType(
    name="cpu4", resources={"CPU": 4}, price_micro_usd_h=200_000, max_nodes=4, idle_timeout_s=20, min_nodes=1
)
SPOT = NodeType(
    name="gpu2.spot",
    resources={"CPU": 4, "GPU": 2},
    market=CapacityType.SPOT,
    price_micro_usd_h=1_000_000,
    max_nodes=3,
    zones=("a", "b"),
    idle_timeout_s=20,
    launch_timeout_s=40,
    busy_above={"gpu": 0.05},
)
SOLID = SPOT.model_copy(
    update={"name": "gpu2", "market": CapacityType.ON_DEMAND, "price_micro_usd_h": 3_000_000, "max_nodes": 2}
)
FLEET = (CPU, SPOT, SOLID)
SPEC = ServeSpec(
    name="m", model="/m", resources={"CPU": 2}, replicas=Replicas(min=1, max=4, target_ongoing=4, downscale_delay_s=15)
)

GPU_SPEC = SPEC.model_copy(update={"name": "g", "resources": {"GPU": 1}, "replicas": Replicas(max=4, target_ongoing=4)})

WIDE = SPEC.model_copy(
    update={"name": "w", "resources": {"GPU": 2}, "members": 2, "replicas": Replicas(max=2, target_ongoing=4)}
)


class Storm(RuleBasedStateMachine):
    """Jobs, requests, tasks, empty pools, notices, reclaims, silence and crashes, in any order."""

    @initialize()
    def start(self) -> None:
        self.cluster = Cluster(FLEET, unmanaged=UnmanagedSection(max_nodes=1), watch=promises.check)
        self.jobs: list[str] = []

    @rule(
        members=st.integers(1, 4),
        spare=st.integers(0, 2),
        need=st.sampled_from([{"GPU": 1}, {"GPU": 2}, {"CPU": 3}, {"GPU": 0.4}]),
        together=st.sampled_from(["", "", ZONE_LABEL]),
        preemptible=st.booleans(),
    )
    def submit(self, members: int, spare: int, need: dict[str, float], together: str, preemptible: bool) -> None:
        shape = Shape(members=members + spare, min_members=members, resources=need, together=together)
        self.jobs.append(self.cluster.submit(shape, preemptible=preemptible))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.cluster.finish(data.draw(st.sampled_from(self.jobs)))

    @rule(ongoing=st.sampled_from([0.0, 3.0, 9.0, 40.0]))
    def load(self, ongoing: float) -> None:
        if "m" not in self.cluster.book.endpoints:
            self.cluster.serve(SPEC)
        self.cluster.ongoing["m"] = ongoing

    @rule(ongoing=st.sampled_from([0.0, 9.0, 40.0]))
    def load_of_several_members(self, ongoing: float) -> None:
        if "w" not in self.cluster.book.endpoints:
            self.cluster.serve(WIDE)
        self.cluster.ongoing["w"] = ongoing

    @rule(is_silent=st.booleans())
    def replicas_fall_silent(self, is_silent: bool) -> None:
        self.cluster.silent = {"m"} if is_silent else set()

    @rule(data=st.data(), gpu_use=st.sampled_from([0.0, 0.9]), is_mute=st.booleans())
    def something_works_beside_ray(self, data: st.DataObject, gpu_use: float, is_mute: bool) -> None:
        if machines := self.cluster.machines():
            node_id = data.draw(st.sampled_from(machines)).node_id
            self.cluster.gpu_use[node_id] = gpu_use
            (self.cluster.mute.add if is_mute else self.cluster.mute.discard)(node_id)

    @rule(is_silent=st.booleans())
    def ray_falls_silent(self, is_silent: bool) -> None:
        self.cluster.ray.is_silent = is_silent

    @rule(cpus=st.sampled_from([1.0, 4.0]), gpus=st.sampled_from([0.0, 1.0]))
    def task_starts(self, cpus: float, gpus: float) -> None:
        self.cluster.run_task({"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus})

    @rule(cpus=st.sampled_from([0, 3, 9]))
    def room_is_asked_of_ray(self, cpus: int) -> None:
        self.cluster.ray.standing_cpus = cpus

    @rule(data=st.data())
    def task_ends(self, data: st.DataObject) -> None:
        if tasks := [work for work in self.cluster.ray.work if not work.endpoint]:
            self.cluster.ray.work.remove(data.draw(st.sampled_from(tasks)))

    @rule(
        pool=st.sampled_from([(t.name, zone) for t in FLEET for zone in t.zones]), nodes=st.sampled_from([0, 1, None])
    )
    def stock(self, pool: tuple[str, str], nodes: int | None) -> None:
        self.cluster.provider.set_stock(*pool, nodes)

    @rule(data=st.data(), notice_s=st.sampled_from([0.0, 3.0, 30.0]))
    def notice(self, data: st.DataObject, notice_s: float) -> None:
        if machines := self.cluster.machines():
            self.cluster.provider.give_notice(data.draw(st.sampled_from(machines)).node_id, notice_s)

    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        if machines := self.cluster.machines():
            self.cluster.provider.reclaim(data.draw(st.sampled_from(machines)).node_id)

    @rule(ticks=st.integers(1, 12), dt_s=st.sampled_from([0.5, 2.0, 7.0]))
    def run(self, ticks: int, dt_s: float) -> None:
        for _ in range(ticks):
            self.cluster.tick(dt_s)

    @rule(point=st.sampled_from(CRASH_POINTS), calls=st.integers(0, 5))
    def crash(self, point: CrashPoint, calls: int) -> None:
        self.cluster.tick(1.0, crash=point, crash_in=calls)

    @rule(
        soft=st.sampled_from([None, 0, 3_000_000]),
        hard=st.sampled_from([None, 0, 4_000_000, 9_000_000]),
        drains=st.booleans(),
    )
    def limit(self, soft: int | None, hard: int | None, drains: bool) -> None:
        self.cluster.limits = Limits(soft, hard, most_micro_usd_h=hard if drains else None)

    @rule(pace=st.sampled_from([None, 1, 3]))
    def limit_the_pace(self, pace: int | None) -> None:
        self.cluster.limits = replace(self.cluster.limits, launches_per_min=pace)

    def teardown(self) -> None:
        """Once the storm is over: everything settles, nothing oscillates, and without work only the minimum is left."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.silent.clear()
        self.cluster.gpu_use.clear()
        self.cluster.mute.clear()
        self.cluster.ray.is_silent = False
        self.cluster.limits = Limits()
        for node_type in FLEET:
            for zone in node_type.zones:
                self.cluster.provider.set_stock(node_type.name, zone, None)
        for job in self.jobs:
            if self.cluster.book.jobs[job].spec.is_preemptible:
                self.cluster.finish(job)  # the queue gives everybody a turn in time
        self.cluster.settle(45, dt_s=50.0)
        assert self.cluster.settle(15, dt_s=50.0) == [], "I4"
        self.cluster.check_no_leak()
        for job in self.jobs:
            self.cluster.finish(job)
        self.cluster.book.endpoints.clear()
        self.cluster.ray.work.clear()
        self.cluster.ray.standing_cpus = 0
        self.cluster.settle(30, dt_s=10.0)
        assert [machine.node_type for machine in self.cluster.machines()] == ["cpu4"], "only min_nodes stay"
        self.cluster.check_no_leak()


class Prices(RuleBasedStateMachine):
    """An endpoint and a gang for hours, while spot comes and goes and money is short: they move, and none is missed."""

    @initialize(soft=st.sampled_from([None, 2_000_000]), spare=st.integers(0, 1), preemptible=st.booleans())
    def start(self, soft: int | None, spare: int, preemptible: bool) -> None:
        self.cluster = Cluster(FLEET, watch=promises.check)
        self.cluster.limits = Limits(soft)
        shape = Shape(members=1 + spare, min_members=1, resources={"GPU": 2})
        self.cluster.submit(shape, preemptible=preemptible)
        self.cluster.serve(GPU_SPEC, ongoing=4.0)

    @rule(ongoing=st.sampled_from([0.0, 7.0, 16.0, 40.0]))
    def load(self, ongoing: float) -> None:
        self.cluster.ongoing["g"] = ongoing
        self._minutes(15)

    @rule(zone=st.sampled_from(SPOT.zones), nodes=st.sampled_from([0, 1, None]))
    def stock(self, zone: str, nodes: int | None) -> None:
        self.cluster.provider.set_stock("gpu2.spot", zone, nodes)
        self._minutes(3)

    @rule(hard=st.sampled_from([None, 3_500_000, 8_000_000]))
    def limit(self, hard: int | None) -> None:
        self.cluster.limits = replace(self.cluster.limits, hard_micro_usd_h=hard)
        self._minutes(3)

    @rule(data=st.data(), notice_s=st.sampled_from([0.0, 120.0]))
    def notice(self, data: st.DataObject, notice_s: float) -> None:
        if spot := [machine for machine in self.cluster.machines() if machine.node_type == "gpu2.spot"]:
            self.cluster.provider.give_notice(data.draw(st.sampled_from(spot)).node_id, notice_s)
        self._minutes(3)

    def _minutes(self, minutes: int) -> None:
        for _ in range(2 * minutes):
            self.cluster.tick(30.0)


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)

TestPrices = Prices.TestCase
TestPrices.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)


class LongStorm(Storm):
    """The same for long, by `./dev soak`."""


TestLongStorm = pytest.mark.soak(pytest.mark.timeout(0)(LongStorm.TestCase))
TestLongStorm.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


class LongPrices(Prices):
    """The same for long, by `./dev soak`."""


TestLongPrices = pytest.mark.soak(pytest.mark.timeout(0)(LongPrices.TestCase))
TestLongPrices.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_i4_constant_demand_ends_in_a_thousand_passes_without_a_deed() -> None:
    cluster = Cluster(FLEET)
    cluster.submit(Shape(members=4, min_members=2, resources={"GPU": 2}))
    cluster.submit(Shape(members=9, resources={"GPU": 2}))
    cluster.serve(SPEC, ongoing=13.0)
    cluster.run_task({"CPU": 4.0})
    cluster.run_task({"GPU": 1.0})
    cluster.provider.set_stock("gpu2", "b", 0)
    cluster.settle(130, dt_s=7.0)  # replicas move once their nodes are old enough
    assert cluster.settle(1_000) == []


@settings(max_examples=4, deadline=None)
@given(members=st.integers(1, 2), passes=st.integers(60, 500))
def test_i9_an_empty_pool_is_asked_less_and_less_and_the_next_one_is_taken_within_two_passes(
    members: int, passes: int
) -> None:
    cluster = Cluster(FLEET)
    for zone in ("a", "b"):
        cluster.provider.set_stock("gpu2.spot", zone, 0)
    cluster.submit(Shape(members=members, resources={"GPU": 2}))
    cluster.submit(Shape(members=3, resources={"GPU": 2}, labels={MARKET_LABEL: "spot"}))
    for passed in range(passes):
        cluster.tick(1.0)
        if passed == 3:
            assert [machine.node_type for machine in cluster.machines()].count("gpu2") == members
    for zone in ("a", "b"):
        assert 1 < cluster.provider.asked["gpu2.spot", zone] <= 2 + log2(passes / 30.0)


def test_i3_a_gang_whose_launch_fails_half_way_lets_go_and_its_nodes_idle_out() -> None:
    cluster = Cluster((SPOT.model_copy(update={"idle_timeout_s": 10}),))
    cluster.provider.set_stock("gpu2.spot", "a", 1)
    cluster.provider.set_stock("gpu2.spot", "b", 0)
    cluster.submit(Shape(members=2, resources={"GPU": 2}))
    cluster.settle(29)
    assert cluster.machines() == []
    assert any(isinstance(a, Wait) and a.constraint == "stock" for a in cluster.tick())
    cluster.provider.set_stock("gpu2.spot", "a", None)
    cluster.settle(120)
    assert len(cluster.machines()) == 2


def test_i8_silence_removes_nothing_and_says_so() -> None:
    cluster = Cluster(FLEET)
    cluster.serve(SPEC, ongoing=16.0)
    cluster.settle(60)
    assert cluster.book.endpoints["m"].target_replicas == 4
    cluster.silent, cluster.ongoing = {"m"}, {"m": 0.0}
    nodes = {machine.node_id for machine in cluster.machines()}
    cluster.settle(300)
    assert cluster.book.endpoints["m"].target_replicas == 4
    assert nodes == {machine.node_id for machine in cluster.machines()}
    assert [a.subject for a in cluster.tick() if isinstance(a, Wait) and a.constraint == "signal"] == ["m"]
    cluster.silent = set()
    cluster.settle(120)
    assert cluster.book.endpoints["m"].target_replicas == 1


def test_i8_a_node_that_works_beside_ray_stays_and_one_whose_meter_fell_silent_too() -> None:
    cluster = Cluster((SPOT,), watch=promises.check)
    job = cluster.submit(Shape(resources={"GPU": 2}))
    cluster.settle(20)
    (machine,) = cluster.machines()
    cluster.gpu_use[machine.node_id] = 0.9
    cluster.finish(job)
    cluster.settle(60)
    assert cluster.machines() == [machine]
    cluster.gpu_use.clear()
    cluster.settle(15)
    cluster.mute = {machine.node_id}
    cluster.settle(60)
    assert cluster.machines() == [machine]
    cluster.mute.clear()
    cluster.settle(60)
    assert cluster.machines() == []


def test_a_reclaimed_spot_node_is_replaced_and_a_noticed_one_ends_at_its_deadline_not_before() -> None:
    cluster = Cluster((SPOT,))
    cluster.nimble = False
    cluster.submit(Shape(members=2, resources={"GPU": 2}))
    cluster.settle(20)
    first, second = cluster.machines()
    cluster.provider.reclaim(first.node_id)
    cluster.settle(20)
    assert len(cluster.machines()) == 2
    assert second in cluster.machines()
    cluster.provider.give_notice(second.node_id, 30)
    cluster.settle(25)
    assert second.node_id in {machine.node_id for machine in cluster.machines()}
    cluster.settle(30)
    assert second.node_id not in {machine.node_id for machine in cluster.machines()}
    assert len(cluster.machines()) == 2


def test_a_node_that_never_joins_is_given_up_and_its_pool_rests() -> None:
    cluster = Cluster((SPOT,), launch_delay_s=1e9)
    cluster.submit(Shape(resources={"GPU": 2}))
    cluster.settle(45)
    assert cluster.book.pools[("gpu2.spot", "a")].failures == 1
    assert [machine.zone for machine in cluster.machines()] == ["b"]
