"""How much service a job has had: what the order of the queue looks at. Pure."""

from __future__ import annotations

from dataclasses import replace

from raytide.core.objects.gang import Lease, LeaseState
from raytide.core.objects.job import Job
from raytide.jobs.admission.priority import COOL_DOWN_S, MAX_PREEMPTIONS


def follow(job: Job, lease: Lease | None, now_s: float) -> Job:
    """A new spell begins whenever the number of GPUs that the job can use changes."""
    is_active = lease is not None and lease.state is LeaseState.ACTIVE and not job.is_final
    gpus = lease.shape.gpus * len(lease.usable) if lease is not None and is_active else 0.0
    if gpus == job.spell_gpus:
        return job
    return replace(
        job,
        attained_gpu_s=attained_gpu_s(job, now_s),
        held_s=job.held_for_s(now_s),
        spell_since_s=now_s if gpus else None,
        spell_gpus=gpus,
    )


def attained_gpu_s(job: Job, now_s: float) -> float:
    return job.attained_gpu_s + job.spell_gpus * (job.held_for_s(now_s) - job.held_s)


def queued_s(job: Job, now_s: float) -> float:
    """All that it waited, before it was admitted, between its turns, and while its nodes started."""
    return max(0.0, now_s - job.submitted_at_s - job.held_for_s(now_s))


def may_be_preempted(job: Job) -> bool:
    """Whether it may be preempted: it says so, and has not been too often."""
    return job.spec.is_preemptible and job.preemptions < MAX_PREEMPTIONS


def in_cooldown(job: Job, now_s: float) -> bool:
    """It was preempted a short while ago: it takes only what is free."""
    return job.preempted_at_s is not None and now_s - job.preempted_at_s < COOL_DOWN_S
