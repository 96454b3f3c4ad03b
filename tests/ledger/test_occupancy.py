from __future__ import annotations

from dataclasses import replace

from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import EntryKind, Share
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.ledger.occupancy import occupancies

TOTAL = {"CPU": 8.0, "GPU": 4.0}
SHAPE = Shape(members=2, resources={"CPU": 1.0, "GPU": 1.0})
JOB = Job(
    "job-1",
    JobSpec(kind=JobKind.TRAIN, name="j", team="blue", gang=GangSpec(shapes=(SHAPE,))),
    "ada",
    JobState.RUNNING,
    0.0,
)


def view(
    state: NodeState = NodeState.READY, available: dict[str, float] | None = None, *, ready: bool = True
) -> NodeView:
    node = Node(
        "node-1", "big", "z", CapacityType.SPOT, 1, state, 0.0, ready_at_s=1.0 if ready else None, ray_node_id="ray-1"
    )
    return NodeView(node, TOTAL, TOTAL if available is None else available, {})


def lease(*states: MemberState) -> Lease:
    return Lease(
        "lease-1", "job-1", SHAPE, LeaseState.ACTIVE, tuple(Member(i, s, "node-1") for i, s in enumerate(states))
    )


def of_node(
    view: NodeView, *leases: Lease, endpoints: tuple[EndpointView, ...] = ()
) -> dict[tuple[str, str, str], float]:
    snapshot = Snapshot(1.0, (), nodes=(view,), jobs=(JOB,), leases=leases, endpoints=endpoints)
    return {(str(s.kind), s.subject, s.team): s.weight for s in occupancies(snapshot)["node-1"]}


def test_a_free_node_is_idle() -> None:
    assert of_node(view()) == {("idle", "", ""): 1.0}


def test_a_job_holds_its_dominant_share_and_the_rest_is_idle() -> None:
    two = lease(MemberState.READY, MemberState.LEAVING)
    assert of_node(view(available={"CPU": 6.0, "GPU": 2.0}), two) == {
        ("job", "job-1", "blue"): 0.5,
        ("idle", "", ""): 0.5,
    }


def test_a_seat_counts_from_its_assignment_and_not_before() -> None:
    assert of_node(view(), lease(MemberState.ASSIGNED, MemberState.WAITING)) == {
        ("job", "job-1", "blue"): 0.25,
        ("idle", "", ""): 0.75,
    }


def test_a_node_that_starts_is_start_up_of_those_it_starts_for() -> None:
    starting = view(NodeState.LAUNCHING, ready=False)
    assert of_node(starting, lease(MemberState.ASSIGNED)) == {
        ("startup", "job-1", "blue"): 0.25,
        ("startup", "", ""): 0.75,
    }


def test_what_is_left_of_a_node_that_leaves_is_waste() -> None:
    for state in (NodeState.DRAINING, NodeState.TERMINATING):
        assert of_node(view(state), lease(MemberState.LEAVING)) == {
            ("job", "job-1", "blue"): 0.25,
            ("waste", "", ""): 0.75,
        }


def test_replicas_are_their_endpoints_and_foreign_use_is_unmanaged() -> None:
    spec = ServeSpec(name="tiny", model="/m", team="red", resources={"CPU": 2.0})
    load = EndpointLoad(1.0, 0.0, 2, ("ray-1", "ray-1", "elsewhere"))
    tiny = EndpointView(Endpoint(spec, "ada", EndpointState.RUNNING, 0.0, 3), load)
    silent = EndpointView(
        Endpoint(spec.model_copy(update={"name": "mute"}), "ada", EndpointState.RUNNING, 0.0, 1), None
    )
    assert of_node(view(available={"CPU": 2.0, "GPU": 4.0}), endpoints=(tiny, silent)) == {
        ("endpoint", "tiny", "red"): 0.5,
        ("unmanaged", "", "unmanaged"): 0.25,
        ("idle", "", ""): 0.25,
    }


def test_holders_of_different_resources_may_hold_more_than_the_whole_and_nothing_is_idle_then() -> None:
    spec = ServeSpec(name="tiny", model="/m", resources={"CPU": 7.0})
    tiny = EndpointView(Endpoint(spec, "ada", EndpointState.RUNNING, 0.0, 1), EndpointLoad(1.0, 0.0, 1, ("ray-1",)))
    held = of_node(view(available={"CPU": 0.0, "GPU": 3.0}), lease(MemberState.READY), endpoints=(tiny,))
    assert held == {("job", "job-1", "blue"): 0.25, ("endpoint", "tiny", "default"): 0.875}


def test_a_node_without_resources_is_idle() -> None:
    empty = NodeView(view().node, {}, {}, {})
    assert occupancies(Snapshot(1.0, (), nodes=(empty,)))["node-1"] == (Share(EntryKind.IDLE, "", "", 1.0),)


def test_objects_that_lie_on_a_node_are_nobodys_use_of_it() -> None:
    total = {"CPU": 8.0, "object_store_memory": 100.0}
    seen = replace(view(), total=total, available={"CPU": 8.0, "object_store_memory": 40.0})
    assert of_node(seen) == {("idle", "", ""): 1.0}
