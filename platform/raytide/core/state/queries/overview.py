"""Queries for the web page, which repeats some of them every second. They return small rows without specs, sums over
time, and pages of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from raytide.core.objects.job import FINAL_STATES, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.objects.node import Node
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.queries.live import JOB_IS_LIVE

_LONGEST_ENTRY_US = 600_000_000
"""The longest entry that queries expect, in microseconds. Intervals are booked every minute; only a controller that was
away for a while books longer ones.
"""


class JobRow(NamedTuple):
    """The columns of a job that identify it, and the columns that change during its life."""

    id: str
    name: str
    kind: str
    team: str
    user: str
    state: str
    submitted_at_s: float
    admitted_at_s: float | None
    started_at_s: float | None
    ended_at_s: float | None
    reason: str
    restarts: int
    preemptions: int
    stop_requested: bool
    progress: Mapping[str, float | int | str]


class NodeHours(NamedTuple):
    """The node-hours, and their cost, within one time step. They are counted separately for each kind of use, team,
    node type and market."""

    step: int
    """The number of the step, counted from the begin of the query's time range."""
    kind: EntryKind
    job_kind: str
    """The kind of the job; empty for other entries, and for a job that was removed."""
    team: str
    node_type: str
    market: str
    node_h: float
    amount_micro_usd: int


class OverviewQueries(DatabaseAccess):
    def jobs(self, *, ended_after_s: float, limit: int) -> list[JobRow]:
        """Returns at most `limit` jobs, newest first: the unfinished jobs, and the jobs that ended after
        `ended_after_s`. If there are more, jobs that hold a gang are kept first, then queued ones.
        """
        j = t.jobs.c
        shown = sa.or_(JOB_IS_LIVE, j.ended_at_s > ended_after_s)
        rank = sa.case((j.state.in_(FINAL_STATES), 2), (j.state == JobState.QUEUED, 1), else_=0)
        query = sa.select(*(j[name] for name in JobRow._fields)).where(shown)
        found = [JobRow(*row) for row in self._db.rows(query.order_by(rank, j.number.desc()).limit(limit))]
        return sorted(found, key=lambda job: codec.number_of(job.id), reverse=True)

    def plan_number(self) -> int:
        """Returns the number of the newest stored plan, or 0 if there is no plan."""
        with self._db.read() as c:
            return int(c.execute(sa.select(sa.func.max(t.plans.c.number))).scalar() or 0)

    def node_hours(self, from_us: int, until_us: int, step_us: int) -> list[NodeHours]:
        """Returns the summed node-hours and costs of the entries that began in [from_us, until_us), by time step.
        Entries with the price 0 are left out, because node-hours are computed as the cost divided by the node's
        price."""
        e, n, j = t.entries.c, t.nodes.c, t.jobs.c
        step = ((e.from_us - from_us) // step_us).label("step")
        job_kind = sa.func.coalesce(j.kind, "").label("job_kind")
        keys = (step, e.kind, job_kind, e.team, n.type, n.market)
        hours = sa.func.sum(sa.cast(e.amount_micro_usd, sa.Double) / e.price_micro_usd_h)
        joined = t.entries.join(t.nodes, e.node_id == n.id).outerjoin(t.jobs, sa.and_(e.subject == j.id))
        query = sa.select(*keys, hours, sa.func.sum(e.amount_micro_usd)).select_from(joined).group_by(*keys)
        query = query.where(e.from_us >= from_us, e.from_us < until_us, e.price_micro_usd_h > 0)
        with self._db.read() as c:
            return [
                NodeHours(int(row[0]), EntryKind(row[1]), row[2], row[3], row[4], row[5], float(row[6]), int(row[7]))
                for row in c.execute(query)
            ]

    def booked_since(self, number: int | None) -> tuple[int, int | None]:
        """Returns the number of the newest ledger entry, and the earliest begin of the entries after `number`, in
        microseconds. The begin is None if there are no such entries, or if `number` is None."""
        e = t.entries.c
        with self._db.read() as c:
            newest = int(c.execute(sa.select(sa.func.max(e.number))).scalar() or 0)
            if number is None:
                return newest, None
            return newest, c.execute(sa.select(sa.func.min(e.from_us)).where(e.number > number)).scalar()

    def nodes_at(self, at_s: float) -> tuple[Node, ...]:
        """Returns the nodes that existed at this time, oldest first. Each record shows the node's present state, not
        its state at this time.
        """
        n = t.nodes.c
        query = t.nodes.select().where(n.requested_at_s <= at_s).order_by(n.number)
        query = query.where(sa.or_(n.ended_at_s.is_(None), n.ended_at_s > at_s))
        return tuple(codec.node(row) for row in self._db.rows(query))

    def entries_at(self, at_us: int) -> tuple[Entry, ...]:
        """Returns the ledger entries that cover this moment. They show which job or endpoint held each node."""
        e = t.entries.c
        query = t.entries.select().where(e.from_us <= at_us, e.to_us > at_us, e.from_us > at_us - _LONGEST_ENTRY_US)
        return tuple(codec.entry(row) for row in self._db.rows(query.order_by(e.number)))

    def entries(
        self,
        *,
        subject: str | None = None,
        node_id: str | None = None,
        team: str | None = None,
        until_us: int | None = None,
        limit: int,
    ) -> tuple[Entry, ...]:
        """Returns a page of the ledger, newest first."""
        e = t.entries.c
        given = {e.subject: subject, e.node_id: node_id, e.team: team}
        query = t.entries.select().where(*(column == value for column, value in given.items() if value is not None))
        if subject is not None:
            query = query.where(e.kind.in_(EntryKind))  # an index has both
        if until_us is not None:
            query = query.where(e.from_us < until_us)
        return tuple(codec.entry(row) for row in self._db.rows(query.order_by(e.from_us.desc(), e.number).limit(limit)))
