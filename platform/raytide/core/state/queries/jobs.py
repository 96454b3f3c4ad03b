"""Queries on jobs and leases. They read few rows even if there are many jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from raytide.core.errors import ConflictError, NotFoundError
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import NodeState
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.queries.live import JOB_IS_LIVE, LEASE_IS_LIVE

T = TypeVar("T")

_HELD = (JobState.ADMITTED, JobState.RUNNING, JobState.STOPPING)

MOST_NAMED = 1000
"""The most values in the IN of one statement, because databases limit them (SQLite 32,766 or 250,000, PostgreSQL
65,535).
"""

REMOVED_JOBS = "removed_jobs"
"""The counter of jobs that were deleted."""

CHANGES = "changes"
"""The counter of commits that changed a job or a lease. `changed` in a row is the number of the last such commit."""


class LeaseKey(NamedTuple):
    """The state of a job and of its newest lease. The driver's pending poll is answered as soon as this state
    changes.
    """

    job_state: str
    lease_id: str = ""
    lease_state: str = ""
    epoch: int = -1


class HeldJob(NamedTuple):
    """A job that holds a gang, and the progress that it reported."""

    id: str
    team: str
    kind: str
    restarts: int
    progress: Mapping[str, object]


class WaitingJob(NamedTuple):
    id: str
    team: str
    since_s: float


class NodeEnds(NamedTuple):
    """The numbers of nodes of one node type, zone and market that ended although raytide did not want them to end.
    `taken_back` also includes nodes that still run but whose end the provider has announced.
    """

    type: str
    zone: str
    market: str
    lost: int
    """Nodes that had joined Ray."""
    taken_back: int
    """Nodes whose end the provider announced, including those that still run."""
    failed: int
    """Nodes that never joined Ray."""


class JobQueries(DatabaseAccess):
    def jobs(self) -> dict[str, int]:
        """Returns the number of stored jobs, by state."""
        query = sa.select(t.jobs.c.state, sa.func.count()).group_by(t.jobs.c.state)
        return {str(row[0]): int(row[1]) for row in self._db.rows(query)}

    def live_jobs(self) -> dict[tuple[str, str, str], int]:
        """Returns the number of unfinished jobs by (kind, team, state)."""
        j = t.jobs.c
        query = sa.select(j.kind, j.team, j.state, sa.func.count()).group_by(j.kind, j.team, j.state)
        with self._db.read() as c:
            rows = c.execute(query.where(JOB_IS_LIVE))
            return {(str(row[0]), row[1], str(row[2])): int(row[3]) for row in rows}

    def live_members(self) -> dict[str, int]:
        """Counts the members of unreleased leases. Returns the number of members in each member state."""
        m = t.members.c
        held = sa.select(t.leases.c.id).where(LEASE_IS_LIVE)
        query = sa.select(m.state, sa.func.count()).where(m.lease_id.in_(held)).group_by(m.state)
        return {str(row[0]): int(row[1]) for row in self._db.rows(query)}

    def held_jobs(self, most: int = 1000) -> list[HeldJob]:
        """Returns at most `most` jobs that hold a gang, newest first."""
        j = t.jobs.c
        query = sa.select(j.id, j.team, j.kind, j.restarts, j.progress).order_by(j.number.desc()).limit(most)
        return [HeldJob(*row) for row in self._db.rows(query.where(j.state.in_(_HELD)))]

    def longest_waiting(self, most: int = 5) -> list[WaitingJob]:
        """Returns the jobs that have waited longest. The wait of a job begins with its last preemption, or with its
        submission if the job was never preempted.
        """
        j = t.jobs.c
        since_s = sa.func.coalesce(j.preempted_at_s, j.submitted_at_s)
        query = sa.select(j.id, j.team, since_s).where(j.state == JobState.QUEUED).order_by(since_s).limit(most)
        return [WaitingJob(*row) for row in self._db.rows(query)]

    def node_ends(self, taken_back: str, by_provider: str, cancelled: str) -> list[NodeEnds]:
        """Returns the counts of nodes that ended, or will end, without a decision of raytide. The counts are grouped by
        node type, zone and market.

        Each argument is a text that occurs in a node's `reason`: `taken_back` if the provider takes the node back,
        `by_provider` if the provider has ended the node, and `cancelled` if raytide has cancelled the node's launch.
        """
        n = t.nodes.c
        was_taken, is_gone = n.reason.contains(taken_back), n.state == NodeState.GONE
        was_lost = sa.or_(was_taken, n.reason.contains(by_provider), n.lost_at_s.is_not(None))
        conditions = (
            sa.and_(is_gone, n.ready_at_s.is_not(None), was_lost),
            was_taken,
            sa.and_(is_gone, n.ready_at_s.is_(None), sa.not_(n.reason.startswith(cancelled))),
        )
        sums = (sa.func.sum(sa.case((condition, 1), else_=0)) for condition in conditions)
        query = sa.select(n.type, n.zone, n.market, *sums).group_by(n.type, n.zone, n.market)
        return [NodeEnds(*row[:3], *map(int, row[3:])) for row in self._db.rows(query)]

    def oldest_s(self, share: float, now_s: float) -> float:
        """Returns an age in seconds. The fraction `share` of all jobs is older than this age. The age of an ended job
        is its age at its end.
        """
        c_, j = t.counters.c, t.jobs.c
        with self._db.read() as c:
            counts = {
                row.name: row.next
                for row in c.execute(sa.select(c_.name, c_.next).where(c_.name.in_(("job", REMOVED_JOBS))))
            }
            older = int(share * (counts.get("job", 1) - 1 - counts.get(REMOVED_JOBS, 0)))
            over = sa.select(j.took_s).where(j.took_s.is_not(None)).order_by(j.took_s.desc()).limit(older + 1)
            live = sa.select(now_s - j.submitted_at_s).where(j.took_s.is_(None))
            ages = sorted((*c.execute(over).scalars(), *c.execute(live).scalars()), reverse=True)
        return float(ages[older]) if older < len(ages) else 0.0

    def version(self) -> int:
        """Returns the number of the newest commit that touched a job or a lease."""
        with self._db.read() as c:
            return int(c.execute(_VERSION).scalar() or 1) - 1

    def job_owner(self, job_id: str) -> tuple[str, str, JobState] | None:
        """Returns a job's user, team and state. Every request of a driver runs this query. To keep it fast, it does not
        read the job's spec.
        """
        j = t.jobs.c
        row = self._db.first(sa.select(j.user, j.team, j.state).where(j.id == job_id))
        return None if row is None else (row[0], row[1], JobState(row[2]))

    def with_key(self, prefix: str, user: str, team: str) -> list[str]:
        """Returns the ids of the user's unfinished jobs in the team whose keys begin with `prefix`."""
        j = t.jobs.c
        query = sa.select(j.id).where(JOB_IS_LIVE, j.team == team, j.user == user).order_by(j.number)
        return [row[0] for row in self._db.rows(query.where(j.client_key.startswith(prefix, autoescape=True)))]

    def touched_since(self, version: int) -> set[str]:
        """Returns the ids of the jobs that a commit later than `version` changed. A change of a job's lease counts as
        well."""
        j, x = t.jobs.c, t.leases.c
        both = sa.union(sa.select(j.id).where(j.changed > version), sa.select(x.job_id).where(x.changed > version))
        with self._db.read() as c:
            return {str(job_id) for job_id in c.execute(both).scalars()}

    def lease_keys(self, job_ids: Iterable[str]) -> dict[str, LeaseKey]:
        """Returns the LeaseKey of each job with one of these ids, by job id. Ids of jobs that do not exist are left
        out."""
        j, x = t.jobs.c, t.leases.c
        found: dict[str, LeaseKey] = {}
        with self._db.read() as c:
            for part in chunked(job_ids):
                newest = sa.select(sa.func.max(x.number)).where(x.job_id.in_(part)).group_by(x.job_id)
                leases = sa.select(x.job_id, x.id, x.state, x.epoch).where(x.number.in_(newest))
                held = {row[0]: (row[1], str(row[2]), int(row[3])) for row in c.execute(leases)}
                for job_id, state in c.execute(sa.select(j.id, j.state).where(j.id.in_(part))):
                    found[job_id] = LeaseKey(str(state), *held.get(job_id, ()))
        return found

    def leases(self, job_ids: Iterable[str]) -> dict[str, Lease]:
        """Returns the newest lease of each job, by job id. The newest lease may be released already."""
        of_job = t.leases.c.job_id
        newest = sa.select(sa.func.max(t.leases.c.number)).group_by(of_job)
        with self._db.read() as c:
            return {
                lease.job_id: lease
                for part in chunked(job_ids)
                for lease in leases_where(c, t.leases.c.number.in_(newest.where(of_job.in_(part))))
            }


_VERSION = sa.select(t.counters.c.next).where(t.counters.c.name == CHANGES)


def chunked(values: Iterable[T]) -> Iterator[list[T]]:
    """Yields the distinct values in lists that are short enough for one SQL statement."""
    left = iter(dict.fromkeys(values))
    while part := list(islice(left, MOST_NAMED)):
        yield part


def leases_where(c: sa.Connection, which: sa.ColumnElement[bool]) -> tuple[Lease, ...]:
    """Returns the leases that satisfy `which`, in the order of admission. It uses two statements for any number of
    leases."""
    rows = c.execute(t.leases.select().where(which).order_by(t.leases.c.number)).all()
    ids = sa.select(t.leases.c.id).where(which)
    by_index = t.members.select().where(t.members.c.lease_id.in_(ids)).order_by(t.members.c.index)
    members: dict[str, list[sa.Row[Any]]] = {row.id: [] for row in rows}
    for member in c.execute(by_index):
        members[member.lease_id].append(member)
    return tuple(codec.lease(row, members[row.id]) for row in rows)


def job_of_key(c: sa.Connection, team: str, key: str | None, digest: str | None) -> Job | None:
    """Returns the job that the team has submitted with this key, or None. Raises ConflictError if that request had
    another `digest`.
    """
    which = t.jobs.select().where(t.jobs.c.team == team, t.jobs.c.client_key == key)
    if key is None or (row := c.execute(which).first()) is None:
        return None
    if row.client_digest not in (None, digest):
        raise ConflictError(
            f"the key {key} of team {team} was used for {row.id}, with another request.",
            hint="Use a new key for a new job.",
        )
    return codec.job(row)


def no_job(job_id: str) -> NotFoundError:
    return NotFoundError(f"job {job_id} does not exist.", hint="`raytide ps` lists jobs.")


def no_endpoint(name: str) -> NotFoundError:
    return NotFoundError(f"endpoint {name} does not exist.", hint="`raytide status` lists endpoints.")
