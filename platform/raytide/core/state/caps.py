"""Caps on what one team may have in the store at a time, checked inside the transaction that would add to it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa

from raytide.core import bounds
from raytide.core.endpoint import EndpointState
from raytide.core.errors import QuotaError, UsageError
from raytide.core.job import FINAL_STATES, JobState
from raytide.core.state import tables as t

_LIVE = [state for state in JobState if state not in FINAL_STATES]


def check_live_jobs(c: sa.Connection, team: str, most: int) -> None:
    """QuotaError when the team has `most` jobs that are not over, or their specs are too large together."""
    size = sa.func.coalesce(sa.func.sum(sa.func.length(sa.cast(t.jobs.c.spec, sa.Text))), 0)
    query = sa.select(sa.func.count(), size).where(t.jobs.c.state.in_(_LIVE), t.jobs.c.team == team)
    count, spec_bytes = c.execute(query).one()
    if count >= most:
        raise QuotaError(
            f"team {team} has {count} jobs that are not over; {most} are allowed.",
            hint="Wait until some are over, or stop some; metadata.raytide.max_live_jobs sets how many.",
        )
    if spec_bytes >= bounds.LIVE_SPEC_BYTES:
        raise QuotaError(
            f"the specs of team {team}'s jobs that are not over take {spec_bytes >> 20} MiB; "
            f"{bounds.LIVE_SPEC_BYTES >> 20} are allowed.",
            hint="Wait until some are over, or send smaller ones: large texts belong into the job's package.",
        )


def check_live_endpoints(c: sa.Connection, team: str) -> None:
    """QuotaError when the team has as many endpoints as it may."""
    states = t.endpoints.c.state != EndpointState.DELETED
    count = c.execute(sa.select(sa.func.count()).where(states, t.endpoints.c.team == team)).scalar_one()
    if count >= bounds.LIVE_ENDPOINTS:
        raise QuotaError(
            f"team {team} has {count} endpoints; {bounds.LIVE_ENDPOINTS} are allowed.", hint="Delete one of them."
        )


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
