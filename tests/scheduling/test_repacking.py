"""Nodes that would be bought are given up or swapped if that is cheaper for all of their tenants."""

from __future__ import annotations

from collections import Counter

from raytide.autoscaler.planner import plan
from raytide.core.objects.gang import Lease, LeaseState, Member, Shape
from raytide.core.objects.node import TYPE_LABEL, ZONE_LABEL, NodeType
from raytide.core.objects.plan import Assign, Launch
from raytide.core.objects.snapshot import Limits, Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.repacking import repack
from raytide.scheduling.state import SchedulingState

SMALL = NodeType(name="gpu1", resources={"GPU": 1}, price_micro_usd_h=1_000_000)
LARGE = NodeType(name="gpu8", resources={"GPU": 8}, price_micro_usd_h=6_000_000)


def lease(number: int, gpus: float, members: int = 1) -> Lease:
    shape = Shape(members=members, resources={"GPU": gpus})
    seats = tuple(Member(index) for index in range(members))
    return Lease(f"lease-{number}", f"job-{number}", shape, LeaseState.WAITING, seats)


def room(*types: NodeType) -> SchedulingState:
    return SchedulingState.from_snapshot(Snapshot(at_s=0.0, node_types=types, next_node=1))


def test_a_node_whose_members_fit_on_what_was_bought_later_is_not_bought() -> None:
    actions = plan(Snapshot(at_s=0.0, node_types=(SMALL, LARGE), leases=(lease(1, 1), lease(2, 7)), next_node=1))
    assert [(a.node_type, a.subject) for a in actions if isinstance(a, Launch)] == [("gpu8", "lease-1")]
    assert len({a.node_id for a in actions if isinstance(a, Assign)}) == 1


def test_all_members_of_a_node_move_or_none_and_each_is_told_its_own_seat() -> None:
    here = room(LARGE)
    first = here.place(Shape(resources={"GPU": 3}), 2, subject="a")
    second = here.place(Shape(resources={"GPU": 5}), 1, subject="b")
    third = here.place(Shape(resources={"GPU": 1}), 2, subject="c")
    repaired = repack(here)
    seats = [repaired.final_slot(seat).node_id for seat in (*first, *second, *third)]  # type: ignore[misc]
    assert seats == ["node-1", "node-1", "node-2", "node-1", "node-1"]
    assert sorted(here.bought) == ["node-1", "node-2"]


def test_a_node_that_is_half_used_is_swapped_for_a_cheaper_one_that_holds_the_same() -> None:
    half = NodeType(name="gpu4", resources={"GPU": 4}, price_micro_usd_h=4_500_000)
    here = room(half, LARGE)
    placed = [*here.place(Shape(resources={"GPU": 1}), 8, subject="a")]  # type: ignore[misc]
    here.tenants["node-1"] = here.tenants["node-1"][:4]
    here.node_table.reserve(0, {"GPU": 4}, -1)
    repaired = repack(here)
    assert {repaired.final_slot(seat).node_type for seat in placed[:4]} == {"gpu4"}
    assert here.offerings.burn_micro_usd_h == 4_500_000
    assert (here.offerings.nodes_left("gpu8"), here.offerings.nodes_left("gpu4")) == (8, 7)


def test_what_may_not_be_bought_is_not_swapped_in() -> None:
    dear = NodeType(name="cpu", resources={"GPU": 2, "CPU": 4}, price_micro_usd_h=900_000, max_nodes=0)
    snapshot = Snapshot(at_s=0.0, node_types=(SMALL, dear), leases=(lease(1, 1),), limits=Limits(None, 1_000_000))
    (launch,) = [action for action in plan(snapshot) if isinstance(action, Launch)]
    assert launch.node_type == "gpu1"


def test_a_tenant_that_was_spread_over_zones_stays_in_its_zone() -> None:
    pair = NodeType(
        name="gpu2",
        resources={"GPU": 2},
        price_micro_usd_h=2_000_000,
        zones=("a", "b"),
        zone_prices_micro_usd_h={"b": 2_200_000},
    )
    here, one = room(pair), Shape(resources={"GPU": 1})
    (alone,) = here.place(one, 1, subject="m", spread_from=Counter({"a": 1}))  # type: ignore[misc]
    assert alone.zone == "b"
    assert repack(here).final_slot(alone) == alone, "a node in the other zone is cheaper"
    here.place(Shape(resources={"GPU": 1}, labels={ZONE_LABEL: "a"}), 1, subject="g")
    assert repack(here).final_slot(alone) == alone, "there is room on a node in the other zone"
    (anywhere,) = here.place(one, 1, subject="g")  # type: ignore[misc]
    assert anywhere.is_new


def test_an_unplaced_member_gets_the_node_that_is_not_bought_after_all() -> None:
    pair = NodeType(name="gpu2", resources={"GPU": 2}, price_micro_usd_h=1_000_000, max_nodes=1)
    here = room(pair, LARGE)
    for gpus in (1, 7):
        here.place(Shape(resources={"GPU": gpus}), 1, subject="a")
    small = Shape(resources={"GPU": 2}, labels={TYPE_LABEL: "gpu2"})
    assert isinstance(here.place(small, 1, subject="b"), Unschedulable)
    repack(here)
    (seat,) = here.place(small, 1, subject="b")  # type: ignore[misc]
    assert seat.is_new
