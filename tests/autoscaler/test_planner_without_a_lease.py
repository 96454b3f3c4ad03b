"""Demand that nobody queued, and leases that want nothing: what the planner leaves alone, and what it says."""

from __future__ import annotations

from raytide.autoscaler.planner import plan
from raytide.core.endpoint import ServeSpec
from raytide.core.fleet import ZONE_LABEL, NodeType
from raytide.core.gang import Lease, LeaseState, Member, Shape
from raytide.core.plan import Action, Launch, Wait
from raytide.core.replicas import replica_selector
from raytide.core.snapshot import Demand, Snapshot, Unmanaged

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


def test_a_demand_for_what_no_node_type_has_keeps_nobody_else_from_a_node() -> None:
    asked = Demand({"GPU": 1.0}, {}, 1), Demand({"CPU": 1.0}, {}, 1)
    actions = plan(Snapshot(at_s=0.0, node_types=(CPU4,), demand=asked))
    assert [action.node_type for action in actions if isinstance(action, Launch)] == ["cpu4"]
    assert [action.constraint for action in actions if isinstance(action, Wait)] == ["impossible"]
    alone = plan(Snapshot(at_s=0.0, node_types=(), demand=asked))
    assert [type(action) for action in alone] == [Wait, Wait], "a cluster that has only its head"
