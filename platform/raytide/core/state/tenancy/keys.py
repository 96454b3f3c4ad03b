"""API keys in the store. Each change of a key gets a revision number. A gateway asks for all changes after the last
revision that it knows."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError, NotFoundError, QuotaError
from raytide.core.objects.api_key import ApiKey, KeySpec
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.tenancy.audit import record
from raytide.core.state.write import next_number, update

MOST_KEYS = 1000
"""The most keys of a team that are neither revoked nor expired."""
_REVISION = "key_table"
_FIELDS = codec.shared(ApiKey, t.keys)


def touch_key_table(c: sa.Connection) -> int:
    """Increases the revision of the keys, so that gateways read the keys, prices and weights again. Returns the new
    revision.
    """
    return next_number(c, _REVISION)


class KeyRecords(DatabaseAccess):
    def create(self, spec: KeySpec, user: str, digest: str, now_s: float) -> ApiKey:
        """Stores a new key under the SHA-256 of its secret. Raises QuotaError if the team has too many keys."""
        with self._db.write() as c:
            k = t.keys.c
            is_live = sa.and_(k.revoked_at_s.is_(None), sa.or_(k.expires_at_s.is_(None), k.expires_at_s > now_s))
            count = c.execute(sa.select(sa.func.count()).where(k.team == spec.team, is_live)).scalar_one()
            if count >= MOST_KEYS:
                raise QuotaError(
                    f"team {spec.team} has {count} API keys; {MOST_KEYS} are allowed.", hint="Revoke some of them."
                )
            key = ApiKey.from_spec(f"key-{next_number(c, 'key')}", spec, user, now_s)
            _insert(c, key, digest)
            record(c, "key.create", key.id, _shown(key))
            return key

    def rotate(self, key_id: str, digest: str, now_s: float, grace_s: float) -> ApiKey:
        """Returns a new key in place of this key. The old key stays valid for `grace_s` seconds. Both keys share one
        account.

        Raises ConflictError if the old key is not valid, or was replaced before.
        """
        with self._db.write() as c:
            old = _key(_row(c, key_id))
            if old.replaced_by or not old.is_valid(now_s):
                why = f"was replaced by {old.replaced_by}" if old.replaced_by else "is no longer valid"
                raise ConflictError(f"{key_id} {why}.", hint="`raytide key list` shows the valid keys.")
            ends_at_s = now_s + grace_s if old.expires_at_s is None else min(old.expires_at_s, now_s + grace_s)
            new = replace(old, id=f"key-{next_number(c, 'key')}", created_at_s=now_s)
            changed = _insert(c, new, digest)
            values = {"replaced_by": new.id, "expires_at_s": ends_at_s, "changed": changed}
            update(c, t.keys, {"id": key_id}, values)
            record(c, "key.rotate", key_id, {"new": new.id, "old_expires_at_s": ends_at_s})
            return new

    def revoke(self, key_id: str, now_s: float) -> ApiKey:
        """Ends a key at once. Has no effect on a revoked key."""
        with self._db.write() as c:
            key = _key(_row(c, key_id))
            if key.revoked_at_s is None:
                update(c, t.keys, {"id": key_id}, {"revoked_at_s": now_s, "changed": touch_key_table(c)})
                record(c, "key.revoke", key_id)
                key = replace(key, revoked_at_s=now_s)
            return key

    def key(self, key_id: str) -> ApiKey:
        with self._db.read() as c:
            return _key(_row(c, key_id, locked=False))

    def page(
        self, *, team: str | None = None, valid_at_s: float | None = None, limit: int = 100, offset: int = 0
    ) -> tuple[ApiKey, ...]:
        """Returns keys, newest first. With `valid_at_s`, returns only keys that are valid at that time."""
        k = t.keys.c
        query = t.keys.select().order_by(k.number.desc()).limit(limit).offset(offset)
        if team is not None:
            query = query.where(k.team == team)
        if valid_at_s is not None:
            query = query.where(k.revoked_at_s.is_(None), sa.or_(k.expires_at_s.is_(None), k.expires_at_s > valid_at_s))
        return tuple(_key(row) for row in self._db.rows(query))

    def revision(self) -> int:
        """Returns the revision, which is the number of the newest change of keys, prices or weights."""
        with self._db.read() as c:
            return _revision(c)

    def changes(self, since: int, now_s: float) -> tuple[int, dict[str, ApiKey]]:
        """Returns the present revision and a mapping of API keys. The mapping's keys are the hashes of the secrets. It
        contains the API keys that changed after the revision `since`. If `since` is -1, it contains all valid API keys.
        """
        k = t.keys.c
        query = t.keys.select().where(k.changed > since)
        if since < 0:
            query = query.where(k.revoked_at_s.is_(None), sa.or_(k.expires_at_s.is_(None), k.expires_at_s > now_s))
        with self._db.read() as c:
            return _revision(c), {row.digest: _key(row) for row in c.execute(query)}

    def prune(self, before_s: float) -> int:
        """Deletes the keys that were revoked or expired before this time. Returns the number of deleted keys."""
        k = t.keys.c
        with self._db.write() as c:
            return c.execute(
                t.keys.delete().where(sa.or_(k.revoked_at_s < before_s, k.expires_at_s < before_s))
            ).rowcount


def _insert(c: sa.Connection, key: ApiKey, digest: str) -> int:
    changed = touch_key_table(c)
    values = {**asdict(key), "number": int(key.id.rpartition("-")[2]), "models": list(key.models)}
    c.execute(t.keys.insert(), {**values, "digest": digest, "changed": changed})
    return changed


def _row(c: sa.Connection, key_id: str, *, locked: bool = True) -> sa.Row[Any]:
    query = t.keys.select().where(t.keys.c.id == key_id)
    row = c.execute(query.with_for_update() if locked else query).first()
    if row is None:
        raise NotFoundError(f"API key {key_id} does not exist.", hint="`raytide key list` lists keys.")
    return row


def _revision(c: sa.Connection) -> int:
    reached = c.execute(sa.select(t.counters.c.next).where(t.counters.c.name == _REVISION)).scalar()
    return 0 if reached is None else int(reached) - 1


def _key(row: sa.Row[Any]) -> ApiKey:
    return ApiKey(**{**codec.fields_of(row, _FIELDS), "models": tuple(row.models)})


def _shown(key: ApiKey) -> dict[str, Any]:
    kept = ("name", "team", "user", "models", "expires_at_s", "requests_per_min", "tokens_per_min")
    return {name: getattr(key, name) for name in (*kept, "budget_micro_usd", "budget_per", "priority", "answer_cache")}
