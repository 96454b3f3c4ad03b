from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus, admitted, advance, wanted_drivers

SHAPE = Shape(resources={"CPU": 1.0})
LEASE = Lease("lease-1", "job-1", SHAPE, LeaseState.WAITING, (Member(0),))
ACTIVE = replace(LEASE, state=LeaseState.ACTIVE)


def job(kind: JobKind = JobKind.TRAIN, state: JobState = JobState.QUEUED, **changes: object) -> Job:
    spec = JobSpec(kind=kind, name="j", gang=GangSpec(shapes=(SHAPE,)), max_restarts=1, heartbeat_timeout_s=10.0)
    return replace(Job("job-1", spec, "ada", state, 100.0), **changes)  # type: ignore[arg-type]


def driver(state: str, message: str = "", attempt: int = 0) -> DriverStatus:
    return DriverStatus(DriverKey("job-1", attempt), state, message)  # type: ignore[arg-type]


def test_a_job_goes_from_the_queue_to_success() -> None:
    queued = job()
    assert advance(queued, None, None, 101.0) == (queued, None)
    chosen = admitted(queued, "it fits", 102.0)
    assert (chosen.state, chosen.admitted_at_s, chosen.reason) == (JobState.ADMITTED, 102.0, "it fits")
    assert advance(chosen, LEASE, None, 102.5) == (chosen, LEASE)
    assert wanted_drivers([chosen]) == {DriverKey("job-1", 0)}
    running, _ = advance(chosen, ACTIVE, None, 103.0)
    assert (running.state, running.started_at_s) == (JobState.RUNNING, 103.0)
    assert wanted_drivers([running]) == {DriverKey("job-1", 0)}
    assert advance(running, ACTIVE, driver("running"), 104.0) == (running, ACTIVE)
    done, over = advance(running, ACTIVE, driver("succeeded", "loss 2.1"), 105.0)
    assert (done.state, done.ended_at_s, done.reason) == (JobState.SUCCEEDED, 105.0, "loss 2.1")
    assert over is not None
    assert (over.state, over.reason) == (LeaseState.RELEASED, "job-1 succeeded")
    assert wanted_drivers([done]) == frozenset()


def test_a_driver_that_died_is_started_again_until_the_budget_is_spent() -> None:
    running = job(state=JobState.RUNNING)
    again, lease = advance(running, ACTIVE, driver("died", "out of memory"), 110.0)
    assert (again.state, again.restarts, again.reason) == (JobState.RUNNING, 1, "out of memory; restart 1 of 1")
    assert wanted_drivers([again]) == {DriverKey("job-1", 1)}
    assert advance(again, lease, driver("died", "out of memory"), 111.0) == (again, ACTIVE), "news of the first attempt"
    failed, over = advance(again, lease, driver("died", attempt=1), 112.0)
    assert failed.state is JobState.FAILED
    assert "started 2 times" in failed.reason
    assert over is not None
    assert over.state is LeaseState.RELEASED


def test_a_driver_that_dies_with_preempted_members_costs_no_restart() -> None:
    leaving = replace(ACTIVE, members=(Member(0, MemberState.LEAVING, "node-1", gives_way=True, leaves_at_s=130.0),))
    running = job(JobKind.DATA, JobState.RUNNING, restarts=1)
    again, _ = advance(running, leaving, driver("died", attempt=1), 110.0)
    assert (again.state, again.restarts) == (JobState.RUNNING, 2)
    queued, _ = advance(running, replace(leaving, members=(Member(0, MemberState.PARKED),)), None, 131.0)
    later, _ = advance(queued, None, driver("died", attempt=1), 132.0)
    assert (later.state, later.restarts) == (JobState.QUEUED, 2)
    assert advance(later, None, driver("died", attempt=2), 133.0)[0].state is JobState.FAILED, "that was its own"


def test_a_driver_that_was_lost_with_its_head_costs_no_restart() -> None:
    running = job(state=JobState.RUNNING)
    for attempt in range(3):
        lost = replace(driver("died", "killed", attempt), with_head=True)
        running, _ = advance(running, ACTIVE, lost, 110.0 + attempt)
        assert (running.state, running.restarts, running.head_losses) == (JobState.RUNNING, attempt + 1, attempt + 1)
    assert running.reason == "its driver was lost with its head"
    again, _ = advance(running, ACTIVE, driver("died", attempt=3), 120.0)
    assert (again.state, again.restarts) == (JobState.RUNNING, 4), "max_restarts allows one of its own"
    assert advance(again, ACTIVE, driver("died", attempt=4), 121.0)[0].state is JobState.FAILED


def test_a_driver_that_lost_all_its_nodes_costs_no_restart_however_often() -> None:
    """A build on one spot node loses its last member with each reclaim."""
    running, waiting = job(state=JobState.RUNNING), replace(ACTIVE, members=(Member(0),))
    for attempt in range(6):
        lost = replace(driver("died", "no member is usable", attempt), without_members=True)
        running, _ = advance(running, waiting, lost, 110.0 + attempt)
        assert (running.state, running.restarts, running.node_losses) == (JobState.RUNNING, attempt + 1, attempt + 1)
    assert running.reason == "no member of its gang was left"
    again, _ = advance(running, waiting, driver("died", attempt=6), 120.0)
    assert (again.state, again.restarts) == (JobState.RUNNING, 7), "max_restarts allows one of its own"
    assert advance(again, waiting, driver("died", attempt=7), 121.0)[0].state is JobState.FAILED


def test_a_job_that_brings_its_nodes_down_does_not_do_so_for_ever() -> None:
    running, waiting, attempt = job(state=JobState.RUNNING), replace(ACTIVE, members=(Member(0),)), 0
    while running.state is JobState.RUNNING:
        lost = replace(driver("died", "no member is usable", attempt), without_members=True)
        running, _ = advance(running, waiting, lost, 110.0 + attempt)
        attempt += 1
        assert attempt < 1_000
    assert (running.state, running.node_losses) == (JobState.FAILED, 100)


def test_a_driver_that_failed_is_not_started_again() -> None:
    failed, _ = advance(job(state=JobState.RUNNING), ACTIVE, driver("failed", "bad data"), 110.0)
    assert (failed.state, failed.reason) == (JobState.FAILED, "bad data")


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.ADMITTED])
def test_a_job_without_a_driver_stops_at_once(state: JobState) -> None:
    stopped, lease = advance(job(state=state, stop_requested=True), LEASE, None, 110.0)
    assert stopped.state is JobState.STOPPED
    assert lease is not None
    assert lease.state is LeaseState.RELEASED


def test_a_running_job_stops_once_its_driver_has_ended() -> None:
    stopping, lease = advance(job(state=JobState.RUNNING, stop_requested=True), ACTIVE, driver("running"), 110.0)
    assert (stopping.state, lease, wanted_drivers([stopping])) == (JobState.STOPPING, ACTIVE, frozenset())
    for ended in (None, driver("died"), driver("failed")):
        assert advance(stopping, ACTIVE, ended, 111.0)[0].state is JobState.STOPPED
    assert advance(stopping, ACTIVE, driver("succeeded"), 111.0)[0].state is JobState.SUCCEEDED


def test_a_job_that_is_over_stays_over_and_lets_its_lease_go() -> None:
    done = job(state=JobState.SUCCEEDED, ended_at_s=1.0)
    after, lease = advance(done, ACTIVE, driver("died"), 200.0)
    assert after == done
    assert lease is not None
    assert lease.state is LeaseState.RELEASED


def test_a_gang_job_lives_as_long_as_its_driver_asks() -> None:
    gang = job(JobKind.GANG, JobState.RUNNING, heartbeat_at_s=200.0)
    assert wanted_drivers([gang]) == frozenset()
    assert advance(gang, ACTIVE, None, 9_999.0)[0] == gang, "it cannot be heard"
    assert advance(gang, ACTIVE, None, 9_999.0, silent_s=10.0)[0] == gang
    silent, lease = advance(gang, ACTIVE, None, 201.0, silent_s=10.1)
    assert silent.state is JobState.FAILED
    assert "has not asked" in silent.reason
    assert lease is not None
    assert lease.state is LeaseState.RELEASED


def test_a_gang_job_whose_driver_never_asked_for_its_lease_leaves_the_queue() -> None:
    assert advance(job(JobKind.GANG), None, None, 110.0, silent_s=10.0)[0].state is JobState.QUEUED
    assert advance(job(JobKind.GANG), None, None, 111.0, silent_s=11.0)[0].state is JobState.FAILED


def test_a_gang_job_ends_as_its_driver_says() -> None:
    for said, state in (("", JobState.SUCCEEDED), ("ValueError: odd", JobState.FAILED)):
        done, _ = advance(job(JobKind.GANG, JobState.RUNNING, released_by_driver=said), ACTIVE, None, 101.0)
        assert done.state is state
        assert said in done.reason
    stopped, _ = advance(job(JobKind.GANG, JobState.RUNNING, stop_requested=True), ACTIVE, None, 101.0)
    assert stopped.state is JobState.STOPPED


def test_a_stop_waits_while_the_state_of_the_driver_is_unknown() -> None:
    running = job(state=JobState.RUNNING, stop_requested=True)
    stopping, lease = advance(running, ACTIVE, driver("unknown"), 110.0)
    assert (stopping.state, lease) == (JobState.STOPPING, ACTIVE)
    stopped, over = advance(stopping, lease, None, 111.0)
    assert stopped.state is JobState.STOPPED
    assert over is not None
    assert over.state is LeaseState.RELEASED


def test_a_gang_that_asks_for_neither_gpu_nor_cpu_works_off_its_estimate_and_its_steps() -> None:
    shape = Shape(resources={"TPU": 4.0})
    spec = JobSpec(kind=JobKind.SCRIPT, name="j", gang=GangSpec(shapes=(shape,)), estimate_h=3.0)
    lease = replace(ACTIVE, shape=shape, members=(Member(0, MemberState.READY, "node-1", "hex1"),))
    running, _ = advance(job(state=JobState.RUNNING, spec=spec), lease, None, 1000.0)
    assert running.held_for_s(4600.0) == 3600.0
    assert running.remaining_s(4600.0) == 7200.0
    assert replace(running, progress={"step": 10, "steps": 30}).remaining_s(4600.0) == 7200.0
    assert advance(running, lease, None, 1001.0)[0] == running
    done, _ = advance(running, lease, driver("succeeded"), 4600.0)
    assert (done.held_s, done.spell_since_s, done.attained_gpu_s) == (3600.0, None, 0.0)
