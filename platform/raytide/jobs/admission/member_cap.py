"""A limit on the members of one team's leases: every tick visits each of them, however small."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from raytide.core.objects.job import Job, JobState
from raytide.core.objects.plan import Wait
from raytide.core.objects.snapshot import Snapshot


def within_member_cap(seen: Snapshot) -> tuple[Snapshot, tuple[Wait, ...]]:
    """Returns the snapshot with those queued jobs that may be considered now, and a Wait for each other one.

    A team's jobs are counted in order of submission, so a large one is not passed for ever by smaller ones behind it.
    """
    most = seen.team_members
    if most is None:
        return seen, ()
    teams = {job.id: job.spec.team for job in seen.jobs}
    held: Counter[str] = Counter()
    for lease in seen.leases:
        held[teams.get(lease.job_id, "")] += len(lease.members)
    waits: list[Wait] = []
    for job in seen.jobs:
        if job.state is not JobState.QUEUED or job.stop_requested:
            continue
        team, members = job.spec.team, max(shape.members for shape in job.spec.gang.shapes)
        if held[team] and held[team] + members > most:
            waits.append(_wait(job, held[team], most))
            held[team] = most
        else:
            held[team] += members
    if not waits:
        return seen, ()
    over = {wait.subject for wait in waits}
    return replace(seen, jobs=tuple(job for job in seen.jobs if job.id not in over)), tuple(waits)


def _wait(job: Job, held: int, most: int) -> Wait:
    return Wait(
        job.id,
        "cap",
        f"the jobs of team {job.spec.team} that run or go before it have {held} members; {most} are allowed.",
        "Use fewer, larger members, or wait: metadata.raytide.limits.team_members sets the limit.",
    )
