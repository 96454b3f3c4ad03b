"""A lease is read from two tables at once: its own row, and one row for each of its seats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from raytide.core.objects.gang import Lease
from raytide.core.state import codec
from raytide.core.state import tables as t

MOST_NAMED = 1000
"""Values in one statement's IN: databases limit them (SQLite 32,766 or 250,000, PostgreSQL 65,535)."""

T = TypeVar("T")


def named(values: Iterable[T]) -> Iterator[list[T]]:
    """The values in parts that one statement can name, each value once."""
    left = iter(dict.fromkeys(values))
    while part := list(islice(left, MOST_NAMED)):
        yield part


def leases_where(c: sa.Connection, which: sa.ColumnElement[bool]) -> tuple[Lease, ...]:
    """In order of admission; two statements, however many there are."""
    rows = c.execute(t.leases.select().where(which).order_by(t.leases.c.number)).all()
    ids = sa.select(t.leases.c.id).where(which)
    by_index = t.members.select().where(t.members.c.lease_id.in_(ids)).order_by(t.members.c.index)
    members: dict[str, list[sa.Row[Any]]] = {row.id: [] for row in rows}
    for member in c.execute(by_index):
        members[member.lease_id].append(member)
    return tuple(codec.lease(row, members[row.id]) for row in rows)
