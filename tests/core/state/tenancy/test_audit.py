from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.core.objects.api_key import KeySpec, RequestUsage
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.state import Store
from raytide.core.state import tables as t
from raytide.core.state.database import Database
from raytide.core.state.tenancy.audit import acting, add_entry
from raytide.core.state.tenancy.records import TenancyRecords

JOB = JobSpec(kind=JobKind.GANG, name="mine", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))


def usage(id: str, at_s: float = 5.0) -> RequestUsage:
    return RequestUsage(id=id, at_s=at_s, team="blue", model="chat", prompt_tokens=7, status=200)


def test_every_change_on_behalf_of_a_caller_has_an_entry(store: Store) -> None:
    with acting("ana", 3.0):
        store.submit_job(JOB, "ana", 1.0)
        store.request_stop("job-1")
        store.save_spec("job-1", JOB.model_copy(update={"budget_usd": 5.0}))
        store.save_endpoint(ServeSpec(name="chat", model="/m"), "ana", 1.0)
        store.request_delete("chat")
        store.save_team("blue", {"weight": 2.0})
        store.tenancy.keys.create(KeySpec(name="web"), "ana", "d1", 1.0)
        store.tenancy.keys.rotate("key-1", "d2", 2.0, 9.0)
        store.tenancy.keys.revoke("key-1", 2.0)
    store.request_stop("job-1")  # by nobody
    entries = store.tenancy.audit.entries()[::-1]
    assert [(entry.action, entry.object) for entry in entries] == [
        ("job.submit", "job-1"),
        ("job.stop", "job-1"),
        ("job.change", "job-1"),
        ("endpoint.save", "chat"),
        ("endpoint.delete", "chat"),
        ("team.change", "blue"),
        ("key.create", "key-1"),
        ("key.rotate", "key-1"),
        ("key.revoke", "key-1"),
    ]
    assert {(entry.actor, entry.at_s) for entry in entries} == {("ana", 3.0)}
    assert entries[2].detail["budget_usd"] == 5.0
    assert store.tenancy.audit.verify().is_whole
    with acting("ana", 3.0):  # nothing of this changes anything
        store.request_stop("job-1")
        store.request_delete("chat")
        store.tenancy.keys.revoke("key-1", 3.0)
    assert len(store.tenancy.audit.entries()) == len(entries)


def test_an_entry_is_written_with_its_change_or_not_at_all(store: Store) -> None:
    with acting("ana", 3.0), pytest.raises(Exception, match="job-9"):
        store.request_stop("job-9")
    assert store.tenancy.audit.entries() == ()


def test_entries_are_found_by_page_and_filter(tenancy: TenancyRecords) -> None:
    for number, actor in enumerate(("ana", "bob", "ana"), start=1):
        with acting(actor, float(number)):
            tenancy.keys.create(KeySpec(name="web"), actor, f"d{number}", 1.0)
    seqs = lambda **which: [entry.seq for entry in tenancy.audit.entries(**which)]  # noqa: E731
    assert seqs() == [3, 2, 1]
    assert seqs(limit=2) == [3, 2]
    assert seqs(before=2) == [1]
    assert seqs(actor="ana") == [3, 1]
    assert seqs(action="key.") == [3, 2, 1]
    assert seqs(action="key.revoke") == []
    assert seqs(object="key-2") == [2]
    assert seqs(since_s=2.0, until_s=3.0) == [2]
    assert seqs(most_bytes=0) == [3]
    assert seqs(most_bytes=2 * len(json.dumps(tenancy.audit.entries()[0].detail))) == [3, 2]


def test_old_entries_can_go_and_the_rest_is_still_a_chain(tenancy: TenancyRecords) -> None:
    for number in range(6):
        with acting("ana", float(number)):
            tenancy.keys.create(KeySpec(name="web"), "ana", f"d{number}", 1.0)
    head = tenancy.audit.verify()
    assert tenancy.audit.prune(3.0, now_s=10.0, limit=2) == 2
    assert tenancy.audit.prune(3.0, now_s=10.0, limit=2) == 1
    assert tenancy.audit.prune(3.0, now_s=10.0) == 0
    verdict = tenancy.audit.verify((head.head_seq, head.head_hash))
    assert (verdict.is_whole, verdict.first_seq, verdict.entries) == (True, 4, 5)
    assert tenancy.audit.prune(99.0, now_s=100.0) == 5
    assert tenancy.audit.verify().is_whole


def test_deleting_old_usage_leaves_no_gap_but_deleting_other_usage_does(store: Store, tenancy: TenancyRecords) -> None:
    tenancy.spending.settle("g", [usage("a", 5.0), usage("b", 6.0)], 7.0)
    tenancy.spending.settle("g", [usage("c", 8.0)], 9.0)
    assert tenancy.audit.verify().requests == 3
    assert tenancy.usage.prune(6.0, now_s=20.0) == 1
    verdict = tenancy.audit.verify()
    assert (verdict.is_whole, verdict.requests) == (True, 1)
    with store._db.write() as c:
        c.execute(t.usage.delete().where(t.usage.c.id == "c"))
    assert tenancy.audit.verify().problem == "usage row c of it is missing"


def test_a_changed_usage_row_is_found(store: Store, tenancy: TenancyRecords) -> None:
    tenancy.spending.settle("g", [usage("a"), usage("b")], 7.0)
    with store._db.write() as c:
        c.execute(t.usage.update().where(t.usage.c.id == "b").values(completion_tokens=1))
    verdict = tenancy.audit.verify()
    assert (verdict.broken_seq, verdict.problem) == (1, "its usage rows were changed")


ENTRIES = 12
CHANGES: dict[str, Callable[[sa.Connection, int], object]] = {
    "at_s": lambda c, seq: c.execute(_at(seq).values(at_s=t.audit.c.at_s + 1e-3)),
    "actor": lambda c, seq: c.execute(_at(seq).values(actor="eve")),
    "action": lambda c, seq: c.execute(_at(seq).values(action="key.other")),
    "object": lambda c, seq: c.execute(_at(seq).values(object="key-x")),
    "detail": lambda c, seq: c.execute(_at(seq).values(detail="{}")),
    "previous": lambda c, seq: c.execute(_at(seq).values(previous="00")),
    "hash": lambda c, seq: c.execute(_at(seq).values(hash="00")),
    "deletion": lambda c, seq: c.execute(t.audit.delete().where(t.audit.c.seq == seq)),
    "renumbered": lambda c, seq: c.execute(_at(seq).values(seq=99)),
    "swap": lambda c, seq: _swap(c, seq, seq % ENTRIES + 1),
}


def _at(seq: int) -> sa.Update:
    return t.audit.update().where(t.audit.c.seq == seq)


def _swap(c: sa.Connection, one: int, other: int) -> None:
    for before, after in ((one, -1), (other, one), (-1, other)):
        c.execute(_at(before).values(seq=after))


@pytest.fixture
def chain(store: Store) -> Database:
    with store._db.write() as c:
        for number in range(ENTRIES):
            add_entry(c, float(number), "ana", "key.create", f"key-{number}", {"number": number})
    return store._db


def test_any_single_change_deletion_or_reorder_is_found(chain: Database, tenancy: TenancyRecords) -> None:
    assert tenancy.audit.verify().entries == ENTRIES

    @settings(max_examples=60)
    @given(st.sampled_from(sorted(CHANGES)), st.integers(1, ENTRIES), st.booleans())
    def tampered(what: str, seq: int, is_pruned: bool) -> None:
        with chain.engine.connect() as plain:
            rows = plain.execute(t.audit.select()).mappings().all()
            counters = plain.execute(t.counters.select()).mappings().all()
        if is_pruned:
            tenancy.audit.prune(4.0, now_s=50.0)
            seq = max(seq, 5)
        with chain.write() as c:
            CHANGES[what](c, seq)
        verdict = tenancy.audit.verify()
        with chain.write() as c:
            c.execute(t.audit.delete())
            c.execute(t.audit.insert(), [dict(row) for row in rows])
            c.execute(t.counters.delete())
            c.execute(t.counters.insert(), [dict(row) for row in counters])
        assert verdict.broken_seq is not None, (what, seq)
        low = {seq, seq % ENTRIES + 1} if what == "swap" else {seq}
        assert verdict.broken_seq == min(low) or is_pruned, (what, seq, verdict)

    tampered()


def test_a_chain_that_was_written_anew_is_found_by_a_head_that_was_noted(
    chain: Database, tenancy: TenancyRecords
) -> None:
    noted = tenancy.audit.verify()
    with chain.write() as c:
        c.execute(t.audit.delete())
        c.execute(t.counters.delete())
        for number in range(ENTRIES):
            add_entry(c, float(number), "eve", "key.create", f"key-{number}", {"number": number})
    assert tenancy.audit.verify().is_whole
    assert tenancy.audit.verify((noted.head_seq, noted.head_hash)).broken_seq == ENTRIES
    assert tenancy.audit.verify((ENTRIES + 1, "00")).problem == "it was noted and is missing"


def test_details_keep_what_json_cannot_hold(store: Store) -> None:
    with store._db.write() as c:
        add_entry(c, 1, "a\0na", "key.create", "\ud800", {"x": "\0\ud800", "y": {1}})
    assert json.dumps(store.tenancy.audit.entries()[0].detail)
    assert store.tenancy.audit.verify().is_whole


def test_entries_that_are_missing_are_counted_and_those_deleted_by_age_are_not(tenancy: TenancyRecords) -> None:
    audit = tenancy.audit
    assert audit.missing() == 0, "an empty log lacks nothing"
    with audit._db.write() as c:
        for number in range(8):
            add_entry(c, float(number), "ana", "key.create", f"key-{number}", {})
    assert audit.missing() == 0
    assert audit.prune(3.0, 9.0) == 3
    assert audit.missing() == 0
    with audit._db.write() as c:
        add_entry(c, 9.5, "ana", "key.create", "key-9", {})
        c.execute(t.audit.delete().where(t.audit.c.seq.in_((5, 10))))
    assert audit.missing() == 2, "one in the middle, and the last one"
