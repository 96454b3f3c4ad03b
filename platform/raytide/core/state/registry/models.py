"""The part of the store for registered models. It stores the models' versions, which never change, and the history of
the models' aliases.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError, NotFoundError
from raytide.core.specs.model_version import (
    AliasChange,
    AliasSpec,
    ModelReference,
    ModelVersion,
    ModelVersionSpec,
    RegisteredModel,
)
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.registry import tables as t
from raytide.core.state.registry.versions import COUNTER, add_version, newest_of, newest_rows, owner_of, version_rows
from raytide.core.state.tenancy.audit import record
from raytide.core.state.write import next_number


class ModelRecords(DatabaseAccess):
    def register(self, spec: ModelVersionSpec, user: str, now_s: float) -> ModelVersion:
        """Adds a version of a model. If the same version was registered before, returns that version, so that clients
        may retry.

        Raises ConflictError if the name belongs to another team, and QuotaError if the team has too many versions.
        """
        digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
        with self._db.write() as c:
            row, is_new = add_version(c, t.models, spec, digest, user, now_s)
            version = _version(row)
            if is_new:
                shown = {"team": spec.team, "location": spec.location, "sha256": spec.sha256, "job": spec.lineage.job}
                record(c, "model.register", version.id, shown)
            return version

    def promote(self, name: str, alias: str, change: AliasSpec, user: str, now_s: float) -> AliasChange:
        """Points an alias at another version, or removes the alias, and returns the change. If the alias already points
        at that version, nothing is recorded.

        Raises NotFoundError if the version does not exist, or if the alias is to be removed but never existed.
        Raises ConflictError if the request contains `if_version` and the alias does not point at that version.
        """
        a = t.alias_changes.c
        with self._db.write() as c:
            number = next_number(c, COUNTER)
            if change.version is not None:
                _find(c, ModelReference(name, change.version))
            of_alias = t.alias_changes.select().where(a.name == name, a.alias == alias)
            last = c.execute(of_alias.order_by(a.number.desc()).limit(1)).first()
            before = None if last is None else last.after
            asked = (user, change.if_version, change.version)
            if last is not None and (last.user, last.before or 0, last.after) == asked:
                return _change(last)  # the response to the first request was lost, and its client sends it again
            if change.if_version is not None and (before or 0) != change.if_version:
                raise ConflictError(
                    f"{name}@{alias} names {f'version {before}' if before else 'no version'}, not {change.if_version}.",
                    hint=f"`raytide model history {name}` shows why.",
                )
            if last is not None and before == change.version:
                return _change(last)
            if before is None and change.version is None:
                raise NotFoundError(f"{name}@{alias} names no version.", hint=f"`raytide model show {name}` shows all.")
            made = AliasChange(number, name, alias, before, change.version, now_s, user, change.why)
            c.execute(t.alias_changes.insert(), {field: getattr(made, field) for field in AliasChange.__slots__})
            record(c, "model.promote", f"{name}@{alias}", {"from": before, "to": change.version, "why": change.why})
            return made

    def find(self, reference: ModelReference) -> ModelVersion:
        """Returns the version to which a reference points. Raises NotFoundError if there is no such version."""
        with self._db.read() as c:
            return _find(c, reference)

    def owner(self, name: str) -> str:
        """Returns the team to which a model belongs."""
        with self._db.read() as c:
            team = owner_of(c, t.models, name)
        if team is None:
            raise _no_model(name)
        return team

    def versions(self, name: str, *, limit: int = 100, offset: int = 0) -> tuple[ModelVersion, ...]:
        """Returns versions of a model, newest first."""
        with self._db.read() as c:
            return tuple(_version(row) for row in version_rows(c, t.models, name, limit, offset))

    def models(
        self, *, team: str | None = None, name: str | None = None, limit: int = 100, offset: int = 0
    ) -> tuple[RegisteredModel, ...]:
        """Returns models by name, each with its newest version."""
        a = t.alias_changes.c
        page = newest_of(t.models, team=team, name=name, limit=limit, offset=offset)
        last = sa.select(sa.func.max(a.number)).where(a.name.in_(sa.select(page.c.name))).group_by(a.name, a.alias)
        with self._db.read() as c:
            rows = newest_rows(c, t.models, page, limit)
            aliases: dict[str, dict[str, int]] = {row.name: {} for row in rows}
            for row in c.execute(t.alias_changes.select().where(a.number.in_(last)).order_by(a.alias)):
                if row.after is not None and row.name in aliases:
                    aliases[row.name][row.alias] = row.after
            return tuple(
                RegisteredModel(row.name, row.team, row.versions, _version(row), aliases[row.name]) for row in rows
            )

    def history(
        self, name: str, *, alias: str | None = None, until_s: float | None = None, limit: int = 100
    ) -> tuple[AliasChange, ...]:
        """Returns changes of a model's aliases, newest first."""
        a = t.alias_changes.c
        query = t.alias_changes.select().where(a.name == name).order_by(a.number.desc()).limit(limit)
        if alias is not None:
            query = query.where(a.alias == alias)
        if until_s is not None:
            query = query.where(a.at_s <= until_s)
        return tuple(_change(row) for row in self._db.rows(query))


def _find(c: sa.Connection, reference: ModelReference) -> ModelVersion:
    m, a = t.models.c, t.alias_changes.c
    version = reference.version
    if version is None:
        named = sa.select(a.after).where(a.name == reference.name, a.alias == reference.alias)
        version = c.execute(named.order_by(a.number.desc()).limit(1)).scalar()
    row = c.execute(t.models.select().where(m.name == reference.name, m.version == version)).first()
    if row is None:
        raise _no_model(str(reference))
    return _version(row)


def _no_model(what: str) -> NotFoundError:
    return NotFoundError(f"model {what} is not registered.", hint="`raytide model list` lists models.")


def _version(row: sa.Row[Any]) -> ModelVersion:
    return ModelVersion(ModelVersionSpec.model_validate(row.spec), row.version, row.user, row.created_at_s)


def _change(row: sa.Row[Any]) -> AliasChange:
    return AliasChange(row.number, row.name, row.alias, row.before, row.after, row.at_s, row.user, row.why)
