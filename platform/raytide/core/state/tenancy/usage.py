"""Queries on the usage of single requests, and the deletion of old usage."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from raytide.core.money import MICRO
from raytide.core.objects.api_key import UsageBy, UsageRow, UsageSum
from raytide.core.objects.ledger_entry import DAY_US
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.tenancy.audit import BATCH, USAGE_PRUNED, add_entry

_DAY_S = DAY_US // MICRO


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Selects requests. A field that is None matches all."""

    key: str | None = None
    team: str | None = None
    user: str | None = None
    model: str | None = None
    since_s: float = 0.0
    until_s: float | None = None

    def applied_to(self, query: sa.Select[Any]) -> sa.Select[Any]:
        u = t.usage.c
        given = {u.key: self.key, u.team: self.team, u.user: self.user, u.model: self.model}
        query = query.where(*(column == value for column, value in given.items() if value is not None))
        query = query.where(u.at_s >= self.since_s)
        return query if self.until_s is None else query.where(u.at_s < self.until_s)


class UsageQueries(DatabaseAccess):
    def rows(
        self, which: UsageFilter, *, before: int | None = None, limit: int = 100
    ) -> tuple[tuple[UsageRow, ...], int | None]:
        """Returns a page of requests, newest first, and the number to pass as `before` to get the next page. The number
        is None on the last page."""
        u = t.usage.c
        query = which.applied_to(t.usage.select()).order_by(u.number.desc()).limit(limit)
        if before is not None:
            query = query.where(u.number < before)
        with self._db.read() as c:
            found = c.execute(query).mappings().all()
        rows = tuple(UsageRow(**{name: row[name] for name in UsageRow.__slots__}) for row in found)
        return rows, int(found[-1]["number"]) if len(found) == limit else None

    def sums(self, which: UsageFilter, by: UsageBy) -> tuple[UsageSum, ...]:
        """Returns the usage by group. Days (such as `2026-11-22`, UTC) are sorted by time, and other groups by falling
        cost. If the groups are model versions, their names include the model."""
        u = t.usage.c
        group: sa.ColumnElement[Any] = u[by] if by != "day" else sa.cast(sa.func.floor(u.at_s / _DAY_S), sa.BigInteger)
        if by == "version":
            group = u.model + sa.literal_column("' '") + u.version
        tokens = [sa.func.sum(u[name]) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
        errors = sa.func.sum(sa.case((u.status >= 400, 1), else_=0))
        query = sa.select(group, sa.func.count(), errors, *tokens, sa.func.sum(u.cost_micro_usd)).group_by(group)
        with self._db.read() as c:
            found = c.execute(which.applied_to(query)).all()
        sums = [UsageSum(_name(row[0], by), *(int(value) for value in row[1:])) for row in found]
        if by == "day":
            return tuple(sorted(sums, key=lambda each: each.group))
        return tuple(sorted(sums, key=lambda each: (-each.cost_micro_usd, -each.requests, each.group)))

    def prune(self, before_s: float, now_s: float, limit: int = BATCH) -> int:
        """Deletes the oldest usage rows from before `before_s`, at most `limit` of them. Returns the number of deleted
        rows.

        An audit entry records the deletion, so that `verify` does not report the rows as missing. The spending of
        accounts is kept.
        """
        u = t.usage.c
        with self._db.write() as c:
            old = sa.select(u.number).where(u.at_s < before_s).order_by(u.at_s).limit(limit)
            removed = c.execute(t.usage.delete().where(u.number.in_(old))).rowcount
            if removed:
                detail = {"before_s": before_s, "rows": removed}
                add_entry(c, now_s, "raytide", USAGE_PRUNED, "usage", detail)
            return removed


def _name(group: object, by: UsageBy) -> str:
    if by != "day":
        return str(group).rstrip()

    return datetime.fromtimestamp(int(str(group)) * _DAY_S, UTC).strftime("%Y-%m-%d")
