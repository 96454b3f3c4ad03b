"""Demand that nobody queued, and leases that want nothing: what the planner leaves alone, and what it says."""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.planner import plan
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.node import ZONE_LABEL, CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Action, Drain, Launch, Wait
from raytide.core.objects.snapshot import Demand, Limits, NodeView, Snapshot, Unmanaged
from raytide.scheduling.replicas import replica_selector

CPU4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=1, max_nodes=2)
GPU = NodeType(name="gpu", resources={"CPU": 8, "GPU": 1}, price_micro_usd_h=9, max_nodes=2)


def decided(*demand: Demand, leases: tuple[Lease, ...] = (), unmanaged: Unmanaged | None = None) -> list[Action]:
    snapshot = Snapshot(
        at_s=1000.0, node_types=(CPU4, GPU), demand=demand, leases=leases, unmanaged=unmanaged or Unmanaged()
    )
    return list(plan(snapshot))


def test_a_task_that_no_node_type_could_hold_is_named_and_buys_nothing() -> None:
    (wait,) = decided(Demand({"CPU": 64.0}, {}, 1))
    assert isinstance(wait, Wait)
    assert wait.constraint == "impossible"
    assert "needs 64 CPU" in wait.reason


def test_room_is_what_tasks_wait_for_when_their_cap_would_let_them_buy_more() -> None:
    actions = decided(Demand({"CPU": 4.0}, {}, 5), unmanaged=Unmanaged(max_nodes=10, gpu=False))
    assert [action.node_type for action in actions if isinstance(action, Launch)] == ["cpu4", "cpu4"]
    (wait,) = (action for action in actions if isinstance(action, Wait))
    assert wait.constraint != "cap"


def test_work_that_takes_nothing_and_replicas_that_the_targets_count_buy_nothing_here() -> None:
    replica = Demand({"CPU": 1.0}, replica_selector(ServeSpec(name="m", model="/m")), 1)
    assert decided(Demand({}, {}, 3), Demand({"CPU": 0.0}, {}, 3), replica) == []


def test_a_released_lease_gets_no_node() -> None:
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 1}), LeaseState.RELEASED, (Member(0),))
    assert decided(leases=(lease,)) == []


def test_a_foreign_group_that_belongs_together_gets_all_its_nodes_in_one_place_or_none() -> None:
    rack = Demand({"CPU": 4.0}, count=2, together=ZONE_LABEL)
    types = (CPU4.model_copy(update={"zones": ("a", "b")}),)
    (wait,) = plan(Snapshot(at_s=0.0, node_types=types, demand=(rack,)))
    assert isinstance(wait, Wait)
    assert wait.constraint == "cap", "one of the two could be bought"
    both = plan(Snapshot(at_s=0.0, node_types=types, demand=(rack,), unmanaged=Unmanaged(max_nodes=2)))
    assert [action.zone for action in both if isinstance(action, Launch)] == ["a", "a"]


def test_bundles_that_must_be_apart_get_a_node_each_though_one_would_hold_them_all() -> None:
    large = CPU4.model_copy(update={"name": "cpu64", "resources": {"CPU": 64}, "price_micro_usd_h": 20})
    node = Node("node-1", "cpu64", "local", CapacityType.ON_DEMAND, 20, NodeState.READY, 0.0, ready_at_s=1.0)
    there = NodeView(node, large.resources, large.resources, {})
    group = (Demand({"CPU": 2.0}, count=2, apart="a"), Demand({"CPU": 1.0}, apart="a"), Demand({"CPU": 1.0}, apart="b"))

    def bought(cap: int) -> list[str]:
        seen = Snapshot(0.0, (CPU4, large), (there,), demand=group, unmanaged=Unmanaged(cap), next_node=2)
        return [action.node_type for action in plan(seen) if isinstance(action, Launch)]

    assert bought(cap=9) == ["cpu4", "cpu4"]
    assert bought(cap=0) == []


def test_a_bundle_that_was_lost_does_not_come_back_where_another_of_its_group_is() -> None:
    fellow = replace(ready("node-1", free=3.0), labels={"_PG_1": ""})
    lost = Demand({"CPU": 1.0}, apart="_PG_1")
    seen = Snapshot(0.0, (CPU4,), (fellow,), demand=(lost,), unmanaged=Unmanaged(2), next_node=2)
    assert [type(action) for action in plan(seen)] == [Launch]
    assert plan(replace(seen, demand=(replace(lost, apart="_PG_2"),))) == ()


def test_of_a_group_that_must_be_apart_nothing_is_bought_when_the_cap_would_not_let_it_be_whole() -> None:
    group = Demand({"CPU": 2.0}, count=2, apart="_PG_1"), Demand({"CPU": 1.0}, count=2, apart="_PG_1")
    many = CPU4.model_copy(update={"max_nodes": 9})
    seen = Snapshot(0.0, (many,), demand=group, unmanaged=Unmanaged(3))
    assert [(type(a), a.constraint) for a in plan(seen) if isinstance(a, Wait)] == [(Wait, "cap")] * len(plan(seen))
    able = replace(seen, unmanaged=Unmanaged(4))
    assert [type(action) for action in plan(able)] == [Launch] * 4
    slowly = plan(replace(able, limits=Limits(launches_per_min=2)))
    assert [type(action) for action in slowly] == [Launch, Launch, Wait], "the rest follows"


def test_a_large_group_that_must_be_apart_uses_every_node_that_is_there() -> None:
    nodes = tuple(ready(f"node-{number}", free=4.0) for number in range(1, 301))
    group = Demand({"CPU": 1.0}, count=300, apart="_PG_1")
    seen = Snapshot(0.0, (CPU4.model_copy(update={"max_nodes": 999}),), nodes, demand=(group,), next_node=301)
    assert [a for a in plan(replace(seen, unmanaged=Unmanaged(999))) if isinstance(a, Launch)] == []


def test_a_demand_for_what_no_node_type_has_keeps_nobody_else_from_a_node() -> None:
    asked = Demand({"GPU": 1.0}, {}, 1), Demand({"CPU": 1.0}, {}, 1)
    actions = plan(Snapshot(at_s=0.0, node_types=(CPU4,), demand=asked))
    assert [action.node_type for action in actions if isinstance(action, Launch)] == ["cpu4"]
    assert [action.constraint for action in actions if isinstance(action, Wait)] == ["impossible"]
    alone = plan(Snapshot(at_s=0.0, node_types=(), demand=asked))
    assert [type(action) for action in alone] == [Wait, Wait], "a cluster that has only its head"


def ready(node_id: str, free: float, idle_s: float = 0.0) -> NodeView:
    node = Node(node_id, "cpu4", "local", CapacityType.ON_DEMAND, 1, NodeState.READY, 0.0, ready_at_s=1.0)
    node = replace(node, subject="unmanaged", ray_node_id=f"ray-{node_id}")
    return NodeView(node, {"CPU": 4}, {"CPU": free}, {}, idle_s)


def asked(*nodes: NodeView, cpus: int, waiting: tuple[Demand, ...] = (), most: int = 2) -> list[Action]:
    """`request_resources(num_cpus=...)`"""
    demand = (*waiting, Demand({"CPU": 1.0}, {}, cpus, is_standing=True))
    cap = Unmanaged(max_nodes=most)
    return list(plan(Snapshot(1000.0, (CPU4, GPU), nodes, demand=demand, unmanaged=cap, next_node=10)))


def test_room_that_ray_was_asked_for_is_bought_within_the_cap_of_work_without_a_lease() -> None:
    two = asked(cpus=8)
    assert [(a.node_type, a.subject) for a in two if isinstance(a, Launch)] == [("cpu4", "unmanaged")] * 2
    assert [a for a in two if isinstance(a, Wait)] == []
    launch, wait = asked(cpus=8, most=1)
    assert isinstance(launch, Launch) and isinstance(wait, Wait)
    assert "8 x (1 CPU), which request_resources asks for, is not there" in launch.reason
    assert (wait.subject, wait.constraint) == ("unmanaged", "cap")


def test_work_without_a_lease_counts_towards_the_room_that_was_asked_for_and_a_gang_does_not() -> None:
    assert asked(ready("node-1", free=1.0), cpus=4) == []
    (launch,) = asked(ready("node-1", free=0.0), cpus=5)
    assert isinstance(launch, Launch)
    member = Member(0, MemberState.READY, "node-1")
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 2}), LeaseState.ACTIVE, (member,))
    demand = (Demand({"CPU": 1.0}, {}, 4, is_standing=True),)
    seen = Snapshot(1000.0, (CPU4, GPU), (ready("node-1", free=2.0),), leases=(lease,), demand=demand, next_node=10)
    assert [type(action) for action in plan(seen)] == [Wait]
    (launch,) = plan(replace(seen, unmanaged=Unmanaged(max_nodes=2)))
    assert isinstance(launch, Launch)


def test_work_that_waits_is_not_bought_for_twice() -> None:
    waiting = Demand({"CPU": 2.0}, {}, 2)
    actions = asked(cpus=4, waiting=(waiting,))
    assert [type(action) for action in actions] == [Launch]
    assert [type(action) for action in asked(cpus=5, waiting=(waiting,))] == [Launch, Launch]


def test_a_node_that_holds_room_that_was_asked_for_does_not_idle_out() -> None:
    idle = ready("node-1", free=4.0, idle_s=9_999.0), ready("node-2", free=4.0, idle_s=9_999.0)
    (drain,) = asked(*idle, cpus=3)
    assert isinstance(drain, Drain)
    assert [type(action) for action in asked(*idle, cpus=8)] == []
    assert [type(action) for action in asked(*idle, cpus=0)] == [Drain, Drain]
