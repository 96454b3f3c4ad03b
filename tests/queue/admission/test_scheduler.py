from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.queue.cluster import told
from tests.queue.lifecycle.test_pending_reason import why

from raytide.control.reconcile.decide import decide
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Admit, Launch, Wait
from raytide.core.objects.snapshot import NodeView, Pool, Snapshot
from raytide.core.objects.team import Team, TeamSpec
from raytide.queue.admission.scheduler import schedule
from raytide.scheduling.market_constraint import without_market_constraint

SMALL = NodeType(name="small", resources={"CPU": 2.0}, price_micro_usd_h=100, max_nodes=2)
BIG = NodeType(
    name="big", resources={"CPU": 8.0, "GPU": 4.0}, price_micro_usd_h=900, max_nodes=1, market=CapacityType.SPOT
)


def job(number: int, *shapes: Shape, state: JobState = JobState.QUEUED, **changes: object) -> Job:
    spec = JobSpec(kind=JobKind.TRAIN, name="j", gang=GangSpec(shapes=shapes or (cpus(1),), form_timeout_s=7.0))
    return replace(Job(f"job-{number}", spec, "ada", state, float(number)), **changes)  # type: ignore[arg-type]


def fixed(job: Job) -> Job:
    """It cannot be preempted."""
    return replace(job, spec=job.spec.model_copy(update={"preemptible": False}))


def cpus(amount: float, members: int = 1, at_least: int | None = None) -> Shape:
    return Shape(members=members, min_members=at_least, resources={"CPU": amount})


def snapshot(*jobs: Job, types: tuple[NodeType, ...] = (SMALL, BIG), **more: object) -> Snapshot:
    return replace(Snapshot(50.0, types, jobs=jobs, next_lease=4), **more)  # type: ignore[arg-type]


def view(
    number: int, node_type: NodeType = SMALL, state: NodeState = NodeState.READY, free: float | None = None
) -> NodeView:
    node = Node(
        f"node-{number}", node_type.name, "local", node_type.market, 1, state, 40.0, ray_node_id=f"ray-{number}"
    )
    available = {**node_type.resources, **({} if free is None else {"CPU": free})}
    return NodeView(node, node_type.resources, available, node_type.all_labels("local"))


def brief(s: Snapshot) -> list[tuple[str, str]]:
    return [
        (a.job_id, a.lease.id) if isinstance(a, Admit) else (a.subject, a.constraint)
        for a in schedule(s)
        if isinstance(a, Admit | Wait)
    ]


def test_those_that_fit_are_admitted_in_order_each_with_its_own_lease() -> None:
    s = snapshot(job(1, cpus(2, members=2)), job(2, Shape(resources={"GPU": 4.0})))
    first, second = schedule(s)
    assert isinstance(first, Admit)
    assert first.lease == Lease(
        "lease-4",
        "job-1",
        cpus(2, members=2),
        LeaseState.WAITING,
        (Member(0), Member(1)),
        0,
        7.0,
        50.0,
        None,
        first.lease.reason,
    )
    assert "2 new of small" in first.reason
    assert isinstance(second, Admit)
    assert second.lease.id == "lease-5"


def test_nothing_that_cannot_be_stopped_takes_the_room_of_the_head() -> None:
    s = snapshot(job(1, cpus(8)), job(2, cpus(8)), fixed(job(3, cpus(8))))
    assert brief(s) == [("job-1", "lease-4"), ("job-2", "capacity"), ("job-3", "capacity")]
    room = snapshot(fixed(job(1, cpus(1))), job(2, cpus(8)), fixed(job(3, cpus(2, 3))), types=(BIG,))
    assert brief(room) == [("job-1", "lease-4"), ("job-2", "capacity"), ("job-3", "behind")]


def test_what_can_be_stopped_again_fills_the_hole_before_the_head() -> None:
    s = snapshot(job(1, cpus(8)), job(2, cpus(8)), job(3, cpus(1)))
    assert brief(s) == [("job-1", "lease-4"), ("job-2", "capacity"), ("job-3", "lease-5")]


def test_what_fits_beside_the_head_takes_nothing_from_it() -> None:
    s = snapshot(fixed(job(1, cpus(4))), job(2, cpus(6)), fixed(job(3, cpus(2))), types=(BIG,))
    assert brief(s) == [("job-1", "lease-4"), ("job-2", "capacity"), ("job-3", "lease-5")]


def test_an_elastic_gang_that_cannot_be_stopped_takes_what_the_head_leaves() -> None:
    s = snapshot(fixed(job(1, cpus(4))), job(2, cpus(6)), fixed(job(3, cpus(1, members=4, at_least=1))), types=(BIG,))
    assert brief(s) == [("job-1", "lease-4"), ("job-2", "capacity"), ("job-3", "lease-5")]
    last = schedule(s)[-1]
    assert isinstance(last, Admit)
    assert [member.state for member in last.lease.members] == ["waiting"] * 2 + ["parked"] * 2


def test_an_impossible_job_blocks_no_other() -> None:
    assert brief(snapshot(job(1, Shape(resources={"GPU": 8.0})), job(2))) == [
        ("job-1", "impossible"),
        ("job-2", "lease-4"),
    ]


def test_the_first_shape_that_fits_is_taken() -> None:
    shapes = (Shape(resources={"GPU": 8.0}), cpus(8, members=2), cpus(2, members=2), cpus(1))
    (action,) = schedule(snapshot(job(1, *shapes)))
    assert isinstance(action, Admit)
    assert action.lease.shape == shapes[2]
    (waits,) = schedule(snapshot(job(1, *shapes[:2], cpus(8, members=1)), types=(SMALL,)))
    assert isinstance(waits, Wait)
    assert waits.constraint == "impossible"


def test_a_gang_starts_with_fewer_when_it_may() -> None:
    (action,) = schedule(snapshot(job(1, cpus(2, members=9, at_least=2)), types=(SMALL,)))
    assert isinstance(action, Admit)
    assert (len(action.lease.members), "2 of them now" in action.reason) == (9, True)
    assert [member.state for member in action.lease.members] == ["waiting"] * 2 + ["parked"] * 7


def test_room_for_waiting_members_of_an_admitted_lease_is_reserved() -> None:
    lease = Lease("lease-1", "job-1", cpus(2, members=2), LeaseState.WAITING, (Member(0), Member(1)))
    running = job(1, cpus(2, members=2), state=JobState.ADMITTED)
    s = snapshot(running, job(2, cpus(2)), types=(SMALL,), leases=(lease,))
    assert brief(s) == [("job-2", "capacity")]


def test_jobs_that_shall_stop_are_not_admitted() -> None:
    assert schedule(snapshot(job(1, stop_requested=True))) == ()


def test_a_pool_without_stock_is_named() -> None:
    s = snapshot(job(1, cpus(2)), types=(SMALL,), pools=(Pool("small", "local", 3, 80.0),))
    (action,) = schedule(s)
    assert isinstance(action, Wait)
    assert action.constraint == "stock"
    assert "small in local" in action.reason


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 3)), max_size=8))
def test_admission_never_promises_more_than_there_is(wishes: list[tuple[int, int, int]]) -> None:
    jobs = tuple(
        job(i + 1, cpus(cpu, members=n, at_least=max(1, n - slack))) for i, (n, cpu, slack) in enumerate(wishes)
    )
    actions = schedule(snapshot(*jobs))
    assert [a.job_id if isinstance(a, Admit) else a.subject for a in actions if isinstance(a, Admit | Wait)] == [
        j.id for j in jobs
    ]
    admitted = [a.lease for a in actions if isinstance(a, Admit)]
    # One big node and two small ones are all that can be bought.
    assert sum(lease.shape.at_least * lease.shape.resources["CPU"] for lease in admitted) <= 12
    assert schedule(snapshot(*jobs)) == actions


def test_why_says_what_would_help() -> None:
    s = snapshot(job(1, cpus(8)), job(2, cpus(8)), job(3), job(4, state=JobState.SUCCEEDED, reason="done"))
    head = why("job-2", s)
    assert head.constraint == "capacity"
    assert "max_nodes" in head.remedy
    assert [told(f"job-{number}", s) for number in (1, 3, 4)] == [None] * 3


def test_why_says_which_node_an_admitted_job_waits_for() -> None:
    admitted = job(1, cpus(2, members=2), state=JobState.ADMITTED)
    members = (
        Member(0, MemberState.ASSIGNED, "node-1"),
        Member(1, MemberState.FORMING, "node-2", "ray-2"),
        Member(2),
    )
    lease = Lease("lease-1", "job-1", cpus(2, members=3, at_least=2), LeaseState.FORMING, members)
    s = snapshot(admitted, leases=(lease,), nodes=(view(1, state=NodeState.LAUNCHING), view(2)))
    found = why("job-1", s)
    assert found.constraint == "starting"
    assert found.reason == (
        "lease-1 has 0 of 2 members that it needs; node-1 (small) is starting since 10 s; "
        "a placement group on node-2 (small) is being made; a node is being chosen."
    )


def test_why_says_so_when_an_admitted_job_lost_its_room() -> None:
    admitted = job(1, cpus(2), state=JobState.ADMITTED)
    lease = Lease("lease-1", "job-1", cpus(2), LeaseState.WAITING, (Member(0),))
    s = snapshot(admitted, types=(SMALL,), leases=(lease,), nodes=(view(1, free=0.0), view(2, free=0.0)))
    assert why("job-1", s).constraint == "capacity"


def test_no_job_is_admitted_while_ray_does_not_answer() -> None:
    silent = snapshot(job(1), job(2), ray_answers=False)
    assert brief(silent) == [("job-1", "signal"), ("job-2", "signal")]
    assert "Ray does not answer" in why("job-1", silent).reason
    assert brief(replace(silent, ray_answers=True))[0] == ("job-1", "lease-4")


L4 = NodeType(name="l4", resources={"GPU": 4.0}, price_micro_usd_h=2_000, labels={"ray.io/accelerator-type": "L4"})
H100 = NodeType(
    name="h100", resources={"GPU": 8.0}, price_micro_usd_h=24_000, labels={"ray.io/accelerator-type": "H100"}
)


FAST = {"job-1": {"l4": 1.0, "h100": 7.0}}


def on(accelerator: str, gpus: float) -> Shape:
    return Shape(resources={"GPU": gpus}, labels={"ray.io/accelerator-type": accelerator})


def admitted(s: Snapshot) -> list[Shape]:
    return [action.lease.shape for action in schedule(s) if isinstance(action, Admit)]


def test_of_its_shapes_a_job_gets_the_one_in_which_its_work_costs_least_and_else_the_one_that_it_prefers() -> None:
    fast, slow = on("H100", 8), on("L4", 4)
    asks = snapshot(job(1, slow, fast), types=(L4, H100))
    assert admitted(asks) == [slow]
    for pace, shape in ((5.0, slow), (7.0, fast)):  # an H100 costs six times as much as an L4
        assert admitted(replace(asks, paces={"job-1": {"l4": 1.0, "h100": pace}})) == [shape]
    full = H100.model_copy(update={"max_nodes": 0})
    none_left = replace(asks, node_types=(L4, full), paces=FAST)
    assert admitted(none_left) == [slow]


def test_a_job_that_names_no_accelerator_gets_one_whose_quota_is_left() -> None:
    """All of the cheapest one is another team's, which lends nothing."""
    others = TeamSpec.parse({"quota": {"L4": 4000}, "lend": {"L4": 0}}, where="team")
    teams = (Team("default", TeamSpec()), Team("others", others))
    free, spot = Shape(resources={"GPU": 4}), {"ray.io/market-type": "spot"}
    solid = free.model_copy(update={"labels": {"ray.io/market-type": "on-demand"}})
    for shape in (free, solid):
        s = snapshot(job(1, shape), types=(L4, H100), teams=teams)
        (lease_shape,) = admitted(s)
        assert lease_shape.labels == {**shape.labels, "ray.io/accelerator-type": "H100"}
        assert [a.node_type for a in decide(s).actions if isinstance(a, Launch)] == ["h100"]
        late = without_market_constraint(
            lease_shape.model_copy(update={"labels": {**lease_shape.labels, **spot}}), [shape]
        )
        assert late == lease_shape
    assert why("job-1", snapshot(job(1, on("L4", 4)), types=(L4, H100), teams=teams)).constraint == "quota"


def test_shapes_in_which_work_costs_the_same_are_taken_as_the_job_prefers_them() -> None:
    half, whole = Shape(resources={"GPU": 4}), Shape(members=2, resources={"GPU": 4})
    for shapes in ((half, whole), (whole, half)):
        assert admitted(replace(snapshot(job(1, *shapes), types=(L4, H100)), paces=FAST)) == [shapes[0]]


def test_a_gang_is_bought_where_its_work_costs_least() -> None:
    free = Shape(members=2, resources={"GPU": 4})
    s = snapshot(job(1, free), types=(L4, H100))
    bought = [
        [a.node_type for a in decide(one).actions if isinstance(a, Launch)] for one in (s, replace(s, paces=FAST))
    ]
    assert bought == [["l4", "l4"], ["h100"]]
