"""Gangs with a deadline go where they should sit: new nodes first, then the old ones are left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.autoscaler.deadlines.deadline_world import SOLID, SPOT, Story

from raytide.autoscaler.planner import plan
from raytide.control.reconcile.decide import decide_constrained
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import MARKET_LABEL, CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Admit, Drain, Launch, Preempt, Wait
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Pool, Snapshot
from raytide.core.objects.team import Team, TeamSpec

NOW_S = 10_000.0
WIDE = SOLID.model_copy(update={"resources": {"GPU": 2.0}})


def view(
    number: int, node_type: NodeType, free: float, subject: str = "", state: NodeState = NodeState.READY
) -> NodeView:
    node = Node(
        f"node-{number}", node_type.name, "a", node_type.market, node_type.price_micro_usd_h, state, NOW_S - 400.0,
        ready_at_s=NOW_S - 300.0, ray_node_id=f"ray-{number}", subject=subject,
    )  # fmt: skip
    return NodeView(node, node_type.resources, {"GPU": free}, node_type.all_labels("a"))


def job(number: int, **more: object) -> Job:
    gang = GangSpec(shapes=(Shape(resources={"GPU": 1.0}),))
    spec = JobSpec(kind=JobKind.TRAIN, name="j", gang=gang).model_copy(update=more)
    return Job(f"job-{number}", spec, "ada", JobState.RUNNING, 0.0)


def lease(number: int, node: int) -> Lease:
    member = Member(0, MemberState.READY, f"node-{node}", f"ray-{node}")
    return Lease(f"lease-{number}", f"job-{number}", Shape(resources={"GPU": 1.0}), LeaseState.ACTIVE, (member,))


def stance(*markets: CapacityType) -> MarketConstraint:
    return MarketConstraint(markets, False, NOW_S + 9000.0, 3600.0, NOW_S + 5000.0, "moves: 1.0 h of work")


TO_SPOT, TO_SOLID = stance(CapacityType.SPOT), stance(CapacityType.ON_DEMAND, CapacityType.SPOT)


def deeds(stance: MarketConstraint, *views: NodeView, **more: object) -> list[tuple[object, ...]]:
    fields = {"jobs": (job(1),), "leases": (lease(1, 1),), "node_types": (SPOT, SOLID), **more}
    seen = Snapshot(NOW_S, nodes=views, stances={"job-1": stance}, next_node=9, **fields)  # type: ignore[arg-type]
    found: list[tuple[object, ...]] = []
    for action in plan(seen):
        if isinstance(action, Launch):
            found.append(("launch", action.node_type, action.subject))
        elif isinstance(action, Drain):
            found.append(("drain", action.kind, action.node_id))
    return found


@pytest.mark.parametrize(("old", "new", "stance"), [(SOLID, SPOT, TO_SPOT), (SPOT, SOLID, TO_SOLID)])
def test_the_new_node_is_bought_first_and_the_old_one_left_when_it_is_ready(
    old: NodeType, new: NodeType, stance: MarketConstraint
) -> None:
    here = view(1, old, 0.0)
    assert deeds(stance, here) == [("launch", new.name, "move node-1")]
    coming = view(2, new, 1.0, "move node-1", NodeState.LAUNCHING)
    assert deeds(stance, here, coming) == []
    assert deeds(stance, here, view(2, new, 1.0, "move node-1")) == [("drain", "notice", "node-1")]


def test_a_free_node_of_the_market_is_gone_to_at_once() -> None:
    assert deeds(TO_SPOT, view(1, SOLID, 0.0), view(2, SPOT, 1.0)) == [("drain", "notice", "node-1")]


def test_who_sits_where_he_should_stays_although_elsewhere_is_cheaper() -> None:
    assert deeds(TO_SOLID, view(1, SOLID, 0.0)) == []
    assert deeds(stance(), view(1, SOLID, 0.0)) == []


def test_who_asks_for_a_market_himself_is_not_moved_to_another() -> None:
    spot = Shape(resources={"GPU": 1.0}, labels={MARKET_LABEL: "spot"})
    here = replace(lease(1, 1), shape=spot)
    assert deeds(TO_SOLID, view(1, SPOT, 0.0), leases=(here,)) == []


@pytest.mark.parametrize(
    ("types", "preemptible", "goes"), [((SPOT, SOLID), True, 1), ((SPOT,), True, 0), ((SPOT, SOLID), False, 0)]
)
def test_who_holds_a_shape_of_spot_alone_starts_again_as_another_when_there_is_room_for_that(
    types: tuple[NodeType, ...], preemptible: bool, goes: int
) -> None:
    spot = Shape(resources={"GPU": 1.0}, labels={MARKET_LABEL: "spot"})
    mine = job(1, gang=GangSpec(shapes=(spot, Shape(members=2, resources={"GPU": 0.5}))), preemptible=preemptible)
    seen = Snapshot(
        NOW_S, types, (view(1, SPOT, 0.0),), (mine,), (replace(lease(1, 1), shape=spot),),
        stances={"job-1": TO_SOLID}, next_node=9,
    )  # fmt: skip
    found = [action for action in decide_constrained(seen).actions if isinstance(action, Preempt)]
    assert len(found) == goes
    assert all("moves: 1.0 h of work; it starts again as 2 x (0.5 GPU" in action.reason for action in found)
    assert not any(
        isinstance(a, Preempt) for a in decide_constrained(replace(seen, stances={"job-1": TO_SPOT})).actions
    )


@pytest.mark.parametrize(
    ("mine", "team"),
    [({"soft_budget_usd": 0.5}, TeamSpec()), ({}, TeamSpec(quota={"GPU": 1.0}, borrow={"GPU": 0.0}))],
)
def test_nobody_leaves_spot_for_a_shape_that_his_budget_or_quota_refuses(
    mine: dict[str, object], team: TeamSpec
) -> None:
    spot = Shape(resources={"GPU": 1.0}, labels={MARKET_LABEL: "spot"})
    gang = GangSpec(shapes=(spot, Shape(members=3, resources={"GPU": 0.5})))
    seen = Snapshot(
        NOW_S, (SPOT, SOLID), (view(1, SPOT, 0.0),), (job(1, gang=gang, team="a", **mine),),
        (replace(lease(1, 1), shape=spot),), stances={"job-1": TO_SOLID}, next_node=9, spent={"job-1": 999_000},
        teams=(Team("a", team),),
    )  # fmt: skip
    assert [action for action in decide_constrained(seen).actions if isinstance(action, Preempt)] == []
    rich = replace(seen, spent={}, teams=(Team("a", team.model_copy(update={"quota": {"GPU": 2.0}})),))
    assert [type(a) for a in decide_constrained(rich).actions if isinstance(a, Preempt)] == [Preempt]


def test_who_is_late_stays_where_he_is() -> None:
    late = replace(TO_SOLID, markets=None)
    assert deeds(late, view(1, SPOT, 0.0), view(2, SOLID, 1.0)) == []


def test_a_replacement_on_which_others_sit_is_bought_again() -> None:
    others = {"jobs": (job(1), job(2, kind=JobKind.GANG)), "leases": (lease(1, 1), lease(2, 2))}
    taken = view(2, SOLID, 0.0, "move node-1")
    assert deeds(TO_SOLID, view(1, SPOT, 0.0), taken, **others) == [("launch", "v100", "move node-1")]
    assert deeds(TO_SOLID, view(1, SPOT, 0.0), taken, view(3, SOLID, 1.0, "move node-1"), **others) == [
        ("drain", "notice", "node-1")
    ]


def test_nobody_is_admitted_to_a_replacement() -> None:
    queued = replace(job(2, kind=JobKind.GANG), state=JobState.QUEUED)
    views = view(1, SPOT, 0.0), view(2, SOLID, 1.0, "move node-1", NodeState.LAUNCHING)
    few = SOLID.model_copy(update={"max_nodes": 1}), SPOT.model_copy(update={"max_nodes": 1})
    seen = Snapshot(NOW_S, few, views, (job(1), queued), (lease(1, 1),), stances={"job-1": TO_SOLID}, next_node=9)
    assert [action.constraint for action in decide_constrained(seen).actions if isinstance(action, Wait)] == [
        "capacity"
    ]
    free = replace(seen, leases=(), jobs=(queued,), nodes=views[1:])
    assert any(isinstance(action, Admit) for action in decide_constrained(free).actions)


def test_a_gang_works_on_until_all_its_nodes_have_a_replacement_that_is_ready() -> None:
    members = tuple(Member(at, MemberState.READY, f"node-{at + 1}", f"ray-{at + 1}") for at in range(2))
    pair = replace(lease(1, 1), shape=Shape(resources={"GPU": 1.0}, members=2), members=members)
    here = view(1, SOLID, 0.0), view(2, SOLID, 0.0)
    one = view(3, SPOT, 1.0, "move node-1")
    assert deeds(TO_SPOT, *here, one, leases=(pair,)) == [("launch", "v100.spot", "move node-2")]
    resting = tuple(Pool(SPOT.name, zone, 3, NOW_S + 900.0, "none left") for zone in SPOT.zones)
    assert deeds(TO_SPOT, *here, one, leases=(pair,), pools=resting) == []
    both = [("drain", "notice", "node-1"), ("drain", "notice", "node-2")]
    assert deeds(TO_SPOT, *here, one, view(4, SPOT, 1.0, "move node-2"), leases=(pair,)) == both
    assert deeds(TO_SPOT, *here, one, view(4, SPOT, 1.0), leases=(pair,)) == both


def test_a_replacement_that_is_not_wanted_any_more_moves_nobody() -> None:
    moving = view(2, SPOT, 1.0, "move node-1")
    assert not any(deed[0] == "drain" and deed[2] == "node-1" for deed in deeds(TO_SOLID, view(1, SOLID, 0.0), moving))


def test_a_gang_that_may_not_be_preempted_and_a_node_that_others_use_are_left_alone() -> None:
    fixed = job(1, preemptible=False)
    assert deeds(TO_SPOT, view(1, SOLID, 0.0), jobs=(fixed,)) == []
    both = {"jobs": (job(1), job(2)), "leases": (lease(1, 1), lease(2, 1)), "node_types": (SPOT, WIDE)}
    assert not any("move" in str(deed) for deed in deeds(TO_SPOT, view(1, WIDE, 0.0), **both))


def test_on_demand_works_until_the_spot_that_came_back_is_ready() -> None:
    story = Story([[False] * 60 + [True]] * 2, work_s=3 * 3600.0, slack_s=5400.0).run()
    nodes = [node for node in story.cluster.book.nodes.values() if node.ready_at_s is not None]
    assert [node.market for node in nodes] == [CapacityType.ON_DEMAND, CapacityType.SPOT]
    assert nodes[1].subject == f"move {nodes[0].id}"
    assert nodes[0].ended_at_s is not None and nodes[1].ready_at_s is not None
    assert nodes[0].ended_at_s > nodes[1].ready_at_s
    assert story.late_s == 0.0 and story.cost < 0.6
