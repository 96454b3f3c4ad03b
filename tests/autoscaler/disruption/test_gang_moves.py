"""Gangs follow the price like replicas do, but only those that may be disturbed, and only when it pays them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler import promises
from tests.autoscaler.world import Cluster

from raytide.autoscaler.disruption.consolidation_candidates import MOVE
from raytide.core.objects.gang import LeaseState, Shape
from raytide.core.objects.node import ZONE_LABEL, CapacityType, NodeType
from raytide.core.objects.plan import Action, Drain, Launch

SOLID = NodeType(name="gpu", resources={"GPU": 2}, price_micro_usd_h=3_000_000, max_nodes=12, idle_timeout_s=20)
SPOT = SOLID.model_copy(update={"name": "gpu.spot", "market": CapacityType.SPOT, "price_micro_usd_h": 1_000_000})
TWO = Shape(members=2, resources={"GPU": 2})
ELASTIC = Shape(members=3, min_members=1, resources={"GPU": 2})


def kinds(cluster: Cluster) -> list[str]:
    return sorted(machine.node_type for machine in cluster.machines())


def usable(cluster: Cluster) -> int:
    (lease,) = [lease for lease in cluster.book.leases.values() if lease.state is not LeaseState.RELEASED]
    return len(lease.usable)


def on_demand_in_need(shape: Shape = TWO, *types: NodeType, preemptible: bool = True, **more: object) -> Cluster:
    """A gang that had to go on demand, because there was no spot; now there is."""
    cluster = Cluster(types or (SOLID, SPOT), watch=promises.check)
    spot = [(t.name, zone) for t in cluster.node_types if t.market is CapacityType.SPOT for zone in t.zones]
    for pool in spot:
        cluster.provider.set_stock(*pool, 0)
    cluster.submit(shape, preemptible=preemptible, **more)
    cluster.settle(30)
    assert (set(kinds(cluster)), usable(cluster)) == ({"gpu"}, shape.members)
    for pool in spot:
        cluster.provider.set_stock(*pool, None)
    return cluster


def deeds(cluster: Cluster, ticks: int, dt_s: float = 4.0) -> list[Launch | Drain]:
    return [action for action in cluster.settle(ticks, dt_s) if isinstance(action, Launch | Drain)]


def test_a_gang_that_may_be_preempted_goes_back_to_spot_whole_and_stops_once() -> None:
    cluster = on_demand_in_need()
    stops, before = 0, 2
    done: list[Launch | Drain] = []
    for _ in range(220):
        done += deeds(cluster, 1, dt_s=8.0)
        now = usable(cluster)
        stops += now < before
        before = now
        if "gpu.spot" not in kinds(cluster):
            assert now == 2, "nobody leaves before the replacement is there"
    first, second, *drains = done
    assert isinstance(first, Launch)
    assert isinstance(second, Launch)
    assert {first.subject, second.subject} == {f"{MOVE}node-{n}" for n in _numbers(cluster, "gpu")}
    assert [type(drain) for drain in drains] == [Drain, Drain]
    assert (kinds(cluster), usable(cluster), stops) == (["gpu.spot", "gpu.spot"], 2, 1)


def test_a_gang_for_which_too_many_leave_already_waits_for_its_turn_and_is_not_split() -> None:
    """Three of thirty nodes may leave at once: one gang of two goes, and the other does not go half."""
    many = SOLID.model_copy(update={"max_nodes": 40})
    cluster = on_demand_in_need(Shape(members=26, resources={"GPU": 2}), many, SPOT, preemptible=False)
    cluster.provider.set_stock("gpu.spot", "local", 0)
    cluster.submit(TWO, preemptible=True)
    cluster.submit(TWO, preemptible=True)
    cluster.settle(30)
    cluster.provider.set_stock("gpu.spot", "local", None)
    assert len(cluster.machines()) == 30
    launches, _ = _launches_and_drains(cluster.tick(3400.0))
    assert len(launches) == 2


def test_the_plan_says_why_what_it_costs_and_what_was_rejected() -> None:
    cluster = on_demand_in_need()
    (launch, _), drains = _launches_and_drains(deeds(cluster, 220, dt_s=8.0))
    assert launch.reason.startswith("gpu.spot in local (spot at $1.00/h) holds job-1 of node-")
    assert "for $2.00/h less; the move costs $0.97 as job-1 stops for about 180 s" in launch.reason
    assert launch.cost_micro_usd_h == 1_000_000
    assert (launch.rejected[0].choice[:7], launch.rejected[0].extra_micro_usd_h) == ("stay on", 2_000_000)
    assert "gpu in local" in [other.choice for other in launch.rejected], "another on demand"
    assert "is ready for job-1; saves $2.00/h" in drains[0].reason
    assert (drains[0].cost_micro_usd_h, drains[0].rejected[0].extra_micro_usd_h) == (-3_000_000, 2_000_000)


def test_an_elastic_gang_moves_in_place_whoever_it_belongs_to() -> None:
    cluster = on_demand_in_need(ELASTIC, preemptible=False)
    least, bought = 3, list[int]()
    for _ in range(300):
        bought += [n for n in [len(_launches_and_drains(cluster.tick(8.0))[0])] if n]
        least = min(least, usable(cluster))
    assert (bought, least) == ([2, 1], 1), "two together and then the last: it never stops"
    assert (kinds(cluster), usable(cluster)) == (["gpu.spot"] * 3, 3)


def test_a_gang_that_may_not_be_preempted_stays() -> None:
    cluster = on_demand_in_need(preemptible=False)
    assert deeds(cluster, 100, dt_s=40.0) == []


def test_a_gang_whose_pools_are_taken_back_often_stays() -> None:
    """Every loss stops both nodes for ten minutes."""
    cluster = on_demand_in_need()
    cluster.tick(1500.0)
    seen = replace(cluster.seen, quotes=tuple(replace(quote, deaths_per_h=8.0) for quote in cluster.seen.quotes))
    assert _launches_and_drains(_plan(seen))[0] == []
    seen = replace(seen, quotes=tuple(replace(quote, deaths_per_h=0.5) for quote in seen.quotes))
    assert len(_launches_and_drains(_plan(seen))[0]) == 2


def test_a_gang_is_not_moved_before_it_stood_for_as_long_as_the_move_takes_to_pay_back() -> None:
    dear = SPOT.model_copy(update={"price_micro_usd_h": 1_500_000})
    cluster = on_demand_in_need(TWO, SOLID, dear)
    began_s = cluster.clock.now_s()
    (first, *_), _ = _launches_and_drains(deeds(cluster, 220, dt_s=20.0))
    assert first.subject.startswith(MOVE)
    moved_s = min(
        node.requested_at_s for node in cluster.book.nodes.values() if node.type == "gpu.spot" and node.ready_at_s
    )
    assert moved_s - began_s > 1200.0


def test_a_job_that_is_nearly_done_is_left_alone() -> None:
    cluster = on_demand_in_need(estimate_h=0.5)
    assert deeds(cluster, 100, dt_s=10.0) == []


def test_while_spot_is_not_to_be_had_the_gang_works_on() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", 0)
    for _ in range(150):
        cluster.tick(20.0)
        assert usable(cluster) == 2
    assert kinds(cluster) == ["gpu", "gpu"]


def test_half_of_the_replacements_of_a_gang_are_enough_to_move_half_of_it() -> None:
    cluster = on_demand_in_need()
    cluster.provider.set_stock("gpu.spot", "local", 1)
    deeds(cluster, 220, dt_s=8.0)
    assert (kinds(cluster), usable(cluster)) == (["gpu", "gpu.spot"], 2)


def test_members_that_belong_together_only_move_within_what_they_share() -> None:
    solid = SOLID.model_copy(update={"zones": ("a", "b")})
    spot = SPOT.model_copy(update={"zones": ("b",)})
    cluster = on_demand_in_need(TWO.model_copy(update={"together": ZONE_LABEL}), solid, spot)
    assert deeds(cluster, 100, dt_s=20.0) == []
    both = SPOT.model_copy(update={"zones": ("a", "b")})
    cluster = on_demand_in_need(TWO.model_copy(update={"together": ZONE_LABEL}), solid, both)
    deeds(cluster, 200, dt_s=8.0)
    assert {(m.node_type, m.zone) for m in cluster.machines()} == {("gpu.spot", "a")}


def test_a_gang_keeps_its_accelerator() -> None:
    strong = SOLID.model_copy(update={"labels": {"ray.io/accelerator-type": "H100"}})
    weak = SPOT.model_copy(update={"labels": {"ray.io/accelerator-type": "T4"}})
    cluster = on_demand_in_need(TWO, strong, weak)
    assert deeds(cluster, 100, dt_s=20.0) == []


def test_small_gangs_that_fit_on_another_node_leave_theirs() -> None:
    cluster = Cluster((SOLID,), watch=promises.check)
    one = Shape(resources={"GPU": 1})
    jobs = [cluster.submit(one, preemptible=True) for _ in range(4)]
    cluster.settle(20)
    seats = {lease.job_id: lease.members[0].node_id for lease in cluster.book.leases.values()}
    first = [job for job in jobs if seats[job] == seats[jobs[0]]]
    other = [job for job in jobs if job not in first]
    cluster.finish(first[0])
    cluster.finish(other[0])
    assert (len(first), kinds(cluster)) == (2, ["gpu", "gpu"])
    drains = [deed for deed in deeds(cluster, 220, dt_s=8.0) if isinstance(deed, Drain)]
    assert kinds(cluster) == ["gpu"]
    assert "fit on node-" in drains[0].reason
    assert "stops for about 180 s" in drains[0].reason
    live = [lease for lease in cluster.book.leases.values() if lease.state is LeaseState.ACTIVE]
    assert len({lease.members[0].node_id for lease in live}) == 1


@settings(max_examples=4, deadline=None)
@given(
    price=st.integers(300_000, 4_000_000),
    shape=st.sampled_from([TWO, ELASTIC, Shape(members=4, resources={"GPU": 1}), Shape(resources={"GPU": 2})]),
    deaths=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_with_constant_prices_a_gang_moves_at_most_once_and_rests(price: int, shape: Shape, deaths: float) -> None:
    cluster = on_demand_in_need(shape, SOLID, SPOT.model_copy(update={"price_micro_usd_h": price}))
    moved: dict[str, int] = {}
    for deed in deeds(cluster, 100, dt_s=60.0):
        if isinstance(deed, Launch):
            moved[deed.node_type] = moved.get(deed.node_type, 0) + 1
    assert moved.get("gpu", 0) == 0
    assert moved.get("gpu.spot", 0) <= shape.members
    assert deeds(cluster, 40, dt_s=120.0) == []


@settings(max_examples=3, deadline=None)
@given(prices=st.lists(st.sampled_from([500_000, 1_000_000, 2_500_000, 3_500_000]), min_size=4, max_size=12))
def test_however_prices_swing_a_gang_spends_little_of_its_time_moving(prices: Sequence[int]) -> None:
    """A swing every ten minutes, between two spot pools and on demand."""
    pools = SPOT.model_copy(update={"zones": ("a", "b")})
    cluster = on_demand_in_need(TWO, SOLID, pools)
    ticks = stopped = 0
    for number, price in enumerate(prices):
        for zone in pools.zones:
            cluster.provider.set_price("gpu.spot", zone, price if (zone == "a") == (number % 2 == 0) else 1_000_000)
        for _ in range(20):
            cluster.tick(30.0)
            ticks, stopped = ticks + 1, stopped + (usable(cluster) < 2)
    assert stopped <= 0.1 * ticks


@pytest.mark.parametrize("age_s", [0.0, 300.0])
def test_a_gang_that_was_just_admitted_to_an_old_node_stays_a_while(age_s: float) -> None:
    cluster = on_demand_in_need(preemptible=False)
    (first,) = cluster.book.jobs
    cluster.provider.set_stock("gpu.spot", "local", 0)
    cluster.settle(100, dt_s=10.0)
    cluster.finish(first)
    cluster.submit(TWO, preemptible=True)
    cluster.tick(1.0)
    cluster.tick(1.0)
    cluster.provider.set_stock("gpu.spot", "local", None)
    assert deeds(cluster, 1, dt_s=age_s + 1.0) == []


def _plan(seen: object) -> tuple[Action, ...]:
    from raytide.control.reconcile.decide import decide

    return decide(seen).actions  # type: ignore[arg-type]


def _launches_and_drains(actions: Sequence[Action]) -> tuple[list[Launch], list[Drain]]:
    launches = [action for action in actions if isinstance(action, Launch)]
    return launches, [action for action in actions if isinstance(action, Drain)]


def _numbers(cluster: Cluster, node_type: str) -> list[int]:
    nodes = cluster.book.nodes.values()
    return [int(node.id.removeprefix("node-")) for node in nodes if node.type == node_type and node.ready_at_s]
