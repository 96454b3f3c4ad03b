"""Revisions of endpoints in the store. A revision is a spec that an endpoint has or had."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import EndpointRevision, ServeSpec
from raytide.core.state import codec
from raytide.core.state.database import DatabaseAccess, paged
from raytide.core.state.registry import tables as t

KEPT_REVISIONS = 100
"""The number of newest revisions of an endpoint that are kept."""


def add_revision(c: sa.Connection, spec: ServeSpec, user: str, now_s: float, why: str, *, is_new: bool = False) -> int:
    """Adds a revision of an endpoint and returns its number. If the newest revision has the same team and spec, adds
    nothing and returns the newest number. With `is_new`, a revision is always added.

    The caller must have locked the endpoint's row.
    """
    r = t.revisions.c
    of_endpoint = t.revisions.select().where(r.name == spec.name)
    last = c.execute(of_endpoint.order_by(r.number.desc()).limit(1)).first()
    if (
        not is_new
        and last is not None
        and last.team == spec.team
        and codec.read_config(ServeSpec, last.spec)[0] == spec
    ):
        return int(last.number)
    number = 1 if last is None else int(last.number) + 1
    values = {"name": spec.name, "number": number, "team": spec.team, "user": user, "at_s": now_s, "why": why}
    c.execute(t.revisions.insert(), {**values, "spec": spec.model_dump(mode="json")})
    c.execute(t.revisions.delete().where(r.name == spec.name, r.number <= number - KEPT_REVISIONS))
    return number


class RevisionRecords(DatabaseAccess):
    def page(self, name: str, *, team: str, limit: int = KEPT_REVISIONS) -> tuple[EndpointRevision, ...]:
        """Returns this team's revisions of an endpoint, newest first. An endpoint's earlier revisions may belong to
        other teams."""
        r = t.revisions.c
        query = t.revisions.select().where(r.name == name, r.team == team).order_by(r.number.desc())
        with self._db.read() as c:
            return tuple(_revision(row) for row in paged(c, query, t.revisions.c.spec, limit))

    def find(self, name: str, *, team: str, number: int) -> EndpointRevision:
        """Returns the revision of this number. Raises NotFoundError if it does not exist."""
        r = t.revisions.c
        query = t.revisions.select().where(r.name == name, r.team == team, r.number == number)
        row = self._db.first(query)
        if row is None:
            raise NotFoundError(
                f"endpoint {name} has no revision {number}.", hint=f"`raytide endpoint history {name}` lists revisions."
            )
        return _revision(row)


def revisions(c: sa.Connection, name: str, numbers: Collection[int]) -> list[EndpointRevision]:
    """Returns the endpoint's revisions with these numbers. Revisions that are no longer kept are left out."""
    r = t.revisions.c
    query = t.revisions.select().where(r.name == name, r.number.in_(numbers))
    return [_revision(row) for row in c.execute(query)]


def _revision(row: sa.Row[Any]) -> EndpointRevision:
    spec, unreadable = codec.read_config(ServeSpec, row.spec)
    return EndpointRevision(row.name, row.number, row.team, row.user, row.at_s, row.why, spec, unreadable)
