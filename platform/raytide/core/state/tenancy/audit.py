"""The audit log: a chain of entries. Each entry contains the hash of the entry before it.

An entry is written in the same transaction as the change that it describes, so neither exists without the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sqlalchemy as sa

from raytide.core.bounds import MOST_PAGE_BYTES, storable
from raytide.core.objects.api_key import AuditEntry, ChainVerdict
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess, paged
from raytide.core.state.queries.jobs import chunked
from raytide.core.state.write import append, next_number

REQUESTS, PRUNED, USAGE_PRUNED = "gateway.requests", "audit.prune", "usage.prune"
"""Actions with a meaning for the check: a batch of requests, and deletions by age."""
_COUNTER = "audit"
BATCH = 1000
"""The most rows that are read or deleted at once."""
_actor: ContextVar[tuple[str, float] | None] = ContextVar("audit_actor", default=None)


@contextmanager
def acting(actor: str, at_s: float) -> Iterator[None]:
    """Names the caller on whose behalf the block changes the store. If the block runs functions in worker threads
    through anyio, these threads inherit the name. New threads that the block starts do not inherit it.
    """
    before = _actor.set((actor, at_s))
    try:
        yield
    finally:
        _actor.reset(before)


def record(c: sa.Connection, action: str, object: str, detail: Mapping[str, Any] | None = None) -> None:
    """Appends an audit entry for a change by the current caller. A change by the platform itself gets no entry.

    This function takes the lock that orders all entries. Therefore make this call the last one in a transaction.
    """
    if (actor := _actor.get()) is not None:
        add_entry(c, actor[1], actor[0], action, object, detail or {})


def add_entry(c: sa.Connection, at_s: float, actor: str, action: str, object: str, detail: Mapping[str, Any]) -> None:
    seq = next_number(c, _COUNTER)
    previous = c.execute(sa.select(t.audit.c.hash).where(t.audit.c.seq == seq - 1)).scalar()
    fields = (storable(actor), action, storable(object), json.dumps(detail, sort_keys=True, default=str))
    hash = _hash(seq, float(at_s), *fields, previous or "")
    names = ("actor", "action", "object", "detail")
    row = {"seq": seq, "at_s": float(at_s), **dict(zip(names, fields, strict=True))}
    append(c, t.audit, [{**row, "previous": previous or "", "hash": hash}])


def _hash(seq: int, at_s: float, actor: str, action: str, object: str, detail: str, previous: str) -> str:
    text = json.dumps([seq, at_s, actor, action, object, detail, previous])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the SHA-256 of usage rows. An audit entry keeps this hash, so that later changes of the rows are
    detected."""
    text = json.dumps([[row[name] for name in _COVERED] for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()


_COVERED = [column.name for column in t.usage.c if column.name != "number"]


class AuditLog(DatabaseAccess):
    def entries(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        object: str | None = None,
        since_s: float = 0.0,
        until_s: float | None = None,
        before: int | None = None,
        limit: int = 100,
        most_bytes: int = MOST_PAGE_BYTES,
    ) -> tuple[AuditEntry, ...]:
        """Returns at most `limit` entries, newest first. With `before`, returns only entries with a lower number than
        this. If the details of the entries are large, fewer entries are returned, but at least one.

        `action` may be a prefix, such as `key.`.
        """
        a = t.audit.c
        equal = {a.actor: actor, a.object: object}
        query = t.audit.select().where(*(column == value for column, value in equal.items() if value is not None))
        query = query.where(a.at_s >= since_s).order_by(a.seq.desc()).limit(limit)
        if action is not None:
            query = query.where(a.action.startswith(action, autoescape=True))
        if until_s is not None:
            query = query.where(a.at_s < until_s)
        if before is not None:
            query = query.where(a.seq < before)
        with self._db.read() as c:
            return tuple(_entry(row) for row in paged(c, query, a.detail, limit, most_bytes))

    def prune(self, before_s: float, now_s: float, limit: int = BATCH) -> int:
        """Deletes entries that were written before `before_s`, the oldest first. Deletes at most `limit` entries.
        Returns the number of deleted entries.

        Adds an entry with the hash of the last deleted entry, so that the rest of the chain can still be checked.
        """
        a = t.audit.c
        with self._db.write() as c:
            young = c.execute(sa.select(sa.func.min(a.seq)).where(a.at_s >= before_s)).scalar()
            query = sa.select(a.seq, a.hash).order_by(a.seq).limit(limit)
            old = c.execute(query if young is None else query.where(a.seq < young)).all()
            if not old:
                return 0
            anchor = {"through": old[-1].seq, "hash": old[-1].hash, "entries": len(old)}
            add_entry(c, now_s, "raytide", PRUNED, "audit", anchor)
            c.execute(t.audit.delete().where(a.seq <= old[-1].seq))
            return len(old)

    def missing(self) -> int:
        """Returns how many entries are missing. Entries that were deleted because of their age do not count. Unlike
        `verify`, it does not read the contents of entries."""
        a = t.audit.c
        with self._db.read() as c:
            through, last = int(self._anchor(c).get("through", 0)), self._last(c)
            kept = c.execute(sa.select(sa.func.count()).where(a.seq > through, a.seq <= last)).scalar() or 0
        return last - through - kept

    @staticmethod
    def _anchor(c: sa.Connection) -> Mapping[str, Any]:
        """Returns the detail of the last deletion by age; empty if there was none."""
        anchor = c.execute(t.audit.select().where(t.audit.c.action == PRUNED).order_by(t.audit.c.seq.desc()).limit(1))
        return {} if (row := anchor.first()) is None else _entry(row).detail

    @staticmethod
    def _last(c: sa.Connection) -> int:
        """Returns the number of the entry that was written last."""
        return (c.execute(sa.select(t.counters.c.next).where(t.counters.c.name == _COUNTER)).scalar() or 1) - 1

    def verify(self, head: tuple[int, str] | None = None) -> ChainVerdict:
        """Checks the whole chain, and the usage rows whose hashes it contains.

        `head` is the number and the hash of an entry, saved earlier in another place. Without it, the check cannot
        detect a chain that was rewritten consistently.
        """
        a = t.audit.c
        with self._db.read() as c:
            through = self._anchor(c)
            cuts = c.execute(sa.select(a.detail).where(a.action == USAGE_PRUNED)).scalars()
            pruned_s = max((float(json.loads(cut).get("before_s", 0.0)) for cut in cuts), default=0.0)
            last = self._last(c)
            seq, previous = int(through.get("through", 0)), str(through.get("hash", ""))
            first_seq, entries, requests = seq + 1, 0, 0
            while rows := c.execute(t.audit.select().where(a.seq > seq).order_by(a.seq).limit(BATCH)).all():
                if entries == 0 and (early := c.execute(sa.select(a.seq).where(a.seq <= seq).limit(1)).first()):
                    return ChainVerdict(0, first_seq, seq, previous, early.seq, "it stands before the first entry")
                for row in rows:
                    problem = _problem(row, seq + 1, previous)
                    if not problem and row.action == REQUESTS:
                        compared, problem = _compare(c, _entry(row), pruned_s)
                        requests += compared
                    if not problem and head is not None and row.seq == head[0] and row.hash != head[1]:
                        problem = "its hash is not the one that was noted"
                    if problem:
                        broken = min(row.seq, seq + 1)
                        return ChainVerdict(entries, first_seq, seq, previous, broken, problem, requests)
                    seq, previous, entries = row.seq, row.hash, entries + 1
        if seq != last:
            return ChainVerdict(entries, first_seq, seq, previous, seq + 1, "it is missing", requests)
        if head is not None and head[0] > seq:
            return ChainVerdict(entries, first_seq, seq, previous, seq + 1, "it was noted and is missing", requests)
        return ChainVerdict(entries, first_seq, seq, previous, requests=requests)


def _problem(row: sa.Row[Any], seq: int, previous: str) -> str:
    if row.seq != seq:
        return "it is missing"
    if row.previous != previous:
        return "it does not follow from the entry before it"
    if row.hash != _hash(row.seq, row.at_s, row.actor, row.action, row.object, row.detail, row.previous):
        return "its content does not match its hash"
    return ""


def _compare(c: sa.Connection, entry: AuditEntry, pruned_s: float) -> tuple[int, str]:
    """Compares the usage rows of a batch with the batch's entry. Returns the number of rows compared, and the problem
    if there is one.
    """
    listed = {str(each[0]): float(each[1]) for each in entry.detail.get("requests", ())}
    found: dict[str, Mapping[str, Any]] = {}
    for part in chunked(listed):
        for row in c.execute(t.usage.select().where(t.usage.c.id.in_(part))).mappings():
            found[row["id"]] = dict(row)
    lost = [id for id, at_s in listed.items() if id not in found and at_s >= pruned_s]
    if lost:
        return 0, f"usage row {lost[0]} of it is missing"
    if len(found) < len(listed):  # the rest was deleted by age
        return 0, ""
    is_same = digest_of_rows([found[id] for id in listed]) == entry.detail.get("rows")
    return len(found), "" if is_same else "its usage rows were changed"


def _entry(row: sa.Row[Any]) -> AuditEntry:
    try:
        detail = json.loads(row.detail)
    except ValueError:
        detail = {}
    detail = detail if isinstance(detail, dict) else {}
    return AuditEntry(row.seq, row.at_s, row.actor, row.action, row.object, detail, row.previous, row.hash)
