"""The scheduling state: no room is promised twice, the tightest node comes first, and reasons help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.clock import utc
from raytide.core.errors import CapacityError
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, Traffic
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import Demand, EndpointView, NodeView, Pool, Snapshot
from raytide.scheduling.diagnosis import Unschedulable, check_possible
from raytide.scheduling.lookahead import PendingDemand, PendingShape
from raytide.scheduling.repacking import repack
from raytide.scheduling.replicas import replica_selector
from raytide.scheduling.state import Placements, SchedulingState

CPU4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=100_000, max_nodes=3)
SPOT = NodeType(
    name="h100x4.spot",
    resources={"CPU": 32, "GPU": 4},
    labels={"ray.io/accelerator-type": "H100"},
    market=CapacityType.SPOT,
    price_micro_usd_h=9_000_000,
    max_nodes=2,
    zones=("a", "b"),
)
SOLID = SPOT.model_copy(update={"name": "h100x4", "market": CapacityType.ON_DEMAND, "price_micro_usd_h": 20_000_000})
FLEET = (CPU4, SPOT, SOLID)


def view(n: int, node_type: NodeType, state: NodeState = NodeState.READY, **available: float) -> NodeView:
    node = Node(
        id=f"node-{n}",
        type=node_type.name,
        zone=node_type.zones[0],
        market=node_type.market,
        price_micro_usd_h=node_type.price_micro_usd_h,
        state=state,
        requested_at_s=0.0,
        ray_node_id=f"ray-{n}",
    )
    free = {**node_type.resources, **available}
    return NodeView(node, node_type.resources, free, node_type.all_labels(node.zone))


def lease(shape: Shape, *members: Member, id: str = "lease-1") -> Lease:
    return Lease(id, id.replace("lease", "job"), shape, LeaseState.WAITING, members)


def cpus(count: float, members: int = 1) -> Shape:
    return Shape(members=members, resources={"CPU": count})


def ids(placed: Placements | Unschedulable) -> list[str]:
    assert not isinstance(placed, Unschedulable), placed
    return [seat.node_id for seat in placed]


def short(placed: Placements | Unschedulable) -> Unschedulable:
    assert isinstance(placed, Unschedulable), placed
    return placed


def test_the_tightest_ready_node_is_taken_before_a_roomy_one_and_before_a_launching_one() -> None:
    nodes = (view(1, CPU4), view(2, CPU4, CPU=2), view(3, CPU4, NodeState.LAUNCHING, CPU=2))
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=FLEET, nodes=nodes))
    assert ids(room.place(cpus(2), 4, subject="g")) == ["node-2", "node-1", "node-1", "node-3"]


def test_cpu_work_keeps_off_accelerators_while_another_node_is_ready() -> None:
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=FLEET, nodes=(view(1, SPOT, CPU=4), view(2, CPU4)))
    )
    assert ids(room.place(cpus(4), 1, subject="g")) == ["node-2"]


@pytest.mark.parametrize("state", [NodeState.DRAINING, NodeState.TERMINATING])
def test_a_node_that_leaves_holds_nothing_new(state: NodeState) -> None:
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, state),), next_node=2)
    )
    assert ids(room.place(cpus(4), 1, subject="g")) == ["node-2"]


@pytest.mark.parametrize("state", [NodeState.DRAINING, NodeState.TERMINATING])
def test_i2_a_node_that_leaves_counts_against_the_maximum_until_it_is_gone(state: NodeState) -> None:
    one = CPU4.model_copy(update={"max_nodes": 1})
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(one,), nodes=(view(1, one, state),), next_node=2))
    assert short(room.place(cpus(4), 1, subject="g")).constraint == "capacity"
    assert room.buy(one) is None


def test_without_ray_s_word_a_node_that_runs_holds_nothing_new() -> None:
    snapshot = Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4),), next_node=2, ray_answers=False)
    assert ids(SchedulingState.from_snapshot(snapshot).place(cpus(4), 1, subject="g")) == ["node-2"]


def test_an_assigned_member_has_its_room_before_ray_knows_of_it() -> None:
    held = lease(cpus(3), Member(0, MemberState.ASSIGNED, "node-1"))
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4),), leases=(held,), next_node=2)
    )
    assert ids(room.place(cpus(2), 1, subject="g")) == ["node-2"]


def test_a_forming_member_is_taken_out_until_ray_must_have_counted_it() -> None:
    held = lease(cpus(3), Member(0, MemberState.FORMING, "node-1"))
    before, after = view(1, CPU4), view(1, CPU4, CPU=1)
    for node in (before, after):
        room = SchedulingState.from_snapshot(
            Snapshot(at_s=0, node_types=(CPU4,), nodes=(node,), leases=(held,), next_node=2)
        )
        assert ids(room.place(cpus(1), 2, subject="g")) == ["node-1", "node-2"]


def test_a_ready_member_is_not_taken_out_twice() -> None:
    held = lease(cpus(2), Member(0, MemberState.READY, "node-1"))
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, CPU=2),), leases=(held,))
    )
    assert ids(room.place(cpus(2), 1, subject="g")) == ["node-1"]


def test_resources_of_a_ready_member_are_not_free_although_ray_has_not_counted_it_yet() -> None:
    gang = lease(cpus(3), Member(0, MemberState.READY, "node-1"))
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4),), leases=(gang,), next_node=2)
    )
    assert ids(room.place(cpus(1), 2, subject="g")) == ["node-1", "node-2"]
    worked_on = Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, CPU=0.5),), leases=(gang,))
    assert SchedulingState.from_snapshot(worked_on).node_table.has_free(0, {"CPU": 0.5}), "others use half a CPU there"

    other = lease(cpus(1), Member(0, MemberState.ASSIGNED, "node-1"), id="lease-2")
    both = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4),), leases=(gang, other), next_node=2)
    )
    assert ids(both.place(cpus(1), 1, subject="g")) == ["node-2"], "one is there, the other has the rest"


def test_new_nodes_are_the_cheapest_for_each_member_they_would_hold() -> None:
    small = NodeType(name="small", resources={"CPU": 2}, price_micro_usd_h=60_000)
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(CPU4, small), next_node=7))
    placed = room.place(cpus(2), 3, subject="g")
    assert not isinstance(placed, Unschedulable)
    assert [(seat.node_id, seat.node_type, seat.is_new) for seat in placed] == [
        ("node-7", "cpu4", True),
        ("node-7", "cpu4", True),
        ("node-8", "small", True),
    ]


def test_zones_are_tried_in_order_and_a_pool_that_backs_off_is_passed_over() -> None:
    shape = Shape(resources={"GPU": 4})
    tired: tuple[Pool, ...] = (Pool("h100x4.spot", "a", 1, retry_at_s=50),)
    placed = SchedulingState.from_snapshot(Snapshot(at_s=10, node_types=FLEET, pools=tired)).place(
        shape, 1, subject="g"
    )
    assert not isinstance(placed, Unschedulable)
    assert (placed[0].node_type, placed[0].zone) == ("h100x4.spot", "b")
    tired += (Pool("h100x4.spot", "b", 1, retry_at_s=60),)
    placed = SchedulingState.from_snapshot(Snapshot(at_s=10, node_types=FLEET, pools=tired)).place(
        shape, 1, subject="g"
    )
    assert not isinstance(placed, Unschedulable)
    assert placed[0].node_type == "h100x4"


def test_nothing_is_taken_when_not_all_fit() -> None:
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, CPU=1),), next_node=2)
    )
    assert short(room.place(cpus(4), 3, subject="g")).constraint == "capacity"
    assert ids(room.place(cpus(4), 2, subject="g")) == ["node-2", "node-3"]


def test_a_request_for_no_members_reserves_nothing() -> None:
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, CPU=4),), next_node=2)
    )
    assert room.place(cpus(4), 0, subject="g") == ()
    assert ids(room.place(cpus(4), 1, subject="g")) == ["node-1"]


def test_an_elastic_gang_gets_what_there_is_above_its_minimum() -> None:
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(CPU4,)))
    assert len(ids(room.place(cpus(4), 8, at_least=2, subject="g"))) == 3


def test_no_members_are_returned_if_none_are_needed_and_none_fit() -> None:
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=(view(1, CPU4, CPU=0),), next_node=2)
    )
    apart = cpus(4).model_copy(update={"together": "rack"})
    assert room.place(apart, 2, at_least=0, subject="g") == ()


def test_a_published_replica_without_a_node_has_its_room_before_any_gang() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"CPU": 2}, replicas=Replicas(max=3))
    endpoint = Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=2)
    views = (EndpointView(endpoint, EndpointLoad(at_s=0, ongoing=0, ready=1, replica_nodes=("ray-1",))),)
    nodes = (view(1, CPU4, CPU=2),)
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4,), nodes=nodes, endpoints=views, next_node=2)
    )
    assert ids(room.replicas["m"]) == ["node-1"]
    assert ids(room.place(cpus(2), 1, subject="g")) == ["node-2"]


def test_without_fresh_word_only_the_replicas_that_ray_cannot_place_are_missing() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"CPU": 2}, replicas=Replicas(max=3))
    endpoint = EndpointView(Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=3), None)
    asked = (Demand({"CPU": 2.0}, replica_selector(spec)), Demand({"CPU": 2.0}, count=9))
    silent = Snapshot(at_s=99, node_types=(CPU4,), endpoints=(endpoint,))
    pending = Snapshot(at_s=99, node_types=(CPU4,), endpoints=(endpoint,), demand=asked)
    assert SchedulingState.from_snapshot(silent).replicas == {}
    assert len(SchedulingState.from_snapshot(pending).replicas["m"]) == 1


def test_a_look_at_what_could_be_leaves_the_others_worth_as_it_was() -> None:
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(CPU4,)))
    room.pending = PendingDemand(room.offerings, [PendingShape(cpus(3), 1), PendingShape(cpus(1), 1)])
    room.advance()
    assert len(ids(room.copy().place(cpus(3), 1, subject="g"))) == 1
    assert room.pending.remaining.tolist() == [0.0, 1.0], "nobody sits on the rest of a node that is not bought"


def test_room_is_held_for_the_demand_that_a_node_was_bought_for() -> None:
    room = state_with_pending(max_nodes=9)
    (slot,) = ids(room.place(cpus(1), 1, subject="first"))
    room.advance()
    assert slot not in ids(room.place(cpus(2), 1, subject="between")), "3 of its 4 CPUs are held"
    room.advance()
    assert ids(room.place(GPU_TASK, 1, subject="last")) == [slot]


def test_nothing_is_held_for_later_demand_where_that_would_leave_earlier_members_without_room() -> None:
    assert len(ids(state_with_pending(max_nodes=1).place(cpus(1), 4, subject="first"))) == 4, "on the node of the GPU"
    room = state_with_pending(max_nodes=1)
    (slot,) = ids(room.place(cpus(1), 1, subject="first"))
    room.advance()
    assert ids(room.place(cpus(2), 1, subject="between")) == [slot], "a second node is not allowed"


GPU_TASK = Shape(resources={"GPU": 1, "CPU": 3})


def state_with_pending(max_nodes: int) -> SchedulingState:
    """Returns a state in which a task of few CPUs is placed first, and a task with a GPU last."""
    gpu = NodeType(name="gpu", resources={"CPU": 4, "GPU": 1}, price_micro_usd_h=10, max_nodes=max_nodes)
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(gpu,)))
    shapes = [PendingShape(cpus(1), 4), PendingShape(cpus(2), 1), PendingShape(GPU_TASK, 1)]
    room.pending = PendingDemand(room.offerings, shapes)
    room.advance()
    return room


def test_the_reason_of_a_member_that_is_too_big_for_every_node() -> None:
    shape = Shape(resources={"GPU": 8}, labels={"ray.io/accelerator-type": "H100"})
    no = short(
        SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(CPU4, SPOT))).place(shape, 1, subject="gang job-7")
    )
    assert no.constraint == "impossible"
    assert f"{no.reason} {no.remedy}" == (
        "no node type fits gang job-7: needs 8 x H100 on one node; the largest is 4 x H100 (h100x4.spot). "
        "Ask for 4, or add a node type."
    )


def test_resources_that_no_one_node_has_together_name_the_nearest_node() -> None:
    many = CPU4.model_copy(update={"resources": {"CPU": 64}})
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(SPOT, many)))
    no = short(room.place(Shape(resources={"GPU": 2, "CPU": 48}), 1, subject="gang job-7"))
    assert no.constraint == "impossible"
    assert "needs 2 GPU + 48 CPU on one node; the nearest is" in no.reason


def test_a_label_that_no_node_type_has_is_named_with_those_there_are() -> None:
    spec = GangSpec(shapes=(Shape(resources={"GPU": 1}, labels={"ray.io/accelerator-type": "A100"}),))
    with pytest.raises(CapacityError, match=r"accelerator-type=A100; the fleet has H100\. Ask for another"):
        check_possible(spec, FLEET)


def test_more_members_than_the_whole_fleet_holds_is_impossible_and_another_shape_saves_it() -> None:
    with pytest.raises(CapacityError, match=r"needs 9 x \(4 CPU\) at once; the whole fleet holds 3 \(3 x cpu4\)"):
        check_possible(GangSpec(shapes=(cpus(4, 9),)), (CPU4,))
    check_possible(GangSpec(shapes=(cpus(4, 9), cpus(4, 2))), (CPU4,))
    check_possible(GangSpec(shapes=(Shape(members=9, min_members=3, resources={"CPU": 4}),)), (CPU4,))


def test_capacity_names_the_holders_and_stock_the_next_attempt() -> None:
    held = lease(cpus(4), *(Member(n - 1, MemberState.READY, f"node-{n}") for n in (1, 2, 3)))
    full = Snapshot(at_s=0, node_types=(CPU4,), nodes=tuple(view(n, CPU4, CPU=0) for n in (1, 2, 3)), leases=(held,))
    no = short(SchedulingState.from_snapshot(full).place(cpus(4), 1, subject="gang job-2"))
    assert no.constraint == "capacity"
    assert "held by job-1" in no.reason
    assert "max_nodes of cpu4" in no.remedy
    dry = Snapshot(at_s=10, node_types=(CPU4,), pools=(Pool("cpu4", "local", 2, retry_at_s=52),))
    no = short(SchedulingState.from_snapshot(dry).place(cpus(4), 1, subject="gang job-2"))
    assert no.constraint == "stock"
    assert f"the next attempt is at {utc(52)}" in no.reason
    assert "the next attempt is at 00:00:52 UTC" in no.reason


amounts = st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0])
asks = st.lists(st.tuples(amounts, st.integers(1, 5), st.integers(1, 5)), max_size=8)


@given(asks=asks, free=st.lists(st.sampled_from([0.0, 1.0, 3.0, 4.0]), max_size=3))
def test_no_room_is_promised_twice_and_no_maximum_is_passed(
    asks: list[tuple[float, int, int]], free: list[float]
) -> None:
    small = NodeType(name="small", resources={"CPU": 2}, price_micro_usd_h=60_000, max_nodes=2)
    nodes = tuple(view(n, CPU4, CPU=cpu) for n, cpu in enumerate(free, start=1))
    room = SchedulingState.from_snapshot(
        Snapshot(at_s=0, node_types=(CPU4, small), nodes=nodes, next_node=len(nodes) + 1)
    )
    capacity = {v.node.id: v.available["CPU"] for v in nodes}
    bought: dict[str, str] = {}
    for cpu, count, least in asks:
        placed = room.place(cpus(cpu), count, at_least=min(least, count), subject="g")
        if isinstance(placed, Unschedulable):
            continue
        assert min(least, count) <= len(placed) <= count
        for seat in placed:
            if seat.node_id not in capacity:
                assert seat.is_new
                capacity[seat.node_id] = {"cpu4": 4.0, "small": 2.0}[seat.node_type]
                bought[seat.node_id] = seat.node_type
            capacity[seat.node_id] -= cpu
    assert all(left >= -1e-9 for left in capacity.values())
    assert sum(t == "cpu4" for t in bought.values()) + len(nodes) <= 3
    assert sum(t == "small" for t in bought.values()) <= 2


def test_a_deleted_endpoint_needs_no_gpu_and_blocks_no_job() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 8})
    gone = EndpointView(Endpoint(spec, "me", EndpointState.DELETED, 0.0, target_replicas=0), None)
    assert SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(CPU4,), endpoints=(gone,))).replicas == {}


def test_a_replica_of_several_members_is_seated_whole_or_not_at_all() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"CPU": 4}, members=2)
    endpoint = Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=2)

    def seen(*nodes: str, moving: tuple[str, ...] = ()) -> SchedulingState:
        load = EndpointLoad(at_s=0.0, ongoing=0.0, ready=1, replica_nodes=nodes, moving=moving)
        return SchedulingState.from_snapshot(
            Snapshot(at_s=0, node_types=(CPU4,), endpoints=(EndpointView(endpoint, load),))
        )

    empty = seen()
    assert (empty.missing["m"], len(empty.replicas["m"]), len(empty.bought)) == (4, 2, 2), (
        "the third node is half of one"
    )
    broken = seen("ray-1")
    assert (broken.missing["m"], len(broken.replicas["m"])) == (3, 3), "what one lacks, and one whole"
    moved = seen("ray-1", "ray-2", "ray-3", "ray-4", moving=("ray-3", "ray-4"))
    assert (moved.missing["m"], len(moved.replicas["m"])) == (2, 2), "of one that Serve moves no member stays"


L4 = NodeType(name="l4", resources={"GPU": 1}, price_micro_usd_h=1_000_000, max_nodes=3)
H100 = NodeType(name="h100", resources={"GPU": 2}, price_micro_usd_h=4_000_000, max_nodes=3)
ONE = Shape(resources={"GPU": 1})


def test_new_nodes_are_those_on_which_what_a_member_does_costs_least() -> None:
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(L4, H100)))
    hourly = room.copy().place(ONE, 4, subject="g")
    assert not isinstance(hourly, Unschedulable) and [s.node_type for s in hourly] == ["l4", "l4", "l4", "h100"]
    for_work = room.place(ONE, 4, subject="g", paces={"l4": 1.0, "h100": 3.0})
    assert not isinstance(for_work, Unschedulable) and {s.node_type for s in for_work} == {"h100"}


def test_a_fast_node_is_not_swapped_for_a_slow_one() -> None:
    for paces, kept in (({"l4": 1.0, "h100": 6.0}, "h100"), ({"l4": 1.0, "h100": 1.5}, "l4")):
        room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(L4, H100)))
        placed = room.place(ONE, 1, subject="g", paces=paces)
        assert not isinstance(placed, Unschedulable)
        done = repack(room)
        assert done.final_slot(placed[0]).node_type == kept


def test_replicas_go_where_their_work_costs_least_and_stay_there() -> None:
    traffic = Traffic(paces={"l4": 1.0, "h100": 6.0})
    load = EndpointLoad(0.0, 0.0, 0, traffic=traffic)
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 1}, replicas=Replicas(max=4))
    served = EndpointView(Endpoint(spec, "me", EndpointState.RUNNING, 0.0, 1), load)
    room = SchedulingState.from_snapshot(Snapshot(at_s=0, node_types=(L4, H100), endpoints=(served,)))
    repack(room)
    assert [offer.node_type.name for offer in room.bought.values()] == ["h100"]
