"""The planner's decisions, case by case, and their reasons."""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.endpoints.targets import set_targets
from raytide.autoscaler.planner import plan
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Action, Assign, Drain, Launch, Rejected, Requeue, Scale, Terminate, Unassign, Wait
from raytide.core.objects.snapshot import Demand, EndpointView, NodeView, Pool, Snapshot, Unmanaged

CPU4 = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=200_000, max_nodes=4)
SPOT = NodeType(
    name="gpu.spot", resources={"GPU": 8}, market=CapacityType.SPOT, price_micro_usd_h=8_000_000, zones=("a", "b")
)
SOLID = SPOT.model_copy(update={"name": "gpu", "market": CapacityType.ON_DEMAND, "price_micro_usd_h": 24_000_000})
FLEET = (CPU4, SPOT, SOLID)


def view(
    n: int,
    node_type: NodeType = CPU4,
    state: NodeState = NodeState.READY,
    *,
    idle_s: float = 0.0,
    is_draining: bool = False,
    deadline_s: float | None = None,
    subject: str = "",
    used: float = 0.0,
) -> NodeView:
    node = Node(
        id=f"node-{n}",
        type=node_type.name,
        zone=node_type.zones[0],
        market=node_type.market,
        price_micro_usd_h=node_type.price_micro_usd_h,
        state=state,
        requested_at_s=990.0,
        drain_deadline_s=deadline_s,
        ray_node_id=f"ray-{n}",
        subject=subject,
        reason="because",
    )
    free = {name: amount - used for name, amount in node_type.resources.items()}
    labels = node_type.all_labels(node.zone)
    return NodeView(node, node_type.resources, free, labels, idle_s=idle_s, is_draining=is_draining)


def gang(count: int, at_least: int | None = None, *, gpus: float = 8, members: tuple[Member, ...] = ()) -> Lease:
    shape = Shape(members=count, min_members=at_least, resources={"GPU": gpus})
    return Lease("lease-1", "job-7", shape, LeaseState.WAITING, members or tuple(Member(i) for i in range(count)))


def decided(**snapshot: object) -> list[Action]:
    defaults: dict[str, object] = {"at_s": 1000.0, "node_types": FLEET, "next_node": 50}
    published, scales = set_targets(Snapshot(**{**defaults, **snapshot}))  # type: ignore[arg-type]
    return [*scales, *plan(published)]


def endpoint(target: int, load: EndpointLoad | None, replicas: Replicas | None = None) -> EndpointView:
    spec = ServeSpec(name="m", model="/m", resources={"CPU": 4}, replicas=replicas or Replicas(max=4, target_ongoing=4))
    return EndpointView(Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=target), load)


def test_a_node_whose_type_was_removed_before_it_joined_ends_and_one_that_joined_stays() -> None:
    for state in (NodeState.REQUESTED, NodeState.LAUNCHING):
        (end,) = decided(node_types=(CPU4,), nodes=(view(1, SOLID, state),))
        reason = "its node type was removed from the configuration"
        assert end == Terminate("node-1", reason, -SOLID.price_micro_usd_h)
    assert decided(node_types=(CPU4,), nodes=(view(1, SOLID, used=8),)) == []


def test_a_gang_gets_nodes_and_seats_in_one_plan_with_the_price_in_the_reason() -> None:
    actions = decided(leases=(gang(2),))
    assert [type(action).__name__ for action in actions] == ["Launch", "Launch", "Assign", "Assign"]
    assert [a.node_id for a in actions if isinstance(a, Launch)] == ["node-50", "node-51"]
    assert [a.node_id for a in actions if isinstance(a, Assign)] == ["node-50", "node-51"]
    launch = actions[0]
    assert isinstance(launch, Launch)
    assert (launch.node_type, launch.zone, launch.subject) == ("gpu.spot", "a", "lease-1")
    assert launch.reason == "gang job-7 needs 2 x (8 GPU); gpu.spot in a (spot at $8.00/h) is the cheapest available"


def test_two_members_on_one_new_node_buy_it_once() -> None:
    actions = decided(leases=(gang(2, gpus=4),))
    assert sum(isinstance(action, Launch) for action in actions) == 1
    assert {a.node_id for a in actions if isinstance(a, Assign)} == {"node-50"}


def test_a_gang_that_cannot_have_all_its_minimum_gets_nothing_and_is_told_why() -> None:
    small = SPOT.model_copy(update={"max_nodes": 2})
    busy = tuple(view(n, small, used=8) for n in (1, 2))
    held = gang(2, members=tuple(Member(n - 1, MemberState.READY, f"node-{n}") for n in (1, 2)))
    waiting = Lease("lease-2", "job-8", Shape(resources={"GPU": 8}), LeaseState.WAITING, (Member(0),))
    (wait,) = decided(node_types=(small,), nodes=busy, leases=(held, waiting))
    assert isinstance(wait, Wait)
    assert (wait.subject, wait.constraint) == ("job-8", "capacity")
    assert "held by job-7" in wait.reason
    assert wait.remedy


def test_a_broken_transaction_gives_its_nodes_back() -> None:
    half = gang(2, members=(Member(0, MemberState.ASSIGNED, "node-1"), Member(1)))
    empty = tuple(Pool(name, zone, 1, 2000.0, "none") for name in ("gpu.spot", "gpu") for zone in ("a", "b"))
    wait, unassign = decided(leases=(half,), nodes=(view(1, SPOT),), pools=empty)
    assert isinstance(wait, Wait)
    assert wait.constraint == "stock"
    assert isinstance(unassign, Unassign)
    assert (unassign.member, unassign.node_id) == (0, "node-1")


def test_a_gang_that_waits_for_seats_that_give_way_keeps_its_turn() -> None:
    member = Member(0, MemberState.LEAVING, "node-1", gives_way=True, leaves_at_s=1030.0)
    leaves = replace(gang(1, members=(member,)), state=LeaseState.ACTIVE)
    shapes = (Shape(resources={"GPU": 8}), Shape(resources={"GPU": 4}))
    spec = JobSpec(kind=JobKind.TRAIN, name="x", gang=GangSpec(shapes=shapes))
    job = Job("job-8", spec, "ana", JobState.ADMITTED, 0.0)
    waits = Lease("lease-2", "job-8", shapes[0], LeaseState.WAITING, (Member(0),))
    empty = tuple(Pool(name, zone, 1, 2000.0, "none") for name in ("gpu.spot", "gpu") for zone in ("a", "b"))
    now = {"jobs": (job,), "nodes": (view(1, SPOT, used=8),), "pools": empty}
    assert [type(a) for a in decided(leases=(leaves, waits), **now)] == [Wait]
    stays = replace(leaves, members=(Member(0, MemberState.READY, "node-1"),))
    assert [type(a) for a in decided(leases=(stays, waits), **now)] == [Wait, Requeue]


def test_a_gang_that_runs_keeps_what_it_has_while_a_lost_member_waits() -> None:
    hurt = gang(2, members=(Member(0, MemberState.READY, "node-1"), Member(1)))
    empty = tuple(Pool(name, zone, 1, 2000.0, "none") for name in ("gpu.spot", "gpu") for zone in ("a", "b"))
    assert [type(a) for a in decided(leases=(hurt,), nodes=(view(1, SPOT, used=8),), pools=empty)] == [Wait]


def test_members_above_the_minimum_are_had_when_there_is_room_and_waited_for_when_not() -> None:
    small = SPOT.model_copy(update={"max_nodes": 3})
    actions = decided(node_types=(small,), leases=(gang(3, 1),))
    assert sum(isinstance(action, Assign) for action in actions) == 3
    actions = decided(node_types=(small.model_copy(update={"max_nodes": 2}),), leases=(gang(3, 1),))
    assert sum(isinstance(action, Assign) for action in actions) == 2
    assert isinstance(actions[-1], Wait)


def test_nodes_on_their_way_are_counted_so_that_nothing_is_bought_twice() -> None:
    coming = view(1, SPOT, NodeState.LAUNCHING)
    actions = decided(nodes=(coming,), leases=(gang(1),))
    assert [type(action) for action in actions] == [Assign]
    seated = gang(1, members=(Member(0, MemberState.ASSIGNED, "node-1"),))
    (wait,) = decided(nodes=(coming,), leases=(seated,))
    assert isinstance(wait, Wait)
    assert wait.constraint == "starting"
    assert "node-1" in wait.reason


def test_load_raises_the_target_and_the_node_for_the_new_replica_in_one_plan() -> None:
    load = EndpointLoad(at_s=999.0, ongoing=7.0, ready=1, replica_nodes=("ray-1",))
    actions = decided(nodes=(view(1, used=4),), endpoints=(endpoint(1, load),))
    scale, launch, wait = actions
    assert isinstance(scale, Scale)
    assert scale.replicas == 2
    assert "7 requests in flight" in scale.reason
    assert isinstance(launch, Launch)
    assert (launch.node_type, launch.subject) == ("cpu4", "m")
    assert isinstance(wait, Wait)
    assert wait.constraint == "starting"
    launching = (view(1, used=4), view(50, state=NodeState.LAUNCHING))
    again = decided(nodes=launching, endpoints=(endpoint(2, load),), next_node=51)
    assert [type(action) for action in again] == [Wait]


def test_a_replica_goes_only_after_its_delay_and_never_on_stale_word() -> None:
    spoke = tuple(ReplicaLoad(name, at_s=999.0) for name in "ab")
    quiet = EndpointLoad(at_s=999.0, ongoing=0.0, ready=2, replica_nodes=("ray-1", "ray-2"), replicas=spoke)
    nodes = (view(1, used=4), view(2, used=4))
    low = endpoint(2, quiet)
    fresh = EndpointView(_low_since(low.endpoint, 980.0), quiet)
    assert decided(nodes=nodes, endpoints=(fresh,)) == []
    old = EndpointView(_low_since(low.endpoint, 960.0), quiet)
    (scale,) = decided(nodes=nodes, endpoints=(old,))
    assert isinstance(scale, Scale)
    assert scale.replicas == 1
    stale = EndpointView(old.endpoint, EndpointLoad(980.0, 0.0, 2, quiet.replica_nodes))
    (wait,) = decided(nodes=nodes, endpoints=(stale,))
    assert isinstance(wait, Wait)
    assert wait.constraint == "signal"
    assert "at 00:16:20 UTC" in wait.reason


def test_work_without_a_lease_buys_up_to_its_cap_and_no_gpu() -> None:
    actions = decided(demand=(Demand({"CPU": 4.0}, count=3),))
    assert [type(action) for action in actions] == [Launch, Wait]
    assert isinstance(actions[1], Wait)
    assert actions[1].constraint == "cap"
    assert "1 nodes without a GPU" in actions[1].reason
    bought = view(1, subject="unmanaged", used=4)
    assert [type(a) for a in decided(nodes=(bought,), demand=(Demand({"CPU": 4.0}),))] == [Wait]
    assert [type(a) for a in decided(demand=(Demand({"GPU": 1.0}),))] == [Wait]
    (launch,) = decided(demand=(Demand({"GPU": 1.0}),), unmanaged=Unmanaged(1, gpu=True))
    assert isinstance(launch, Launch)
    assert launch.subject == "unmanaged"


def test_work_that_fits_on_what_is_there_or_coming_buys_nothing() -> None:
    assert decided(nodes=(view(1),), demand=(Demand({"CPU": 1.0}, count=4),)) == []
    assert decided(nodes=(view(1, state=NodeState.LAUNCHING),), demand=(Demand({"CPU": 1.0}),)) == []


def test_min_nodes_are_bought_and_never_drained() -> None:
    floor = CPU4.model_copy(update={"min_nodes": 2})
    (launch,) = decided(node_types=(floor,), nodes=(view(1, idle_s=500),))
    assert isinstance(launch, Launch)
    assert launch.subject == "minimum"
    (drain,) = decided(node_types=(floor,), nodes=tuple(view(n, idle_s=500) for n in (9, 10, 11)))
    assert isinstance(drain, Drain)
    assert (drain.node_id, drain.kind) == ("node-11", "idle")


def test_an_idle_node_stays_while_somebody_was_promised_room_on_it() -> None:
    idle = view(1, idle_s=500)
    assert [type(action) for action in decided(nodes=(idle,))] == [Drain]
    member = Member(0, MemberState.ASSIGNED, "node-1")
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 1}), LeaseState.WAITING, (member,))
    assert decided(nodes=(idle,), leases=(lease,)) == []
    assert decided(nodes=(idle,), demand=(Demand({"CPU": 1.0}),)) == []
    silent = EndpointLoad(at_s=1.0, ongoing=0.0, ready=1, replica_nodes=("ray-1",))
    assert [type(a) for a in decided(nodes=(idle,), endpoints=(endpoint(1, silent),))] == [Wait]


def test_drains_end_when_empty_or_at_the_deadline_and_a_notice_is_told_until_ray_has_heard_it() -> None:
    gone = NodeState.DRAINING
    assert decided(nodes=(view(1, state=gone, is_draining=True, used=1),)) == []
    assert [type(a) for a in decided(nodes=(view(1, state=gone, is_draining=True),))] == [Terminate]
    assert [type(a) for a in decided(nodes=(view(1, state=gone, deadline_s=1030, used=1),))] == [Drain]
    assert decided(nodes=(view(1, state=gone, deadline_s=1030, is_draining=True, used=1),)) == []
    empty = decided(nodes=(view(1, state=gone, deadline_s=1030, is_draining=True),))
    assert [type(a) for a in empty] == [Terminate], "nothing is left there to wait for"
    assert [type(a) for a in decided(nodes=(view(1, state=gone, deadline_s=999, used=1),))] == [Terminate]


def test_nobody_is_seated_on_a_node_that_the_same_plan_gives_up() -> None:
    actions = decided(nodes=(view(1, SPOT, NodeState.LAUNCHING),), leases=(gang(1),), at_s=1591.0)
    assert [a.node_id for a in actions if isinstance(a, Assign)] == ["node-50"]


def test_a_launch_that_takes_too_long_is_given_up() -> None:
    (terminate,) = decided(nodes=(view(1, state=NodeState.LAUNCHING),), at_s=1591.0)
    assert isinstance(terminate, Terminate)
    assert "within 600 s" in terminate.reason


def test_while_ray_does_not_answer_only_deadlines_are_kept() -> None:
    late = view(1, state=NodeState.DRAINING, deadline_s=999)
    nodes = (late, view(2, idle_s=500), view(3, state=NodeState.LAUNCHING))
    terminate, wait = decided(nodes=nodes, leases=(gang(1),), ray_answers=False)
    assert isinstance(terminate, Terminate)
    assert terminate.node_id == "node-1"
    assert isinstance(wait, Wait)
    assert wait.constraint == "signal"


def _low_since(endpoint: Endpoint, low_since_s: float) -> Endpoint:
    return replace(endpoint, low_since_s=low_since_s)


def test_a_launch_tells_what_it_costs_and_what_else_there_was() -> None:
    tired = (Pool("gpu.spot", "a", 1, 2000.0, "none left"),)
    launch, _ = decided(leases=(gang(1),), pools=tired)
    assert isinstance(launch, Launch)
    assert (launch.zone, launch.cost_micro_usd_h) == ("b", 8_000_000)
    refused, dearer, *_ = launch.rejected
    assert refused == Rejected("gpu.spot in a", "backs off until 00:33:20 UTC: none left")
    assert dearer == Rejected("gpu in a", "costs $16.00/h more for the same members", 16_000_000)


def test_an_idle_node_s_drain_tells_what_it_saves() -> None:
    (drain,) = decided(nodes=(view(1, idle_s=500),))
    assert isinstance(drain, Drain)
    assert drain.cost_micro_usd_h == -200_000
    assert drain.rejected[0].extra_micro_usd_h == 200_000


def test_warm_nodes_are_bought_ahead_of_need_kept_and_replaced_when_they_are_used() -> None:
    warm = CPU4.model_copy(update={"warm_nodes": 1})
    (launch,) = decided(node_types=(warm,))
    assert isinstance(launch, Launch)
    assert (launch.subject, "warm_nodes of cpu4 is 1, 0 are free" in launch.reason) == ("warm", True)
    assert decided(node_types=(warm,), nodes=(view(1, warm, idle_s=500),)) == []
    two_idle = decided(node_types=(warm,), nodes=(view(1, warm, idle_s=500), view(2, warm, idle_s=500)))
    assert [a.node_id for a in two_idle if isinstance(a, Drain)] == ["node-2"]
    used = decided(node_types=(warm,), nodes=(view(1, warm, used=1),))
    assert [type(action) for action in used] == [Launch]


def test_a_warm_node_that_has_less_than_its_type_says_is_free_all_the_same() -> None:
    warm = CPU4.model_copy(update={"warm_nodes": 1, "resources": {"CPU": 4, "memory": 100}})
    joined = replace(view(1, warm, idle_s=500), total={"CPU": 4, "memory": 98}, available={"CPU": 4, "memory": 98})
    assert decided(node_types=(warm,), nodes=(joined,)) == []


def test_a_node_that_will_be_taken_back_is_replaced_while_its_member_still_works() -> None:
    leaving = Member(0, MemberState.LEAVING, "node-1", leaves_at_s=1120.0)
    lease = gang(1, members=(leaving,))
    going = view(1, SPOT, NodeState.DRAINING, deadline_s=1120.0, is_draining=True, used=8)
    (launch,) = decided(nodes=(going,), leases=(lease,))
    assert isinstance(launch, Launch)
    assert (launch.subject, launch.node_type) == ("lease-1", "gpu.spot")
    assert "gang job-7 loses node-1 at 00:18:40 UTC" in launch.reason
    coming = view(50, SPOT, NodeState.LAUNCHING, subject="lease-1")
    assert decided(nodes=(going, coming), leases=(lease,)) == [], "it is bought once, and kept"
    idle = view(50, SPOT, idle_s=500)
    assert decided(nodes=(going, idle), leases=(lease,)) == []


def test_a_member_that_comes_back_sits_where_the_others_of_its_rack_are() -> None:
    shape = Shape(members=2, resources={"GPU": 8}, together="raytide.io/rack")
    members = (Member(0, MemberState.READY, "node-1"), Member(1))
    lease = Lease("lease-1", "job-7", shape, LeaseState.ACTIVE, members)
    racks = {1: "r1", 2: "r2", 3: "r1"}
    nodes = [view(n, SOLID, used=8 * (n == 1)) for n in racks]
    labelled = tuple(
        replace(v, labels={**v.labels, "raytide.io/rack": rack}) for v, rack in zip(nodes, racks.values(), strict=True)
    )
    (assign,) = [a for a in decided(nodes=labelled, leases=(lease,)) if isinstance(a, Assign)]
    assert assign.node_id == "node-3"
