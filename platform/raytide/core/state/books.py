"""What the store keeps for the ledger, to read. It is written by `Store.commit` alone, together with what caused it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from raytide.core.entry import CostBy, Entry, EntryKind, OpenInterval
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.database import Database


class Books:
    def __init__(self, database: Database) -> None:
        self._db = database

    def entries(
        self, *, node_id: str | None = None, subject: str | None = None, ending_after_us: int = 0
    ) -> tuple[Entry, ...]:
        """In the order in which they were booked."""
        query = t.entries.select().where(t.entries.c.to_us > ending_after_us).order_by(t.entries.c.number)
        if node_id is not None:
            query = query.where(t.entries.c.node_id == node_id)
        if subject is not None:
            query = query.where(t.entries.c.subject == subject)
        with self._db.read() as c:
            return tuple(codec.entry(row) for row in c.execute(query))

    def intervals(self) -> tuple[OpenInterval, ...]:
        """What is not booked yet, one per node that the provider bills."""
        with self._db.read() as c:
            return tuple(codec.interval(row) for row in c.execute(t.open_intervals.select()))

    def booked(self, by: CostBy, *, since_us: int = 0, only: Sequence[str] | None = None) -> dict[str, int]:
        """Micro-dollars of the entries that began at `since_us` or later, by one of their columns: all of its values,
        or `only` these."""
        e = t.entries.c
        key = {"kind": e.kind, "job": e.subject, "endpoint": e.subject, "team": e.team, "node": e.node_id}[by]
        query = sa.select(key, sa.func.sum(e.amount_micro_usd)).where(e.from_us >= since_us).group_by(key)
        if by in ("job", "endpoint"):
            query = query.where(e.kind == EntryKind(by))
        if only is not None:
            query = query.where(key.in_(only))
        with self._db.read() as c:
            return {row[0]: int(row[1]) for row in c.execute(query)}

    def lines(self) -> dict[tuple[str, str, str], int]:
        """Micro-dollars of all entries by (kind, subject, team)."""
        e = t.entries.c
        query = sa.select(e.kind, e.subject, e.team, sa.func.sum(e.amount_micro_usd)).group_by(
            e.kind, e.subject, e.team
        )
        with self._db.read() as c:
            return {(str(row[0]), row[1], row[2]): int(row[3]) for row in c.execute(query)}
