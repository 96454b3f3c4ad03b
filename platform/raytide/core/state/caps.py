"""Limits on the jobs, shapes and endpoints of one team. They are checked in the transaction that adds a job or
endpoint."""

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
"""A text that occurs exactly once in each shape of a stored spec."""
_LIVE = [state for state in JobState if state not in FINAL_STATES]


def check_live_jobs(c: sa.Connection, spec: JobSpec, most: int) -> None:
    """Raises QuotaError if the team cannot add this job. Either the team has `most` unfinished jobs already, or the
    specs of these jobs have too many bytes or shapes together. A job with one shape is never refused for its shapes."""
    team, text = spec.team, sa.cast(t.jobs.c.spec, sa.Text)
    size = sa.func.coalesce(sa.func.sum(sa.func.length(text)), 0)
    # As text: the databases' JSON functions fail on values that earlier releases may have stored.
    rest = sa.func.coalesce(sa.func.sum(sa.func.length(sa.func.replace(text, _OF_A_SHAPE, ""))), 0)
    query = sa.select(sa.func.count(), size, rest).where(t.jobs.c.state.in_(_LIVE), t.jobs.c.team == team)
    count, spec_bytes, rest_bytes = c.execute(query).one()
    shapes = (spec_bytes - rest_bytes) // len(_OF_A_SHAPE) + len(spec.gang.shapes)
    if count >= most:
        raise QuotaError(
            f"team {team} has {count} unfinished jobs; {most} are allowed.",
            hint="Wait for some to finish, or stop some; metadata.raytide.max_live_jobs sets the limit.",
        )
    if shapes > bounds.LIVE_SHAPES and len(spec.gang.shapes) > 1:
        raise QuotaError(
            f"the unfinished jobs of team {team} and this one have {shapes} shapes; {bounds.LIVE_SHAPES} are allowed.",
            hint="Give each job fewer shapes; a job with a single shape is accepted.",
        )
    if spec_bytes >= bounds.LIVE_SPEC_BYTES:
        raise QuotaError(
            f"the specs of team {team}'s unfinished jobs take {spec_bytes >> 20} MiB; "
            f"{bounds.LIVE_SPEC_BYTES >> 20} are allowed.",
            hint="Wait for some to finish, or send smaller specs: put large texts into the job's package.",
        )


def check_live_endpoints(c: sa.Connection, spec: ServeSpec) -> None:
    """Raises QuotaError if the team already has the largest allowed number of endpoints. Also raises QuotaError if the
    team's endpoints, including this one, could together have too many replicas.
    """
    e = t.endpoints.c
    live = sa.and_(e.state != EndpointState.DELETED, e.team == spec.team, e.name != spec.name)
    replicas = [_most_members(row.spec) for row in c.execute(sa.select(e.spec).where(live))]
    if len(replicas) >= bounds.LIVE_ENDPOINTS:
        raise QuotaError(
            f"team {spec.team} has {len(replicas)} endpoints; {bounds.LIVE_ENDPOINTS} are allowed.",
            hint="Delete an endpoint.",
        )
    if replicas and (total := sum(replicas) + spec.members * spec.replicas.max) > bounds.TEAM_REPLICAS:
        raise QuotaError(
            f"the endpoints of team {spec.team} could have {total} replicas, counting each member; "
            f"{bounds.TEAM_REPLICAS} are allowed.",
            hint="Lower replicas.max, or delete an endpoint.",
        )


def _most_members(spec: object) -> int:
    """Returns the largest number of member processes that a stored spec allows; 1 if the spec cannot be read."""
    try:
        return int(spec["members"]) * int(spec["replicas"]["max"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return 1


def check_progress(job_id: str, merged: Mapping[str, object]) -> None:
    """Raises UsageError if a job's progress is too large to be read on every tick. `merged` is the progress with the
    new report included."""
    if len(merged) > bounds.MOST_REPORTED:
        raise UsageError(
            f"{job_id} has reported {len(merged)} values; {bounds.MOST_REPORTED} are kept.",
            hint="Reuse the names of earlier reports.",
        )
    if len(json.dumps(merged, ensure_ascii=False).encode(errors="replace")) > bounds.MOST_REPORTED_BYTES:
        raise UsageError(
            f"the progress of {job_id} is larger than {bounds.MOST_REPORTED_BYTES >> 10} KiB.",
            hint="Report fewer or shorter values.",
        )
