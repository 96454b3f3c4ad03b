"""A job's speed on each type of node is learned from the steps that it reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.autoscaler.job_throughput import ENOUGH, STRETCH_S, JobThroughput
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.snapshot import NodeView, Snapshot

L4 = NodeType(name="l4", resources={"GPU": 4}, price_micro_usd_h=1, labels={"ray.io/accelerator-type": "L4"})
H100 = NodeType(name="h100", resources={"GPU": 8}, price_micro_usd_h=1, labels={"ray.io/accelerator-type": "H100"})
TYPES = (L4, H100)
SHAPE = Shape(members=2, resources={"GPU": 4})


def view(node_type: NodeType) -> NodeView:
    record = Node(node_type.name, node_type.name, "a", CapacityType.SPOT, 1, NodeState.READY, 0.0)
    return NodeView(record, node_type.resources, node_type.resources, {})


def snapshot(at_s: float, step: float, *on: str, epoch: int = 1, state: JobState = JobState.RUNNING) -> Snapshot:
    """A member on each of these types."""
    spec = JobSpec(kind=JobKind.TRAIN, name="t", gang=GangSpec(shapes=(SHAPE,)))
    job = Job("job-1", spec, "me", state, 0.0, progress={"step": step})
    members = tuple(Member(at, MemberState.READY, node_id) for at, node_id in enumerate(on))
    lease = Lease("lease-1", "job-1", SHAPE, LeaseState.ACTIVE, members, epoch)
    return Snapshot(at_s=at_s, node_types=TYPES, nodes=tuple(map(view, TYPES)), jobs=(job,), leases=(lease,))


def run(strides: JobThroughput, from_s: float, until_s: float, steps_s: float, *on: str, epoch: int = 1) -> None:
    for at_s in range(int(from_s), int(until_s)):
        strides.observe(snapshot(at_s, int(at_s * steps_s), *on, epoch=epoch), at_s)


def test_steps_a_second_of_a_gpu_are_learned_by_type_and_say_how_fast_the_job_is_on_each() -> None:
    strides = JobThroughput(TYPES)
    run(strides, 0.0, STRETCH_S * (ENOUGH + 2), 0.8, "l4", "l4")
    assert strides.learned == {"job-1": {"l4": pytest.approx(0.1, rel=0.03)}}
    seen = snapshot(0.0, 0, "l4")
    assert strides.paces(seen.jobs) == {}  # nothing is known of the others
    run(strides, 1000.0, 1000.0 + STRETCH_S * (ENOUGH + 2), 4.0, "h100", "h100", epoch=2)
    assert strides.paces(seen.jobs) == {"job-1": {"l4": 1.0, "h100": 5.0}}
    assert JobThroughput(TYPES, strides.learned).paces(seen.jobs) == strides.paces(seen.jobs)


def test_of_a_gang_without_gpus_and_cpus_its_members_are_counted() -> None:
    strides = JobThroughput(TYPES)
    for at_s in range(int(STRETCH_S * (ENOUGH + 2))):
        seen = snapshot(at_s, at_s, "l4", "l4")
        leases = (replace(seen.leases[0], shape=Shape(members=2, resources={"TPU": 4})),)
        strides.observe(replace(seen, leases=leases), at_s)
    assert strides.learned == {"job-1": {"l4": pytest.approx(0.5, rel=0.03)}}


def test_a_gang_that_changes_or_is_on_several_types_or_reports_no_steps_teaches_nothing() -> None:
    strides = JobThroughput(TYPES)
    for number in range(20):
        run(strides, 40.0 * number, 40.0 * number + 40.0, 1.0, "l4", "l4", epoch=number)
    run(strides, 2000.0, 4000.0, 1.0, "l4", "h100")
    for at_s in range(4000, 6000):
        seen = snapshot(at_s, 0, "l4", "l4")
        strides.observe(replace(seen, jobs=(replace(seen.jobs[0], progress={}),)), at_s)
    assert strides.learned == {}


def test_a_restart_from_a_checkpoint_and_a_clock_that_is_set_back_begin_a_stretch_anew() -> None:
    strides = JobThroughput(TYPES)
    for _ in range(10):
        run(strides, 0.0, STRETCH_S, 1.0, "l4", "l4")  # back to the first step, and in time
    assert strides.learned == {}


def test_steps_of_minutes_are_counted_from_one_step_to_another() -> None:
    strides = JobThroughput(TYPES)
    run(strides, 90.0, 90.0 + 150.0 * (ENOUGH + 2), 1 / 150.0, "l4", "l4")
    assert strides.learned == {"job-1": {"l4": pytest.approx(1 / 150.0 / 8, rel=0.02)}}


def test_who_is_over_is_forgotten_and_where_all_nodes_are_of_one_kind_nothing_is_learned() -> None:
    strides = JobThroughput(TYPES, {"job-1": {"l4": 1.0}, "job-2": {"l4": 1.0}})
    strides.observe(snapshot(0.0, 0, "l4"), 0.0)
    assert set(strides.learned) == {"job-1"}
    alike = JobThroughput((L4, L4.model_copy(update={"name": "l4.spot"})))
    run(alike, 0.0, STRETCH_S * (ENOUGH + 2), 0.8, "l4", "l4")
    assert alike.learned == {}
