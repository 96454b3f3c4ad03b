"""Looking ahead from a live cluster: the production decision goes on from its Snapshot, nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.test_controller import BOOT_S, Loop

from raytide.control.reconcile.decide import decide
from raytide.control.views import from_json, to_json
from raytide.core.errors import UsageError
from raytide.core.io.atomic_file import read_json
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import Node, NodeState, NodeType, Signal
from raytide.core.objects.plan import Launch, Shrink, Terminate
from raytide.core.objects.snapshot import Demand, EndpointView, NodeView, Quote, Snapshot, Unmanaged
from raytide.simulate.live.replay import Outlook, look_ahead, usual_launch_s
from raytide.simulate.live.world import LiveWorld

NOW_S = 50_000.0
GPU = NodeType(name="gpu1", resources={"CPU": 4, "GPU": 1}, price_micro_usd_h=3_000_000, max_nodes=2, idle_timeout_s=60)
CPU = NodeType(name="cpu4", resources={"CPU": 4}, price_micro_usd_h=200_000, max_nodes=4, idle_timeout_s=60)


def job(number: int, kind: JobKind = JobKind.GANG, members: int = 1, **fields: object) -> Job:
    gang = GangSpec(shapes=(Shape(members=members, resources={"GPU": 1}),))
    spec = JobSpec(kind=kind, name=f"train-{number}", gang=gang, config={"out": "somewhere"})
    return replace(Job(f"job-{number}", spec, "ana", JobState.QUEUED, NOW_S - 100), **fields)  # type: ignore[arg-type]


def ready(number: int, node_type: NodeType = GPU, taken: dict[str, float] | None = None, **fields: object) -> NodeView:
    node = Node(
        id=f"node-{number}",
        type=node_type.name,
        zone="local",
        market=node_type.market,
        price_micro_usd_h=node_type.price_micro_usd_h,
        state=NodeState.READY,
        requested_at_s=NOW_S - 540,
        started_at_s=NOW_S - 530,
        ready_at_s=NOW_S - 500,
        ray_node_id=f"hex{number}",
    )
    available = {name: amount - (taken or {}).get(name, 0.0) for name, amount in node_type.resources.items()}
    return NodeView(node, node_type.resources, available, node_type.all_labels("local"), **fields)  # type: ignore[arg-type]


def running(number: int, node: NodeView) -> tuple[Job, Lease]:
    """A job that has run for an hour with its one member on this node."""
    holder = job(number, state=JobState.RUNNING, admitted_at_s=NOW_S - 3600, started_at_s=NOW_S - 3600)
    member = Member(0, MemberState.READY, node.node.id, node.node.ray_node_id, placement_group_id="ab12")
    shape = holder.spec.gang.shapes[0]
    return holder, Lease(f"lease-{number}", holder.id, shape, LeaseState.ACTIVE, (member,), created_at_s=NOW_S - 3600)


def cluster(**fields: object) -> Snapshot:
    return Snapshot(at_s=NOW_S, node_types=(GPU, CPU), next_node=8, next_lease=8, **fields)  # type: ignore[arg-type]


def launches(outlook: Outlook) -> list[str]:
    return [a.node_type for plan in outlook.plans for a in plan.actions if isinstance(a, Launch)]


def test_the_first_decision_is_the_one_of_the_live_controller() -> None:
    seen = cluster(jobs=(job(1), job(2, members=5)))
    assert look_ahead(seen).plans[0] == decide(seen)


def test_a_waiting_job_starts_when_its_node_has_joined() -> None:
    outlook = look_ahead(cluster(jobs=(job(1),)), launch_s=90)
    (start,) = outlook.jobs
    assert launches(outlook) == ["gpu1"]
    assert start.after_s is not None and 90 <= start.after_s <= 150
    assert (outlook.price_now_micro_usd_h, outlook.price_most_micro_usd_h) == (0, 3_000_000)
    assert outlook.cost_micro_usd == pytest.approx(3_000_000, rel=0.05)


def test_who_waits_behind_a_full_cluster_starts_when_jobs_end() -> None:
    small = GPU.model_copy(update={"max_nodes": 1})
    node = ready(1, taken={"GPU": 1})
    holder, lease = running(1, node)
    seen = replace(cluster(nodes=(node,), jobs=(holder, job(2)), leases=(lease,)), node_types=(small,))
    (start,) = look_ahead(seen).jobs
    assert start.after_s is None and "held by job-1" in start.waits_for
    (start,) = look_ahead(seen, job_hours=1.5).jobs
    assert start.after_s == pytest.approx(1800, abs=60)


def test_a_preempted_job_starts_when_it_gets_its_node_back() -> None:
    """It had started once, which is no start of the forecast."""
    small = GPU.model_copy(update={"max_nodes": 1})
    node = ready(1, taken={"GPU": 1})
    holder, lease = running(1, node)
    before = job(2, JobKind.TRAIN, admitted_at_s=NOW_S - 9000, started_at_s=NOW_S - 9000, preemptions=1)
    seen = replace(cluster(nodes=(node,), jobs=(holder, before), leases=(lease,)), node_types=(small,))
    (start,) = look_ahead(seen, hours=0.2).jobs
    assert (start.job_id, start.after_s) == ("job-2", None)
    outlook = look_ahead(seen, hours=3.0, job_hours=1.5)
    (start,) = outlook.jobs
    assert start.after_s == pytest.approx(1800, abs=60)


def test_what_is_idle_goes_and_what_is_taken_by_strangers_stays() -> None:
    outlook = look_ahead(cluster(nodes=(ready(1, idle_s=30.0), ready(2, CPU, taken={"CPU": 1}))))
    ended = [a.node_id for plan in outlook.plans for a in plan.actions if isinstance(a, Terminate)]
    assert "node-2" not in str(ended)
    assert (outlook.price_now_micro_usd_h, outlook.price_end_micro_usd_h) == (3_200_000, 200_000)


def test_published_replicas_get_their_nodes_and_stay() -> None:
    spec = ServeSpec(name="chat", model="/m", replicas=Replicas(min=1, max=2), resources={"GPU": 1})
    endpoint = Endpoint(spec, "ana", EndpointState.RUNNING, NOW_S - 900, target_replicas=1)
    load = EndpointLoad(NOW_S, 12.0, 1, ("hex1",), (ReplicaLoad("a", NOW_S, running=12.0, kv_use=0.5),))
    seen = cluster(nodes=(ready(1, taken={"GPU": 1}),), endpoints=(EndpointView(endpoint, load),))
    outlook = look_ahead(seen, hours=0.5)
    assert launches(outlook) == ["gpu1"]
    assert outlook.price_end_micro_usd_h == 6_000_000


def wide(most_nodes: int, target: int) -> Snapshot:
    """An endpoint whose replicas have two members, and no node yet."""
    spec = ServeSpec(name="wide", model="/m", replicas=Replicas(min=target, max=4), resources={"GPU": 1}, members=2)
    endpoint = Endpoint(spec, "ana", EndpointState.RUNNING, NOW_S - 900, target_replicas=target)
    seen = cluster(endpoints=(EndpointView(endpoint, EndpointLoad(NOW_S, 0.0, 0)),))
    return replace(seen, node_types=(GPU.model_copy(update={"max_nodes": most_nodes}), CPU))


def test_replicas_of_several_members_get_all_their_nodes_or_none() -> None:
    assert launches(look_ahead(wide(most_nodes=1, target=1), hours=0.5)) == []
    assert launches(look_ahead(wide(most_nodes=3, target=2), hours=0.5)) == ["gpu1"] * 2


def test_replicas_that_the_load_does_not_need_go_and_their_nodes_with_them() -> None:
    spec = ServeSpec(name="chat", model="/m", replicas=Replicas(min=1, max=2), resources={"GPU": 1})
    endpoint = Endpoint(spec, "ana", EndpointState.RUNNING, NOW_S - 900, target_replicas=2)
    said = (ReplicaLoad("a", NOW_S, running=1.0), ReplicaLoad("b", NOW_S))
    load = EndpointLoad(NOW_S, 1.0, 2, ("hex1", "hex2"), said)
    views = (ready(1, taken={"GPU": 1}), ready(2, taken={"GPU": 1}))
    seen = cluster(nodes=views, endpoints=(EndpointView(endpoint, load),))
    assert look_ahead(seen, hours=0.5).price_end_micro_usd_h == 3_000_000
    silent = replace(load, replicas=(replace(said[0], at_s=NOW_S - 60),))
    quiet = cluster(nodes=views, endpoints=(EndpointView(endpoint, silent),))
    assert look_ahead(quiet, hours=0.5).price_end_micro_usd_h == 6_000_000


def test_a_node_costs_what_its_zone_asks_now() -> None:
    cheap = GPU.model_copy(update={"zone_prices_micro_usd_h": {"local": 1_000_000}})
    seen = replace(cluster(jobs=(job(1),)), node_types=(cheap,))
    assert look_ahead(seen, hours=0.1).price_end_micro_usd_h == 1_000_000
    quoted = replace(seen, quotes=(Quote("gpu1", "local", 700_000),))
    assert look_ahead(quoted, hours=0.1).price_end_micro_usd_h == 700_000


def test_what_works_beside_ray_keeps_its_node() -> None:
    metered = GPU.model_copy(update={"busy_above": {"gpu": 0.05}})
    for value, price in ((0.9, 3_000_000), (0.0, 0)):
        view = ready(1, metered, idle_s=5.0, use={"gpu": Signal(value, NOW_S)}, busy="for whatever reason")
        outlook = look_ahead(replace(cluster(nodes=(view,)), node_types=(metered,)), hours=0.2)
        assert outlook.price_end_micro_usd_h == price


def test_work_without_a_lease_gets_what_it_may_and_then_there_is_nothing_more_to_do() -> None:
    outlook = look_ahead(cluster(demand=(Demand({"CPU": 2}, count=2),), unmanaged=Unmanaged(max_nodes=1)))
    assert launches(outlook) == ["cpu4"]
    assert outlook.plans[-1].at_s < NOW_S + 600


def test_of_nodes_whose_type_was_removed_from_the_configuration_the_idle_go() -> None:
    old = NodeType(name="gpu0", resources={"CPU": 4, "GPU": 1}, price_micro_usd_h=5_000_000)
    views = (ready(1, old, taken={"CPU": 1}), ready(2, old, idle_s=30.0))
    outlook = look_ahead(cluster(nodes=views, demand=(Demand({"CPU": 3}),)), hours=0.2)
    assert (outlook.price_now_micro_usd_h, outlook.price_end_micro_usd_h) == (10_000_000, 5_000_000)


def test_a_new_node_is_taken_to_need_what_the_cluster_s_own_did() -> None:
    assert usual_launch_s(cluster(nodes=(ready(1), ready(2)))) == 40.0
    assert usual_launch_s(cluster()) == 120.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"hours": 0.0}, {"hours": math.inf}, {"hours": math.nan}, {"launch_s": -1.0}, {"launch_s": math.nan},
        {"job_hours": 0.0}, {"job_hours": math.nan},
    ],
)  # fmt: skip
def test_impossible_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        look_ahead(cluster(), **wrong)


@settings(max_examples=15)
@given(
    jobs=st.lists(st.integers(1, 3), max_size=4),
    nodes=st.lists(st.sampled_from([GPU, CPU]), max_size=3),
    job_hours=st.none() | st.floats(0.02, 0.2),
)
def test_no_pool_ever_exceeds_its_limit_and_the_cost_lies_between_none_and_all(
    jobs: list[int], nodes: list[NodeType], job_hours: float | None
) -> None:
    views = tuple(ready(number, node_type) for number, node_type in enumerate(nodes[:2]))
    seen = cluster(nodes=views, jobs=tuple(job(n, members=members) for n, members in enumerate(jobs)))
    outlook = look_ahead(from_json(Snapshot, to_json(seen)), hours=0.2, job_hours=job_hours)
    assert outlook.price_most_micro_usd_h <= 2 * GPU.price_micro_usd_h + 4 * CPU.price_micro_usd_h
    assert 0 <= outlook.cost_micro_usd <= outlook.price_most_micro_usd_h * 0.2 + 1
    assert {start.job_id for start in outlook.jobs} == {each.id for each in seen.jobs}


def test_what_was_foreseen_is_what_then_happens(tmp_path: Path) -> None:
    """The controller's own loop, on a virtual clock, beside the outlook from its first Snapshot."""
    loop = Loop(tmp_path)
    for members in (2, 3, 1):
        loop.submit(members=members)
    (tmp_path / "snapshot.asked").touch()
    loop.tick()
    seen = from_json(Snapshot, read_json(tmp_path / "snapshot.json"))
    outlook = look_ahead(seen, hours=1 / 60, launch_s=BOOT_S)
    loop.until(lambda: loop.clock.now_s() >= seen.at_s + 60)
    foreseen = [a.node_id for plan in outlook.plans for a in plan.actions if isinstance(a, Launch)]
    assert foreseen == loop.world.launches != []
    for start in outlook.jobs:
        started_s = loop.store.job(start.job_id).started_at_s
        assert (start.after_s is None) == (started_s is None)
        assert start.after_s is None or started_s == pytest.approx(seen.at_s + start.after_s, abs=2.0)
    loop.store.close()


def test_a_trainer_shrinks_for_replicas_here_too_and_has_left_its_seat_by_the_next_step() -> None:
    wide = GPU.model_copy(update={"resources": {"CPU": 4, "GPU": 2}, "max_nodes": 1})
    node = ready(1, wide, taken={"GPU": 2})
    trainer, lease = running(1, node)
    gang = GangSpec(shapes=(Shape(members=2, min_members=1, resources={"GPU": 1}),))
    trainer = replace(trainer, spec=trainer.spec.model_copy(update={"kind": JobKind.TRAIN, "gang": gang}))
    members = (lease.members[0], replace(lease.members[0], index=1, placement_group_id="cd34"))
    lease = replace(lease, shape=gang.shapes[0], members=members)
    spec = ServeSpec(name="chat", model="/m", resources={"GPU": 1})
    endpoint = Endpoint(spec, "ana", EndpointState.DEPLOYING, NOW_S, target_replicas=1)
    seen = cluster(nodes=(node,), jobs=(trainer,), leases=(lease,), endpoints=(EndpointView(endpoint, None),))
    world = LiveWorld(replace(seen, node_types=(wide,)), launch_s=60.0, job_s=None)
    plans = [world.step(5.0) for _ in range(3)]
    assert [a.by for plan in plans for a in plan.actions if isinstance(a, Shrink)] == [("chat",)]
    assert [member.is_parked for member in world.book.leases["lease-1"].members] == [False, True]
