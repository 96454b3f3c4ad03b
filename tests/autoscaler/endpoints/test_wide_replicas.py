"""Replicas that need more than falls free at a time: it is kept for them, and trainers leave all of it or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler.world import Cluster

from raytide.autoscaler.endpoints.targets import set_targets
from raytide.core.objects.cluster_config import UnmanagedSection
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import LeaseState, Shape
from raytide.core.objects.job import JobState
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Shrink, Wait
from raytide.scheduling.reservations import with_reservations
from raytide.scheduling.state import SchedulingState

GPU4 = NodeType(name="gpu4", resources={"GPU": 4.0}, price_micro_usd_h=4_000_000, max_nodes=3, idle_timeout_s=30)
GPU8 = GPU4.model_copy(update={"name": "gpu8", "resources": {"GPU": 8.0}, "max_nodes": 2})
ONE = Shape(resources={"GPU": 1.0})
WORK_S = 12
"""The time that each small job runs."""


def wide(members: int, gpus: float = 4.0, least: int = 1, most: int = 1) -> ServeSpec:
    replicas = Replicas(min=least, max=most, target_ongoing=2, downscale_delay_s=5)
    return ServeSpec(name="wide", model="/m", replicas=replicas, resources={"GPU": gpus}, members=members)


def cluster(nodes: int = 3) -> Cluster:
    return Cluster((GPU4.model_copy(update={"max_nodes": nodes}),), UnmanagedSection(max_nodes=0), launch_delay_s=2.0)


class Crowd:
    """Small jobs that fill the fleet, with others in the queue behind them all the time. One ends every second."""

    def __init__(self, c: Cluster, **job: object) -> None:
        self.c, self.job = c, job
        self.since: dict[str, int] = {}
        for _ in range(4 * c.node_types[0].max_nodes + 2):
            c.submit(ONE, **job)
        c.settle(10)

    def pass_on(self) -> None:
        running = [lease.job_id for lease in self.c.book.leases.values() if lease.state is LeaseState.ACTIVE]
        for job_id in running:
            self.since[job_id] = self.since.get(job_id, 0) + 1
        oldest = max((job_id for job_id in running), key=lambda job_id: self.since[job_id], default=None)
        if oldest is not None and self.since[oldest] >= WORK_S:
            self.c.finish(oldest)
            self.c.submit(ONE, **self.job)
        self.c.tick()


def seated(c: Cluster) -> int:
    return sum(work.endpoint == "wide" and bool(work.node_id) for work in c.ray.work)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("preemptible", [True, False])
def test_a_replica_finds_its_nodes_though_small_jobs_take_every_seat_that_falls_free(
    members: int, preemptible: bool
) -> None:
    c = cluster()
    crowd = Crowd(c, preemptible=preemptible)
    c.serve(wide(members))
    ticks = next((tick for tick in range(80) if not crowd.pass_on() and seated(c) == members), None)
    assert ticks is not None
    assert ticks <= 4 * members + WORK_S, "those that were there have ended by then"


def kept(c: Cluster) -> float:
    """GPUs, in the last decision."""
    seen, _ = set_targets(c.seen)
    return sum(
        free["GPU"]
        for nodes in with_reservations(seen, SchedulingState.from_snapshot(seen)).kept.values()
        for _, free in nodes
        if free
    )


@settings(max_examples=8, deadline=None)
@given(
    members=st.integers(1, 3),
    gpus=st.sampled_from([2.0, 3.0, 4.0]),
    sizes=st.lists(st.integers(1, 3), min_size=5, max_size=40),
    lives=st.lists(st.integers(2, 15), min_size=5, max_size=40),
)
def test_whatever_comes_and_goes_what_is_kept_only_grows_until_it_is_enough(
    members: int, gpus: float, sizes: list[int], lives: list[int]
) -> None:
    c, ends, submitted, before = cluster(), dict[str, int](), 0, 0.0
    for tick in range(15 + 4 * max(lives)):
        for job_id in [job_id for job_id, end in ends.items() if end == tick]:
            c.finish(job_id)
        waiting = sum(job.state is JobState.QUEUED for job in c.book.jobs.values())
        for _ in range(6 - waiting):
            c.submit(Shape(resources={"GPU": float(sizes[submitted % len(sizes)])}), preemptible=False)
            submitted += 1
        if tick == 12:
            c.serve(wide(members, gpus))
        c.tick()
        for number, job in enumerate(c.book.jobs.values()):
            if job.state is not JobState.QUEUED:
                ends.setdefault(job.id, tick + lives[number % len(lives)])
        if seated(c) == members:
            return
        assert tick < 13 or kept(c) >= before
        before = kept(c) if tick >= 13 else 0.0
    raise AssertionError("it waits for longer than anybody who was there")


def test_a_node_that_is_free_is_kept_until_the_other_is_too_and_everybody_is_told() -> None:
    c = cluster(nodes=2)
    long, short = (c.submit(Shape(resources={"GPU": 4.0}), preemptible=False) for _ in range(2))
    c.settle(10)
    c.serve(wide(2))
    c.finish(short)
    late = c.submit(ONE)
    assert c.settle(3 * int(GPU4.idle_timeout_s)) == [], "it is neither given away nor called idle"
    waits = {action.subject: action.reason for action in c.tick() if isinstance(action, Wait)}
    assert waits["wide"].endswith("Resources that become free on node-2, node-1 are reserved for it.")
    assert waits[late].endswith("held by job-1, wide.")
    c.finish(long)
    c.settle(4)
    assert seated(c) == 2


def test_nothing_is_kept_where_a_replica_could_not_be_whole_even_then() -> None:
    c = cluster(nodes=2)
    c.serve(wide(1).model_copy(update={"name": "stays"}))
    c.settle(10)
    c.serve(wide(2))
    job = c.submit(ONE)
    c.settle(10)
    assert [lease.job_id for lease in c.book.leases.values() if lease.usable] == [job]


def test_a_trainer_gets_its_seats_back_beside_a_replica_that_could_not_be_whole_even_then() -> None:
    c = cluster(nodes=2)
    c.serve(wide(1).model_copy(update={"name": "stays"}))
    short = c.submit(Shape(resources={"GPU": 2.0}))
    c.settle(10)
    job = c.submit(Shape(members=4, min_members=1, resources={"GPU": 1.0}), preemptible=True)
    c.serve(wide(2))
    c.settle(10)
    c.finish(short)
    c.settle(10)
    assert {lease.job_id: len(lease.usable) for lease in c.book.leases.values()}[job] == 4


def test_what_a_node_will_have_for_one_endpoint_it_will_not_have_for_another() -> None:
    c = Cluster((GPU8,), UnmanagedSection(max_nodes=0), launch_delay_s=2.0)
    jobs = [c.submit(ONE, preemptible=False) for _ in range(16)]
    c.settle(10)
    for job in jobs[1:8]:
        c.finish(job)
    c.serve(wide(2, gpus=5.0).model_copy(update={"name": "first"}))
    c.serve(wide(1, gpus=8.0))
    c.settle(3)
    seen, _ = set_targets(c.seen)
    kept = {
        name: [node for node, _ in nodes]
        for name, nodes in with_reservations(seen, SchedulingState.from_snapshot(seen)).kept.items()
    }
    assert kept == {"first": ["node-1", "node-2"]}


@pytest.mark.parametrize(("at_least", "seats"), [(2, 6), (3, 0)])
def test_a_trainer_leaves_all_the_seats_that_a_wide_replica_needs_or_none(at_least: int, seats: int) -> None:
    c = cluster(nodes=2)
    c.submit(Shape(members=8, min_members=at_least, resources={"GPU": 1.0}), preemptible=True)
    c.settle(10)
    c.serve(wide(2, gpus=3.0))
    shrinks = [action for action in c.settle(20) if isinstance(action, Shrink)]
    (lease,) = c.book.leases.values()
    assert [len(shrink.members) for shrink in shrinks] == ([seats] if seats else [])
    assert (len(lease.usable), seated(c)) == (8 - seats, 2 if seats else 0)


def test_they_come_back_when_the_replica_goes() -> None:
    c = cluster(nodes=3)
    c.serve(wide(2, gpus=2.0, most=2))
    c.settle(10)
    c.submit(Shape(members=8, min_members=4, resources={"GPU": 1.0}), preemptible=True)
    c.settle(10)
    (lease,) = c.book.leases.values()
    assert (len(lease.usable), seated(c)) == (8, 2)
    c.ongoing["wide"] = 4.0
    c.settle(20)
    (lease,) = c.book.leases.values()
    assert (len(lease.usable), seated(c)) == (4, 4)
    c.ongoing["wide"] = 0.0
    c.settle(40)
    (lease,) = c.book.leases.values()
    assert (len(lease.usable), seated(c)) == (8, 2)
