"""Offerings: limits, launch rate, risk, zones, racks and shares of GPUs."""

from __future__ import annotations

from collections import Counter

import pytest

from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.node import ZONE_LABEL, CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import EndpointView, Limits, NodeView, Pool, Quote, Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.node_table import SHORTLIST
from raytide.scheduling.state import Placements, SchedulingState

SOLID = NodeType(
    name="gpu", resources={"CPU": 8, "GPU": 2}, price_micro_usd_h=3_000_000, max_nodes=9, zones=("us-1a", "us-1b")
)
SPOT = SOLID.model_copy(update={"name": "gpu.spot", "market": CapacityType.SPOT, "price_micro_usd_h": 1_000_000})
TWO_GPUS = Shape(resources={"GPU": 2})


def view(n: int, node_type: NodeType = SOLID, zone: str = "us-1a", *, age_s: float = 900.0, **labels: str) -> NodeView:
    price = node_type.price_in(zone)
    node = Node(
        f"node-{n}", node_type.name, zone, node_type.market, price, NodeState.READY, -age_s, ray_node_id=f"ray-{n}"
    )
    return NodeView(node, node_type.resources, node_type.resources, {**node_type.all_labels(zone), **labels})


def room(*types: NodeType, **snapshot: object) -> SchedulingState:
    return SchedulingState.from_snapshot(Snapshot(at_s=0.0, node_types=types, next_node=50, **snapshot))  # type: ignore[arg-type]


def pools(placed: Placements | Unschedulable) -> Counter[tuple[str, str]]:
    """Nodes by pool."""
    assert not isinstance(placed, Unschedulable), placed
    return Counter((seat.node_type, seat.zone) for seat in set(placed))


def short(placed: Placements | Unschedulable) -> Unschedulable:
    assert isinstance(placed, Unschedulable), placed
    return placed


def test_i6_above_the_soft_limit_only_spot_is_bought_and_above_the_hard_one_nothing() -> None:
    nodes = (view(1), view(2))
    soft = room(SOLID, SPOT, nodes=nodes, limits=Limits(soft_micro_usd_h=8_000_000))
    assert pools(soft.place(TWO_GPUS, 11, subject="g"))[("gpu.spot", "us-1a")] == 9
    no = short(soft.place(TWO_GPUS, 1, subject="gang job-1"))
    assert no.constraint == "budget"
    assert "the fleet costs $15.00/h, and above $8.00/h only spot is bought" in no.reason
    assert "metadata.raytide.limits" in no.remedy
    hard = room(SOLID, SPOT, nodes=nodes, limits=Limits(hard_micro_usd_h=7_500_000))
    assert short(hard.place(TWO_GPUS, 4, subject="g")).constraint == "budget"
    assert len(hard.place(TWO_GPUS, 4, at_least=0, subject="g")) == 3  # type: ignore[arg-type]
    assert hard.offerings.burn_micro_usd_h == 7_000_000


def test_no_more_nodes_are_launched_within_a_minute_than_the_pace_and_a_gang_is_not_cut() -> None:
    young = view(1, age_s=30)
    one_left = room(SPOT, nodes=(young,), limits=Limits(launches_per_min=2))
    assert len(one_left.place(TWO_GPUS, 9, at_least=0, subject="tasks")) == 2  # type: ignore[arg-type]
    no = short(one_left.place(TWO_GPUS, 1, subject="gang job-1"))
    assert (no.constraint, "2 nodes were launched within a minute" in no.reason) == ("rate", True)
    whole = room(SPOT, limits=Limits(launches_per_min=2))
    assert sum(pools(whole.place(TWO_GPUS, 4, subject="g")).values()) == 4
    assert short(whole.place(TWO_GPUS, 1, subject="g")).constraint == "rate"


def test_a_pool_that_takes_nodes_back_often_is_worth_less_than_a_calm_one() -> None:
    stormy = (Quote("gpu.spot", "us-1a", deaths_per_h=2.0), Quote("gpu.spot", "us-1b", deaths_per_h=0.2))
    assert pools(room(SOLID, SPOT, quotes=stormy).place(TWO_GPUS, 1, subject="g")) == {("gpu.spot", "us-1b"): 1}
    worse = tuple(Quote("gpu.spot", zone, deaths_per_h=15.0) for zone in SPOT.zones)
    assert pools(room(SOLID, SPOT, quotes=worse).place(TWO_GPUS, 1, subject="g")) == {("gpu", "us-1a"): 1}


def test_prices_are_those_of_the_zone_and_of_the_moment() -> None:
    dear = SPOT.model_copy(update={"zone_prices_micro_usd_h": {"us-1a": 3_500_000}})
    assert pools(room(SOLID, dear).place(TWO_GPUS, 1, subject="g")) == {("gpu.spot", "us-1b"): 1}
    now = (Quote("gpu.spot", "us-1b", price_micro_usd_h=4_000_000),)
    assert pools(room(SOLID, dear, quotes=now).place(TWO_GPUS, 1, subject="g")) == {("gpu", "us-1a"): 1}


def test_replicas_are_spread_over_zones_unless_that_is_much_dearer() -> None:
    spec = ServeSpec(name="m", model="/m", resources={"GPU": 2}, replicas=Replicas(max=4))
    endpoint = EndpointView(Endpoint(spec, "me", EndpointState.RUNNING, 0.0, 4), EndpointLoad(0.0, 0.0, 0))
    apart = {("gpu.spot", zone): 2 for zone in SPOT.zones}
    assert pools(room(SPOT, endpoints=(endpoint,)).replicas["m"]) == apart
    dear = SPOT.model_copy(update={"zone_prices_micro_usd_h": {"us-1b": 1_300_000}})
    assert pools(room(dear, endpoints=(endpoint,)).replicas["m"]) == {("gpu.spot", "us-1a"): 4}
    tired = (Pool("gpu.spot", "us-1b", 1, retry_at_s=60.0),)
    assert pools(room(SPOT, endpoints=(endpoint,), pools=tired).replicas["m"]) == {("gpu.spot", "us-1a"): 4}


def test_members_that_belong_together_share_one_zone_and_the_cheapest_that_holds_them_all() -> None:
    shape = Shape(members=3, resources={"GPU": 2}, together=ZONE_LABEL)
    nodes = (view(1, zone="us-1a"), view(2, zone="us-1b"), view(3, zone="us-1b"))
    assert pools(room(SPOT, nodes=nodes).place(shape, 3, subject="g")) == {
        ("gpu", "us-1b"): 2,
        ("gpu.spot", "us-1b"): 1,
    }
    few, both = SPOT.model_copy(update={"max_nodes": 2}), SOLID.model_copy(update={"max_nodes": 2})
    apart = (view(1, both, "us-1a"), view(2, both, "us-1b"))
    no = short(room(few, both, nodes=apart).place(shape, 4, subject="g"))
    assert "in one availability-zone" in no.reason


def test_a_rack_is_a_value_of_a_node_label() -> None:
    shape = Shape(members=2, resources={"GPU": 2}, together="raytide.io/rack")
    racks = {f"node-{n}": rack for n, rack in ((1, "r1"), (2, "r2"), (3, "r2"))}
    nodes = tuple(view(n, **{"raytide.io/rack": racks[f"node-{n}"]}) for n in (1, 2, 3))
    placed = room(SOLID, nodes=nodes).place(shape, 2, subject="g")
    assert [seat.node_id for seat in placed] == ["node-2", "node-3"]  # type: ignore[union-attr]
    assert "in one raytide.io/rack" in short(room(SOLID, nodes=nodes).place(shape, 3, subject="g")).reason


@pytest.mark.parametrize(("share", "fit"), [(0.5, 4), (0.4, 4), (0.3, 6), (0.6, 2), (1.0, 2)])
def test_a_part_of_a_gpu_is_never_cut_over_two(share: float, fit: int) -> None:
    placed = room(SOLID).place(Shape(resources={"GPU": share}), fit + 1, subject="g")
    assert sorted(Counter(seat.node_id for seat in placed).values()) == [1, fit]  # type: ignore[union-attr]


def test_slices_of_a_gpu_are_resources_of_the_node_type() -> None:
    mig = NodeType(name="a100.mig", resources={"CPU": 8, "mig-1g.10gb": 7}, price_micro_usd_h=4_000_000)
    placed = room(SOLID, mig).place(Shape(resources={"mig-1g.10gb": 1}), 8, subject="g")
    assert pools(placed) == {("a100.mig", "local"): 2}


def test_a_small_member_sits_where_it_cuts_nothing_that_others_usually_need() -> None:
    big = SOLID.model_copy(update={"resources": {"GPU": 8}})
    usual = Lease("lease-1", "job-1", Shape(members=9, resources={"GPU": 4}), LeaseState.ACTIVE, ())
    held = [Member(0, MemberState.ASSIGNED, "node-1"), Member(1, MemberState.ASSIGNED, "node-2")]
    taken = Lease("lease-2", "job-2", Shape(resources={"GPU": 3}), LeaseState.WAITING, (held[1],))
    whole = Lease("lease-3", "job-3", Shape(resources={"GPU": 4}), LeaseState.WAITING, (held[0],))
    nodes = (view(1, big), view(2, big))
    placed = room(big, nodes=nodes, leases=(usual, taken, whole)).place(Shape(resources={"GPU": 1}), 1, subject="g")
    assert not isinstance(placed, Unschedulable)
    assert [seat.node_id for seat in placed] == ["node-2"], "five are free there: one of them is of no use to fours"


def test_more_members_than_the_shortlist_of_nodes_holds_are_all_seated() -> None:
    count = SHORTLIST + 44
    nodes = tuple(view(n) for n in range(1, count + 1))
    placed = room(SOLID.model_copy(update={"max_nodes": count}), nodes=nodes).place(TWO_GPUS, count, subject="g")
    assert not isinstance(placed, Unschedulable)
    assert len({seat.node_id for seat in placed}) == count


def test_a_copy_of_the_room_is_a_room_of_its_own() -> None:
    def most(state: SchedulingState) -> int:
        on_nodes = state.node_table.rows_with_room(TWO_GPUS.resources, TWO_GPUS.labels)[1].sum()
        return int(on_nodes) + state.offerings.members_to_buy(TWO_GPUS)

    here = room(SPOT, nodes=(view(1, SPOT),))
    there = here.copy()
    assert pools(there.place(TWO_GPUS, 3, subject="g")) == {("gpu.spot", "us-1a"): 3}
    assert (most(here), most(there)) == (9, 6)
    assert (here.next_node, here.offerings.burn_micro_usd_h) == (50, 1_000_000)
    here.reserve("node-1", {"GPU": 1})
    assert most(here) == 8
    here.release("node-1", {"GPU": 1})
    here.release("node-99", {"GPU": 1})
    assert most(here) == 9


def test_all_types_together_have_no_more_nodes_than_max_workers() -> None:
    there = room(SOLID, SPOT, nodes=(view(1), view(2)), limits=Limits(max_nodes=3))
    assert len(there.place(TWO_GPUS, 9, at_least=0, subject="g")) == 3  # type: ignore[arg-type]
    assert there.buy(SOLID) is None
    assert short(there.place(TWO_GPUS, 1, subject="g")).constraint == "capacity"
