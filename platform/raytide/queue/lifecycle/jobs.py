"""The life of a job, as a pure function of its lease and its driver.

    QUEUED -> ADMITTED -> RUNNING -> SUCCEEDED | FAILED
       |          |          |  (stop asked)
       |   preempted         |
  QUEUED <--------+----------+
       +----------+----------+-> STOPPING -> STOPPED

TRAIN, DATA and SCRIPT jobs have a driver that raytide starts: `wanted_drivers` returns those that should be alive.
The driver of a GANG job is a user's process. It keeps the job alive by polling the job's lease, and it releases the
lease at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from raytide.core.objects.gang import Lease, LeaseState
from raytide.core.objects.job import Job, JobKind, JobState
from raytide.queue.lifecycle import attained_service
from raytide.queue.lifecycle.leases import acknowledge_release, release

WITHOUT_MEMBERS = 254
"""The exit code of a driver whose gang has no usable member left."""
_MOST_NODE_LOSSES = 100
"""The most losses of all nodes that use up no restart, so that a job that breaks its own nodes does not get new ones
for ever.
"""
_WITH_LEASE = (JobState.ADMITTED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class DriverKey:
    """The identity of one attempt at running a job's driver.

    A restarted controller uses this key to recognise an attempt that is already running, so it does not start the
    attempt twice.
    """

    job_id: str
    attempt: int

    @property
    def number(self) -> int:
        """The number of the job. Later jobs have larger numbers."""
        return int(self.job_id.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The status of a job's driver. Besides `running` and `succeeded`, the states are:
    - `failed`: the driver reported a failure.
    - `died`: the process vanished (out of memory, killed, node lost). The driver may run again.
    - `unknown`: the status could not be read. No conclusion is drawn from it.
    """

    key: DriverKey
    state: Literal["running", "succeeded", "failed", "died", "unknown"]
    message: str = ""
    with_head: bool = False
    """True if a former head started the driver, which ended because that head was lost."""
    without_members: bool = False
    """True if the driver ended because no member of its gang was usable any more."""


def advance(
    job: Job, lease: Lease | None, driver: DriverStatus | None, now_s: float, *, silent_s: float | None = None
) -> tuple[Job, Lease | None]:
    """Returns the job and its lease after one step. The lease is released when the job has ended.

    The driver's status is ignored if it belongs to another attempt. `silent_s` is the time in seconds since the holder
    of a gang last polled its lease. It is None while that time is unknown.
    """
    if driver is not None and driver.key != DriverKey(job.id, job.restarts):
        driver = None
    if lease is not None:
        lease = acknowledge_release(lease, str(job.progress.get("settled", "")), now_s)
    if job.unreadable and not job.is_final:
        job = _end(job, JobState.FAILED, f"its spec cannot be read any more: {job.unreadable}", now_s)
    elif not job.is_final:
        excused = job.preemptions + job.head_losses + job.node_losses + (lease is not None and lease.is_preempted)
        job = _step(_follow_lease(job, lease, now_s), driver, now_s, silent_s, excused)
    if job.is_final and lease is not None:
        lease = release(lease, f"{job.id} {job.state}")
    elif lease is not None and lease.is_preempted and not lease.member_count and job.state in _WITH_LEASE:
        job = replace(requeued(job, job.reason), preemptions=job.preemptions + 1, preempted_at_s=now_s)
        lease = release(lease, job.reason)
    return attained_service.follow(job, lease, now_s), lease


def admitted(job: Job, reason: str, now_s: float, reserved_micro_usd: int = 0) -> Job:
    """Returns the job after the Admit action of the queue. The caller stores the new lease together with the job."""
    return replace(
        job,
        state=JobState.ADMITTED,
        admitted_at_s=now_s,
        reason=reason,
        reserved_micro_usd=reserved_micro_usd,
    )


def requeued(job: Job, reason: str) -> Job:
    """Returns the job as queued again, after the planner's Requeue or at the end of a preemption. The caller releases
    the lease.
    """
    return replace(job, state=JobState.QUEUED, reason=reason, reserved_micro_usd=0)


def wanted_drivers(jobs: Iterable[Job]) -> frozenset[DriverKey]:
    """Returns the drivers that should be alive. The caller starts missing drivers and ends all others.

    A driver starts as soon as its job is admitted, while nodes still launch. It stays alive while its job is queued
    again.
    """
    return frozenset(
        DriverKey(job.id, job.restarts) for job in jobs if job.spec.kind is not JobKind.GANG and _has_driver(job)
    )


def _has_driver(job: Job) -> bool:
    was_admitted = job.state is JobState.QUEUED and job.admitted_at_s is not None
    return was_admitted or job.state in (JobState.ADMITTED, JobState.RUNNING)


def _follow_lease(job: Job, lease: Lease | None, now_s: float) -> Job:
    if job.state is JobState.ADMITTED and lease is not None and lease.state is LeaseState.ACTIVE:
        job = replace(
            job, state=JobState.RUNNING, started_at_s=job.started_at_s or now_s, reason=f"{lease.id} is active"
        )
    return job


def _step(job: Job, driver: DriverStatus | None, now_s: float, silent_s: float | None, excused: int) -> Job:
    if job.spec.kind is JobKind.GANG:
        return _step_gang(job, now_s, silent_s)
    if driver is not None and driver.state == "succeeded":
        return _end(job, JobState.SUCCEEDED, driver.message, now_s)
    if job.stop_requested:
        return _stop(job, driver, now_s)
    if driver is not None and driver.state == "failed":
        return _end(job, JobState.FAILED, str(job.progress.get("error") or driver.message), now_s)
    if driver is not None and driver.state == "died":
        return _restart(job, driver, now_s, job.spec.max_restarts + excused)
    return job


def _step_gang(job: Job, now_s: float, silent_s: float | None) -> Job:
    if job.released_by_driver is not None:
        error = job.released_by_driver
        return _end(
            job, JobState.FAILED if error else JobState.SUCCEEDED, error or "its driver gave the lease back", now_s
        )
    if job.stop_requested:
        return _end(job, JobState.STOPPED, "stopped on request", now_s)
    if silent_s is not None and silent_s > job.spec.heartbeat_timeout_s:
        why = f"its driver has not asked for its lease for {job.spec.heartbeat_timeout_s:g} s: dead, or cut off"
        return _end(job, JobState.FAILED, why, now_s)
    return job


def _stop(job: Job, driver: DriverStatus | None, now_s: float) -> Job:
    if driver is not None and driver.state in ("running", "unknown"):
        return replace(job, state=JobState.STOPPING, reason="its driver is being ended")
    return _end(job, JobState.STOPPED, "stopped on request", now_s)


def _restart(job: Job, driver: DriverStatus, now_s: float, most: int) -> Job:
    """Restarts the driver, or fails the job after `most` restarts. A driver may die with preempted members, so each
    preemption allows one more restart; so does each loss of the head, on which drivers run, and each loss of all nodes
    of the gang.
    """
    why = driver.message or "its driver died"
    if driver.with_head:
        return replace(
            job, restarts=job.restarts + 1, head_losses=job.head_losses + 1, reason="its driver was lost with its head"
        )
    if driver.without_members and job.node_losses < _MOST_NODE_LOSSES:
        return replace(
            job, restarts=job.restarts + 1, node_losses=job.node_losses + 1, reason="no member of its gang was left"
        )
    if job.restarts >= most:
        return _end(
            job, JobState.FAILED, f"{why}; it was started {job.restarts + 1} times, max_restarts allows no more", now_s
        )
    return replace(job, restarts=job.restarts + 1, reason=f"{why}; restart {job.restarts + 1} of {most}")


def _end(job: Job, state: JobState, reason: str, now_s: float) -> Job:
    return replace(job, state=state, ended_at_s=now_s, reason=reason, reserved_micro_usd=0)
