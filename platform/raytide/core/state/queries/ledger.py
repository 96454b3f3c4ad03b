"""Queries that read the ledger. Only `Store.commit` writes the ledger, in the same transaction as the change that
causes an entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from raytide.core.money import month_of
from raytide.core.objects.ledger_entry import DAY_US, CostBy, Entry, EntryKind, Line, OpenInterval, Spent
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.queries.jobs import chunked

_MOST_ADDED = 10_000
"""The most entries that are added one by one to the sums of a month; beyond that, the totals are summed again."""


class _Summed(NamedTuple):
    month: str
    last: int
    """The number of the last entry in the sums."""
    teams: Mapping[str, int]


class LedgerQueries(DatabaseAccess):
    _summed: _Summed | None = None

    def entries(
        self, *, node_id: str | None = None, subject: str | None = None, ending_after_us: int = 0
    ) -> tuple[Entry, ...]:
        """Returns ledger entries in the order in which they were booked."""
        query = t.entries.select().where(t.entries.c.to_us > ending_after_us).order_by(t.entries.c.number)
        if node_id is not None:
            query = query.where(t.entries.c.node_id == node_id)
        if subject is not None:
            query = query.where(t.entries.c.kind.in_(EntryKind), t.entries.c.subject == subject)  # an index has both
        return tuple(codec.entry(row) for row in self._db.rows(query))

    def intervals(self) -> tuple[OpenInterval, ...]:
        """Returns the open intervals. Each billed node has one open interval, whose cost is not booked yet."""
        return tuple(codec.interval(row) for row in self._db.rows(t.open_intervals.select()))

    def booked(self, by: CostBy, *, only: Sequence[str] | None = None, team: str | None = None) -> dict[str, int]:
        """Returns the sums of ledger entries in micro-dollars, by kind, job, endpoint, team or node.

        `only` lists the kinds, jobs, endpoints, teams or nodes to return. `team` restricts the sums to the entries
        of one team. The restriction is needed because an endpoint's name may later belong to another team.
        """
        s = t.entries.c if by == "node" else t.totals.c
        key = {"kind": s.kind, "team": s.team, "node": t.entries.c.node_id}.get(by, s.subject)
        query = sa.select(key, sa.func.sum(s.amount_micro_usd)).group_by(key)
        if by in ("job", "endpoint"):
            query = query.where(s.kind.in_(_OF_JOB) if by == "job" else s.kind == EntryKind.ENDPOINT)
            query = query.where(s.subject != "")
        if team is not None:
            query = query.where(s.team == team)
        some = (query,) if only is None else (query.where(key.in_(part)) for part in chunked(only))
        with self._db.read() as c:
            return {row[0]: int(row[1]) for each in some for row in c.execute(each)}

    def spent(self, jobs: Sequence[str], month: str) -> Spent:
        """Returns what each of these jobs has cost in total and in `month` (such as `2026-11`), and what each team has
        spent in `month`, all in micro-dollars. The cost of a job includes the cost of its lost work.
        """
        s = t.totals.c
        amount = sa.func.sum(s.amount_micro_usd)
        in_month = sa.func.sum(sa.case((s.month == month, s.amount_micro_usd), else_=0))
        of_job = sa.select(s.subject, amount, in_month).where(s.kind.in_(_OF_JOB)).group_by(s.subject)
        with self._db.read() as c:
            found = [row for part in chunked(jobs) for row in c.execute(of_job.where(s.subject.in_(part)))]
            return Spent(
                jobs={row[0]: int(row[1]) for row in found},
                jobs_month={row[0]: int(row[2]) for row in found},
                teams_month=self._teams_month(c, month),
            )

    def _teams_month(self, c: sa.Connection, month: str) -> dict[str, int]:
        """Returns what each team has spent in the month. The month's totals have a row for each job, so they are summed
        only once; later calls add the entries that were booked since.
        """
        e, s, before = t.entries.c, t.totals.c, self._summed
        last = int(c.execute(sa.select(sa.func.max(e.number))).scalar() or 0)
        if before is not None and before.month == month and 0 <= last - before.last <= _MOST_ADDED:
            sums = defaultdict(int, before.teams)
            new = sa.select(e.team, e.from_us, e.amount_micro_usd).where(e.number > before.last)
            for team, from_us, amount in c.execute(new):
                if month_of(from_us) == month:
                    sums[team] += int(amount)
        else:
            of_team = sa.select(s.team, sa.func.sum(s.amount_micro_usd)).where(s.month == month).group_by(s.team)
            sums = defaultdict(int, {row[0]: int(row[1]) for row in c.execute(of_team)})
        self._summed = _Summed(month, last, sums)
        return dict(sums)

    def lines(self, *, since_us: int = 0, with_node: bool = False, with_day: bool = False) -> tuple[Line, ...]:
        """Returns sums in micro-dollars of the ledger entries that began at `since_us` or later. The sums are grouped
        by kind, subject and team. With `with_node`, they are also grouped by node, and with `with_day` by day (UTC).
        """
        e = t.entries.c
        if not (since_us or with_node or with_day):
            e = t.totals.c
        keys: list[sa.ColumnElement[Any]] = [e.kind, e.subject, e.team]
        keys.append(e.node_id if with_node else sa.literal("").label("node"))
        keys.append((e.from_us // DAY_US).label("day") if with_day else sa.literal(0).label("day"))
        query = sa.select(*keys, sa.func.sum(e.amount_micro_usd), sa.func.sum(e.energy_mj)).group_by(*keys)
        if since_us:
            query = query.where(e.from_us >= since_us)
        with self._db.read() as c:
            return tuple(
                Line(EntryKind(row[0]), row[1], row[2], row[3], int(row[4]), int(row[5]), energy_mj=int(row[6]))
                for row in c.execute(query)
            )

    def losses(self, *, since_us: int = 0) -> tuple[Line, ...]:
        """Returns the cost of jobs' lost work, which is booked as waste. It is grouped by job, node, day (UTC) and
        cause."""
        e = t.entries.c
        keys = (e.kind, e.subject, e.team, e.node_id, (e.from_us // DAY_US).label("day"), e.cause)
        query = sa.select(*keys, sa.func.sum(e.amount_micro_usd)).group_by(*keys)
        query = query.where(e.kind == EntryKind.WASTE, e.subject != "", e.from_us >= since_us)
        with self._db.read() as c:
            return tuple(
                Line(EntryKind(row[0]), row[1], row[2], row[3], int(row[4]), int(row[6]), row[5])
                for row in c.execute(query)
            )


_OF_JOB = (EntryKind.JOB, EntryKind.WASTE)
"""Kinds that count as a job's cost; waste without a subject belongs to no job."""
