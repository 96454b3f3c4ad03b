"""The GPU-seconds that a job has received, which decide the job's place in the queue. The job's spec and the number of
its preemptions decide whether it may be preempted.
"""

from __future__ import annotations

from dataclasses import replace

from raytide.core.objects.gang import Lease, LeaseState
from raytide.core.objects.job import Job

COOL_DOWN_S = 600.0
"""The seconds after its preemption in which a job preempts no other and only takes free capacity."""
MAX_PREEMPTIONS = 100
"""The number of preemptions after which a job counts as one that cannot be preempted."""


def follow(job: Job, lease: Lease | None, now_s: float) -> Job:
    """Returns the job with its attained service up to date.

    A spell is a time in which the number of usable GPUs is constant. If the number has changed, the current spell ends
    and a new one begins. A gang without GPUs and CPUs has spells too, of 0 GPUs.
    """
    is_active = lease is not None and lease.state is LeaseState.ACTIVE and not job.is_final
    usable = len(lease.usable) if lease is not None and is_active else 0
    gpus = lease.shape.gpus * usable if lease is not None else 0.0
    if gpus == job.spell_gpus and bool(usable) == (job.spell_since_s is not None):
        return job
    return replace(
        job,
        attained_gpu_s=attained_gpu_s(job, now_s),
        held_s=job.held_for_s(now_s),
        spell_since_s=now_s if usable else None,
        spell_gpus=gpus,
    )


def attained_gpu_s(job: Job, now_s: float) -> float:
    return job.attained_gpu_s + job.spell_gpus * (job.held_for_s(now_s) - job.held_s)


def queued_s(job: Job, now_s: float) -> float:
    """Returns the seconds that the job has waited in total: before admission, between runs, and while its nodes
    started.
    """
    return max(0.0, now_s - job.submitted_at_s - job.held_for_s(now_s))


def may_be_preempted(job: Job) -> bool:
    return job.spec.is_preemptible and job.preemptions < MAX_PREEMPTIONS


def in_cooldown(job: Job, now_s: float) -> bool:
    return job.preempted_at_s is not None and now_s - job.preempted_at_s < COOL_DOWN_S
