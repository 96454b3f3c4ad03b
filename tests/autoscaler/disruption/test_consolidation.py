"""Replicas follow the price: back to spot once it is there, together when there is room, and never for nothing."""

from __future__ import annotations

from dataclasses import replace

from tests.autoscaler.world import Cluster

from raytide.autoscaler.planner import plan
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.endpoint_load import Traffic
from raytide.core.objects.gang import Lease, LeaseState, Member, Shape
from raytide.core.objects.node import CapacityType, NodeType
from raytide.core.objects.plan import Drain, Launch
from raytide.core.objects.snapshot import EndpointView, Limits, NodeView, Snapshot

SOLID = NodeType(name="gpu", resources={"GPU": 2}, price_micro_usd_h=3_000_000, max_nodes=4, idle_timeout_s=20)
SPOT = SOLID.model_copy(update={"name": "gpu.spot", "market": CapacityType.SPOT, "price_micro_usd_h": 1_000_000})
SPEC = ServeSpec(
    name="m", model="/m", resources={"GPU": 1}, replicas=Replicas(max=4, target_ongoing=4, downscale_delay_s=10)
)


def ready(cluster: Cluster) -> int:
    """Replicas that answer, those that still do on a draining node included."""
    return sum(bool(work.node_id) for work in cluster.ray.work)


def kinds(cluster: Cluster) -> list[str]:
    return sorted(machine.node_type for machine in cluster.machines())


def on_demand_in_need() -> Cluster:
    """Two replicas that had to go on demand, because there was no spot."""
    cluster = Cluster((SOLID, SPOT))
    cluster.provider.set_stock("gpu.spot", "local", 0)
    cluster.serve(SPEC, ongoing=8.0)
    cluster.settle(30)
    assert (kinds(cluster), ready(cluster)) == (["gpu"], 2)
    return cluster


def test_on_demand_stays_until_its_spot_replacement_is_ready_and_no_replica_is_missed() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", None)
    deeds = []
    for _ in range(225):
        deeds += [a for a in cluster.tick(4.0) if isinstance(a, Launch | Drain)]
        assert ready(cluster) >= 2
    launch, drain = deeds
    assert isinstance(launch, Launch)
    assert (launch.subject, launch.node_type, launch.cost_micro_usd_h) == ("move node-2", "gpu.spot", 1_000_000)
    assert "for $2.00/h less; the move costs $0.33" in launch.reason
    assert isinstance(drain, Drain)
    assert (drain.node_id, drain.cost_micro_usd_h) == ("node-2", -3_000_000)
    assert drain.rejected[0].extra_micro_usd_h == 2_000_000
    assert kinds(cluster) == ["gpu.spot"]


def test_replicas_do_not_move_to_nodes_that_cost_less_by_the_hour_and_do_less() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", None)
    cluster.traffic["m"] = Traffic(paces={"gpu": 4.0, "gpu.spot": 1.0}, held=(4.0, 4.0))
    cluster.ongoing["m"] = 32.0  # as much as two of the fast ones carry
    assert cluster.settle(100, dt_s=10.0) == []
    cluster.traffic["m"] = Traffic(paces={"gpu": 1.0, "gpu.spot": 4.0}, held=(1.0, 1.0))
    cluster.ongoing["m"] = 8.0
    assert [deed.node_type for deed in cluster.settle(1) if isinstance(deed, Launch)] == ["gpu.spot"]


def test_no_node_moves_that_is_young_and_none_at_all_where_that_is_switched_off() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", None)
    assert cluster.settle(56, dt_s=10.0) == []
    cluster.limits = Limits(moves_after_s=None)
    assert cluster.settle(60, dt_s=30.0) == []
    cluster.limits = Limits(moves_after_s=1200.0)
    assert isinstance(cluster.settle(1)[0], Launch)


def test_while_spot_is_not_to_be_had_it_is_asked_for_ever_more_rarely_and_nothing_leaves() -> None:
    cluster = on_demand_in_need()
    deeds = cluster.settle(200, dt_s=10.0)
    assert all(isinstance(deed, Launch) for deed in deeds)
    assert 1 <= len(deeds) <= 7
    assert (kinds(cluster), ready(cluster)) == (["gpu"], 2)


def test_a_move_that_would_not_pay_back_is_not_made() -> None:
    dear = SPOT.model_copy(update={"price_micro_usd_h": 2_300_000})
    cluster = Cluster((SOLID, dear))
    cluster.provider.set_stock("gpu.spot", "local", 0)
    cluster.serve(SPEC, ongoing=8.0)
    cluster.settle(30)
    cluster.provider.set_stock("gpu.spot", "local", None)
    assert cluster.settle(60, dt_s=15.0) == [], "with its losses spot would cost $2.88 an hour, and the move $0.44"


def test_replicas_that_fit_on_other_nodes_leave_theirs() -> None:
    cluster = Cluster((SOLID,))
    cluster.serve(SPEC, ongoing=16.0)
    cluster.settle(30)
    assert (kinds(cluster), ready(cluster)) == (["gpu", "gpu"], 4)
    cluster.book.endpoints["m"] = replace(cluster.book.endpoints["m"], target_replicas=2)
    for work in [work for work in cluster.ray.work if work.node_id][1:3]:
        cluster.ray.work.remove(work)
    cluster.ongoing["m"] = 8.0
    cluster.settle(5)
    assert len({work.node_id for work in cluster.ray.work}) == 2, "one replica on each node"
    deeds = cluster.settle(200, dt_s=4.0)
    assert kinds(cluster) == ["gpu"]
    assert ready(cluster) == 2
    drain = next(deed for deed in deeds if isinstance(deed, Drain))
    assert drain.kind == "notice"
    assert "fit on node-" in drain.reason


def test_nobody_moves_onto_a_node_that_leaves_in_the_same_plan() -> None:
    others = NodeType(name="cpu", resources={"CPU": 1}, price_micro_usd_h=100, min_nodes=20, max_nodes=20)
    cluster = Cluster((SOLID, others))
    cluster.limits = Limits(moves_after_s=None)
    cluster.serve(SPEC.model_copy(update={"replicas": Replicas(min=3, max=6, target_ongoing=4)}), ongoing=24.0)
    cluster.settle(30)
    cluster.book.endpoints["m"] = replace(cluster.book.endpoints["m"], target_replicas=3)
    on = {work.node_id: work for work in cluster.ray.work}
    assert (len(on), ready(cluster)) == (3, 6)
    for work in on.values():
        cluster.ray.work.remove(work)
    cluster.ongoing["m"] = 12.0
    cluster.settle(5)
    cluster.limits = Limits(moves_after_s=0.0)
    leaving = [action for action in cluster.tick(4.0) if isinstance(action, Drain)]
    assert len(leaving) == 1, "of three half empty nodes one is filled, and one has nowhere to go"


def test_gangs_and_work_without_a_lease_keep_their_nodes() -> None:
    cluster = Cluster((SOLID, SPOT))
    cluster.provider.set_stock("gpu.spot", "local", 0)
    cluster.submit(Shape(members=1, resources={"GPU": 2}))
    cluster.serve(SPEC, ongoing=4.0)
    cluster.settle(30)
    cluster.run_task({"GPU": 1.0})
    cluster.settle(5)
    cluster.provider.set_stock("gpu.spot", "local", None)
    before = kinds(cluster)
    assert cluster.settle(60, dt_s=15.0) == []
    assert kinds(cluster) == before == ["gpu", "gpu"]


def test_a_replacement_that_is_taken_back_before_it_is_ready_costs_no_replica() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", None)
    while "gpu.spot" not in kinds(cluster):
        cluster.tick(4.0)
    cluster.provider.reclaim(next(m.node_id for m in cluster.machines() if m.node_type == "gpu.spot"))
    cluster.provider.set_stock("gpu.spot", "local", 0)
    for _ in range(200):
        cluster.tick()
        assert ready(cluster) == 2
    assert kinds(cluster) == ["gpu"]


def test_replicas_only_move_to_nodes_that_carry_their_labels() -> None:
    cluster = Cluster((SOLID, SPOT))
    cluster.serve(SPEC.model_copy(update={"labels": {"ray.io/market-type": "on-demand"}}), ongoing=8.0)
    cluster.settle(30)
    assert kinds(cluster) == ["gpu"]
    assert cluster.settle(60, dt_s=30.0) == []


def test_objects_in_the_store_of_a_node_do_not_hold_its_replicas() -> None:
    """Ray's own count of them goes down with every byte."""
    cluster = on_demand_in_need()
    cluster.limits = Limits(moves_after_s=1.0)
    cluster.tick(5.0)
    seen = replace(cluster.seen, pools=())
    (old,) = (view for view in seen.nodes if view.node.type == "gpu")
    total, free = {**old.total, "object_store_memory": 100.0}, {**old.available, "object_store_memory": 99.0}
    alone = replace(seen, nodes=(replace(old, total=total, available=free),))
    assert [type(action) for action in plan(alone)] == [Launch]


def move_on_its_way() -> Snapshot:
    """Its replacement is ready, and the next decision drains the old node."""
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", None)
    while not any(isinstance(action, Drain) for action in cluster.tick(4.0)):
        pass
    return cluster.seen


def drains(seen: Snapshot) -> list[str]:
    return [action.node_id for action in plan(seen) if isinstance(action, Drain)]


def test_replicas_that_have_become_too_many_for_their_replacement_stay() -> None:
    seen = move_on_its_way()
    assert drains(seen) == ["node-2"]
    (served,) = seen.endpoints
    more = replace(seen, endpoints=(_with_replicas(served, 4),), nodes=tuple(_larger(v) for v in seen.nodes))
    assert drains(more) == []


def test_members_of_a_replica_that_spans_nodes_are_not_moved() -> None:
    seen = move_on_its_way()
    (served,) = seen.endpoints
    assert served.load is not None
    load = replace(served.load, ready=1, replicas=(), ongoing=4.0)
    for members, gone in (1, ["node-2"]), (2, []):
        spec = SPEC.model_copy(update={"members": members})
        endpoint = replace(served.endpoint, spec=spec, target_replicas=2 // members)
        assert drains(replace(seen, endpoints=(replace(served, endpoint=endpoint, load=load),))) == gone


def test_a_node_on_which_this_plan_seats_somebody_does_not_make_room_for_its_replacement() -> None:
    seen = move_on_its_way()
    (served,) = seen.endpoints
    one = _with_replicas(served, 1)
    free = tuple(replace(v, available={"GPU": 1.0}) if v.node.type == "gpu" else v for v in seen.nodes)
    assert drains(replace(seen, endpoints=(one,), nodes=free)) == ["node-2"]
    task = Shape(resources={"GPU": 1}, labels={"ray.io/market-type": "on-demand"})
    lease = Lease("lease-1", "job-1", task, LeaseState.WAITING, (Member(0),))
    assert drains(replace(seen, endpoints=(one,), nodes=free, leases=(lease,))) == []


def _with_replicas(served: EndpointView, count: int) -> EndpointView:
    """All on the old node."""
    assert served.load is not None
    load = replace(served.load, ready=count, replica_nodes=("ray-node-2",) * count, replicas=(), ongoing=4.0 * count)
    return replace(served, endpoint=replace(served.endpoint, target_replicas=count), load=load)


def _larger(view: NodeView) -> NodeView:
    """The old node holds four of them."""
    return replace(view, total={"GPU": 4.0}, available={"GPU": 0.0}) if view.node.type == "gpu" else view


def spread(*, dearer: int) -> Cluster:
    """Two replicas in two zones, of which one is dearer."""
    pools = NodeType(
        name="gpu",
        resources={"GPU": 1},
        price_micro_usd_h=1_000_000,
        zones=("a", "b"),
        zone_prices_micro_usd_h={"b": dearer},
        max_nodes=4,
        idle_timeout_s=20,
    )
    cluster = Cluster((pools,))
    cluster.serve(SPEC, ongoing=8.0)
    cluster.settle(30)
    return cluster


def test_replicas_that_were_spread_over_zones_are_not_gathered_in_the_cheapest() -> None:
    cluster = spread(dearer=1_190_000)
    assert sorted(machine.zone for machine in cluster.machines()) == ["a", "b"]
    assert cluster.settle(200, dt_s=10.0) == []


def test_replicas_move_to_the_cheapest_zone_in_which_they_stay_spread() -> None:
    """Three zones, of which the third is the dearest by far: its replica goes to the one that holds none."""
    pools = NodeType(
        name="gpu",
        resources={"GPU": 1},
        price_micro_usd_h=1_000_000,
        zones=("a", "b", "c"),
        zone_prices_micro_usd_h={"b": 1_150_000, "c": 2_000_000},
        max_nodes=4,
        idle_timeout_s=20,
    )
    cluster = Cluster((pools,))
    cluster.provider.set_stock("gpu", "b", 0)
    cluster.serve(SPEC, ongoing=4.0)
    cluster.settle(20)
    cluster.provider.set_stock("gpu", "a", 1)
    cluster.ongoing["m"] = 8.0
    cluster.settle(30)
    assert sorted(machine.zone for machine in cluster.machines()) == ["a", "c"]
    for zone in ("a", "b"):
        cluster.provider.set_stock("gpu", zone, None)
    cluster.settle(400, dt_s=4.0)
    assert sorted(machine.zone for machine in cluster.machines()) == ["a", "b"]
