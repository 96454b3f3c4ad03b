"""Caps on what one team may have in the store at a time, checked inside the transaction that would add to it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa

from raytide.core import bounds
from raytide.core.errors import QuotaError, UsageError
from raytide.core.objects.endpoint import EndpointState, ServeSpec
from raytide.core.objects.job import FINAL_STATES, JobSpec, JobState
from raytide.core.state import tables as t

_OF_A_SHAPE = '"min_members"'
"""What each shape of a stored spec holds once."""
_LIVE = [state for state in JobState if state not in FINAL_STATES]


def check_live_jobs(c: sa.Connection, spec: JobSpec, most: int) -> None:
    """QuotaError when the team has `most` jobs that are not over, or with this one their specs hold too much."""
    team, text = spec.team, sa.cast(t.jobs.c.spec, sa.Text)
    size = sa.func.coalesce(sa.func.sum(sa.func.length(text)), 0)
    # As text: a database's functions for JSON fail on what an earlier release may have stored.
    rest = sa.func.coalesce(sa.func.sum(sa.func.length(sa.func.replace(text, _OF_A_SHAPE, ""))), 0)
    query = sa.select(sa.func.count(), size, rest).where(t.jobs.c.state.in_(_LIVE), t.jobs.c.team == team)
    count, spec_bytes, rest_bytes = c.execute(query).one()
    shapes = (spec_bytes - rest_bytes) // len(_OF_A_SHAPE) + len(spec.gang.shapes)
    if count >= most:
        raise QuotaError(
            f"team {team} has {count} jobs that are not over; {most} are allowed.",
            hint="Wait until some are over, or stop some; metadata.raytide.max_live_jobs sets how many.",
        )
    if shapes > bounds.LIVE_SHAPES and len(spec.gang.shapes) > 1:
        raise QuotaError(
            f"the jobs of team {team} that are not over have {shapes} shapes together with this one's; "
            f"{bounds.LIVE_SHAPES} are allowed.",
            hint="Give each job fewer shapes to choose from; one with a single shape is taken.",
        )
    if spec_bytes >= bounds.LIVE_SPEC_BYTES:
        raise QuotaError(
            f"the specs of team {team}'s jobs that are not over take {spec_bytes >> 20} MiB; "
            f"{bounds.LIVE_SPEC_BYTES >> 20} are allowed.",
            hint="Wait until some are over, or send smaller ones: large texts belong into the job's package.",
        )


def check_live_endpoints(c: sa.Connection, spec: ServeSpec) -> None:
    """QuotaError when the team has as many endpoints as it may, or with this one too many replicas."""
    e = t.endpoints.c
    live = sa.and_(e.state != EndpointState.DELETED, e.team == spec.team, e.name != spec.name)
    replicas = [_most_members(row.spec) for row in c.execute(sa.select(e.spec).where(live))]
    if len(replicas) >= bounds.LIVE_ENDPOINTS:
        raise QuotaError(
            f"team {spec.team} has {len(replicas)} endpoints; {bounds.LIVE_ENDPOINTS} are allowed.",
            hint="Delete one of them.",
        )
    if replicas and (asked := sum(replicas) + spec.members * spec.replicas.max) > bounds.TEAM_REPLICAS:
        raise QuotaError(
            f"the endpoints of team {spec.team} might have {asked} replicas together, each member counted; "
            f"{bounds.TEAM_REPLICAS} are allowed.",
            hint="Lower replicas.max, or delete an endpoint.",
        )


def _most_members(spec: object) -> int:
    """Of a stored spec, which may be one that nobody can read any more."""
    try:
        return int(spec["members"]) * int(spec["replicas"]["max"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return 1


def check_progress(job_id: str, merged: Mapping[str, object]) -> None:
    """UsageError when what a job has reported so far is too much to be read at every tick."""
    if len(merged) > bounds.MOST_REPORTED:
        raise UsageError(
            f"{job_id} has reported {len(merged)} values; {bounds.MOST_REPORTED} are kept.",
            hint="Report under the same names again.",
        )
    if len(json.dumps(merged)) > bounds.MOST_REPORTED_BYTES:
        raise UsageError(
            f"the progress of {job_id} is larger than {bounds.MOST_REPORTED_BYTES >> 10} KiB.", hint="Report less."
        )
