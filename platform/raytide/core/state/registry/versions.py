"""The common part of registered models and datasets: named versions, which are never changed.

The tables of models and datasets have the columns name, version, team, user, created_at_s, digest and spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError, QuotaError
from raytide.core.specs.data import DatasetVersionSpec
from raytide.core.specs.model_version import ModelVersionSpec
from raytide.core.state.database import paged
from raytide.core.state.write import next_number

MOST_VERSIONS = 10_000
"""The most versions that a team may have of all its models, and of all its datasets."""
COUNTER = "registry"


def add_version(
    c: sa.Connection,
    table: sa.Table,
    spec: ModelVersionSpec | DatasetVersionSpec,
    digest: str,
    user: str,
    now_s: float,
) -> tuple[sa.Row[Any], bool]:
    """Adds a version of the model or dataset that `spec` names, unless a version with this digest exists. Returns the
    version's row, and whether the version is new.

    Raises ConflictError if the name belongs to another team, and QuotaError if the team has too many versions.
    """
    t, what = table.c, table.name.removesuffix("s")
    next_number(c, COUNTER)  # its row's lock orders all registrations
    if (first := c.execute(sa.select(t.team).where(t.name == spec.name).limit(1)).scalar()) is not None:
        if first != spec.team:
            raise ConflictError(f"{what} {spec.name} belongs to team {first}.", hint="Choose another name.")
        same = table.select().where(t.name == spec.name, t.digest == digest).order_by(t.version)
        if (row := c.execute(same).first()) is not None:
            return row, False
    count = c.execute(sa.select(sa.func.count()).where(t.team == spec.team)).scalar_one()
    if count >= MOST_VERSIONS:
        raise QuotaError(
            f"team {spec.team} has {count} versions of {table.name}; {MOST_VERSIONS} are allowed.",
            hint="Ask the cluster's operator.",
        )
    newest = c.execute(sa.select(sa.func.max(t.version)).where(t.name == spec.name)).scalar()
    values = {"name": spec.name, "version": (newest or 0) + 1, "team": spec.team, "user": user}
    kept = {"created_at_s": now_s, "digest": digest, "spec": spec.model_dump(mode="json")}
    c.execute(table.insert(), {**values, **kept})
    return c.execute(table.select().where(t.name == spec.name, t.version == values["version"])).one(), True


def newest_of(table: sa.Table, *, team: str | None, name: str | None, limit: int, offset: int) -> sa.Subquery:
    """Returns a query for one page of names. Each row has a name, the number of its newest version, and the count of
    its versions."""
    t = table.c
    newest = sa.select(t.name, sa.func.max(t.version).label("newest"), sa.func.count().label("versions"))
    if team is not None:
        newest = newest.where(t.team == team)
    if name is not None:
        newest = newest.where(t.name == name)
    return newest.group_by(t.name).order_by(t.name).limit(limit).offset(offset).subquery()


def newest_rows(c: sa.Connection, table: sa.Table, page: sa.Subquery, limit: int) -> Sequence[sa.Row[Any]]:
    """Returns the row of the newest version of each name on a page. The added column `versions` counts the versions of
    the name."""
    t = table.c
    query = sa.select(table, page.c.versions).join(page, sa.and_(t.name == page.c.name, t.version == page.c.newest))
    return paged(c, query.order_by(t.name), t.spec, limit)


def version_rows(c: sa.Connection, table: sa.Table, name: str, limit: int, offset: int) -> Sequence[sa.Row[Any]]:
    """Returns the versions of the model or dataset `name`, newest first."""
    query = table.select().where(table.c.name == name).order_by(table.c.version.desc()).offset(offset)
    return paged(c, query, table.c.spec, limit)


def owner_of(c: sa.Connection, table: sa.Table, name: str) -> str | None:
    """Returns the team to which a name belongs, or None if the name has no version."""
    return c.execute(sa.select(table.c.team).where(table.c.name == name).limit(1)).scalar()
