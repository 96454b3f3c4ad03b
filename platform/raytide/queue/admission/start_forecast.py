"""Forecasts when queued jobs will start. The forecast makes the queue's decision anew for the predicted end of each
running job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytide.core.objects.gang import Lease
from raytide.core.objects.job import JobState
from raytide.core.objects.node import plus
from raytide.core.objects.plan import Admit
from raytide.core.objects.snapshot import NodeView, Snapshot
from raytide.queue.admission.scheduler import schedule, within_member_cap

MOST_DECISIONS = 2000
"""The most decisions about single jobs; a long queue gets a shorter forecast."""


def forecast_starts(snapshot: Snapshot) -> Mapping[str, float]:
    """Returns the seconds until each queued job is admitted, provided that no new job arrives. Jobs whose start cannot
    be predicted are left out.
    """
    jobs = {job.id: job for job in snapshot.jobs}
    ends = sorted(
        (left, lease.job_id)
        for lease in snapshot.leases
        if lease.job_id in jobs and (left := jobs[lease.job_id].remaining_s(snapshot.at_s)) is not None
    )
    found: dict[str, float] = {}
    now = snapshot
    for in_s, job_id in [(0.0, ""), *ends][: max(2, MOST_DECISIONS // (1 + len(jobs)))]:
        now = _ended(replace(now, at_s=snapshot.at_s + in_s), job_id)
        new = [action for action in schedule(within_member_cap(now)[0]) if isinstance(action, Admit)]
        found.update({action.job_id: in_s for action in new})
        now = _started(now, new)
    return found


def _ended(snapshot: Snapshot, job_id: str) -> Snapshot:
    """Returns the snapshot without that job and its lease; the lease's resources are free in it."""
    over = [lease for lease in snapshot.leases if lease.job_id == job_id]
    return replace(
        snapshot,
        jobs=tuple(job for job in snapshot.jobs if job.id != job_id),
        leases=tuple(lease for lease in snapshot.leases if lease.job_id != job_id),
        nodes=tuple(_freed(view, over) for view in snapshot.nodes),
    )


def _freed(view: NodeView, over: list[Lease]) -> NodeView:
    free = view.available
    for lease in over:
        for member in lease.members:
            if member.node_id == view.node.id and member.is_usable:
                free = plus(free, lease.shape.resources)
    return view if free is view.available else replace(view, available=free)


def _started(snapshot: Snapshot, new: list[Admit]) -> Snapshot:
    """Returns the snapshot with the leases of these admissions."""
    ids = {action.job_id for action in new}
    return replace(
        snapshot,
        jobs=tuple(replace(j, state=JobState.ADMITTED) if j.id in ids else j for j in snapshot.jobs),
        leases=(*snapshot.leases, *(action.lease for action in new)),
        next_lease=snapshot.next_lease + len(new),
    )
