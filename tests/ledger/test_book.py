"""Whatever the cuts, and whenever the end becomes known: entries sum to the bill, without gap and without overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.money import cumulative, to_us
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share
from raytide.ledger.book import MAX_OPEN_US, book, close, cost_of, open_interval
from raytide.ledger.reconcile import reconcile
from raytide.ledger.report import accrued, costs, rate_micro_usd_h

JOB = Share(EntryKind.JOB, "job-1", "blue", 0.75)
OTHER = Share(EntryKind.ENDPOINT, "tiny", "red", 0.5)
IDLE = Share(EntryKind.IDLE, "", "", 0.25)
ALL_IDLE = (replace(IDLE, weight=1.0),)
S = 1_000_000


@dataclass(frozen=True)
class Machine:
    node_id: str
    price_micro_usd_h: int
    started_at_s: float
    ended_at_s: float | None = None
    earlier: tuple[tuple[float, int], ...] = ()


weights = st.floats(0.0001, 1.0).map(lambda w: round(w, 9))
shares = st.lists(
    st.tuples(st.sampled_from(list(EntryKind)), st.sampled_from(["", "job-1", "job-2", "tiny"]), weights),
    min_size=1,
    max_size=4,
    unique_by=lambda s: s[:2],
)
occupancies = shares.map(
    lambda found: tuple(sorted((Share(k, s, "t", w) for k, s, w in found), key=lambda s: (s.kind, s.subject)))
)
looks = st.lists(st.tuples(st.integers(-2 * S, 200 * S), occupancies), max_size=8)


def run(interval: OpenInterval, looks: list[tuple[int, Occupancy]]) -> tuple[list[Entry], OpenInterval]:
    """Look at the node again and again; the clock may step back."""
    entries: list[Entry] = []
    now_us = interval.from_us
    for later_us, occupancy in looks:
        now_us += later_us
        booked, interval = book(interval, now_us, occupancy)
        entries += booked
    return entries, interval


@given(st.integers(0, 10**9), st.integers(0, 2 * 10**15), occupancies, looks, st.integers(0, 500 * S), st.booleans())
def test_the_entries_of_a_node_are_its_bill_whatever_happened(
    price: int, started_us: int, first: Occupancy, looks: list[tuple[int, Occupancy]], life_us: int, ends_early: bool
) -> None:
    """`ends_early`: the provider says afterwards that it ended before what is booked."""
    entries, interval = run(open_interval("node-1", price, started_us, first), looks)
    end_us = started_us + life_us if ends_early else max(started_us + life_us, interval.from_us)
    entries += close(interval, end_us, [e for e in entries if e.to_us > end_us])
    assert sum(e.amount_micro_usd for e in entries) == cumulative(price, started_us, end_us)
    assert all(e.to_us > e.from_us for e in entries)
    keys = [(e.node_id, e.from_us, e.kind, e.subject, e.is_reversal) for e in entries]
    assert len(set(keys)) == len(keys)
    machine = Machine("node-1", price, started_us / S, end_us / S)
    assert (to_us(machine.started_at_s), to_us(machine.ended_at_s or 0.0)) == (started_us, end_us)
    assert reconcile([machine], entries) == ()


@given(st.integers(0, 10**9), occupancies, looks)
def test_no_moment_is_booked_twice_or_left_out(
    price: int, first: Occupancy, looks: list[tuple[int, Occupancy]]
) -> None:
    entries, interval = run(open_interval("node-1", price, 0, first), looks)
    spans = sorted({(e.from_us, e.to_us) for e in entries})
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])][: len(spans)]
    assert interval.from_us == (spans[-1][1] if spans else 0)
    assert reconcile([Machine("node-1", price, 0.0)], entries) == ()


@given(st.integers(0, 10**9), occupancies, looks, st.integers(0, 400 * S))
def test_nobody_is_ever_left_with_less_than_nothing(
    price: int, first: Occupancy, looks: list[tuple[int, Occupancy]], end_us: int
) -> None:
    entries, interval = run(open_interval("node-1", price, 0, first), looks)
    entries += close(interval, end_us, [e for e in entries if e.to_us > end_us])
    holders = {(e.from_us if not e.is_reversal else None, e.kind, e.subject) for e in entries}
    for kind, subject in {(kind, subject) for _, kind, subject in holders}:
        assert sum(e.amount_micro_usd for e in entries if (e.kind, e.subject) == (kind, subject)) >= 0


def test_an_interval_is_cut_when_the_occupancy_changes_and_when_it_is_long() -> None:
    interval = open_interval("node-1", 3600 * S, 10 * S, ALL_IDLE)
    assert book(interval, 20 * S, ALL_IDLE) == ((), interval)
    entries, after = book(interval, 20 * S, (IDLE, JOB))
    assert [(e.from_us, e.to_us, e.kind, e.amount_micro_usd) for e in entries] == [
        (10 * S, 20 * S, EntryKind.IDLE, 10 * S)
    ]
    assert (after.from_us, after.occupancy) == (20 * S, (IDLE, JOB))
    long, later = book(after, 20 * S + MAX_OPEN_US, (IDLE, JOB))
    assert {e.subject: e.amount_micro_usd for e in long} == {"": 15 * S, "job-1": 45 * S}
    assert later.from_us == 20 * S + MAX_OPEN_US


def test_holders_that_lean_on_different_resources_share_in_proportion() -> None:
    interval = open_interval("node-1", 3600 * S, 0, (JOB, OTHER))
    assert {e.subject: e.amount_micro_usd for e in cost_of(interval, 5 * S)} == {"job-1": 3 * S, "tiny": 2 * S}


def test_a_clock_that_steps_back_books_nothing_twice() -> None:
    interval = OpenInterval("node-1", 3600 * S, 0, 50 * S, ALL_IDLE)
    entries, after = book(interval, 40 * S, (JOB, IDLE))
    assert entries == ()
    assert (after.from_us, after.occupancy) == (50 * S, (JOB, IDLE))


def test_a_node_that_ended_before_it_was_booked_to_is_reversed() -> None:
    interval = OpenInterval("node-1", 3600 * S, 0, 20 * S, ALL_IDLE)
    booked = [
        *cost_of(replace(interval, from_us=0, occupancy=(IDLE, JOB)), 10 * S),
        *cost_of(replace(interval, from_us=10 * S), 20 * S),
    ]
    reversals = close(interval, 6 * S, booked)
    assert {(e.from_us, e.to_us, e.kind): e.amount_micro_usd for e in reversals} == {
        (6 * S, 10 * S, EntryKind.IDLE): -1 * S,
        (6 * S, 10 * S, EntryKind.JOB): -3 * S,
        (10 * S, 20 * S, EntryKind.IDLE): -10 * S,
    }
    assert all(e.is_reversal for e in reversals)


def test_what_is_open_is_added_to_what_is_booked() -> None:
    intervals = [open_interval("node-1", 3600 * S, 0, (IDLE, JOB)), open_interval("node-2", 0, 0, ALL_IDLE)]
    pending = accrued(intervals, 4 * S)
    assert costs({"job-1": 5, "job-9": 1}, pending, "job") == {"job-1": 5 + 3 * S, "job-9": 1}
    assert costs({}, pending, "endpoint") == {}
    assert costs({}, pending, "kind") == {"idle": S, "job": 3 * S}
    assert costs({}, pending, "team") == {"": S, "blue": 3 * S}
    assert costs({}, pending, "node") == {"node-1": 4 * S, "node-2": 0}
    assert rate_micro_usd_h(intervals, EntryKind.JOB, "job-1") == 2700 * S


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda e: e[:-1], "booked to"),
        (lambda e: e[1:], "a gap"),
        (lambda e: [*e, e[0]], "another amount"),
        (lambda e: [*e, replace(e[0], from_us=1, is_reversal=False)], "booked twice"),
        (lambda e: [*e, replace(e[0], is_reversal=True)], "booked twice"),
        (lambda e: [replace(e[0], amount_micro_usd=1), *e[1:]], "another amount"),
    ],
)
def test_the_check_against_the_bill_finds_what_is_wrong(change: object, what: str) -> None:
    entries, interval = run(open_interval("node-1", 36 * S, 0, ALL_IDLE), [(10 * S, (JOB, IDLE)), (10 * S, ALL_IDLE)])
    entries += close(interval, 30 * S)
    bill = [Machine("node-1", 36 * S, 0.0, 30.0)]
    assert reconcile(bill, entries) == ()
    (found,) = reconcile(bill, change(entries))  # type: ignore[operator]
    assert what in found.what
    assert (found.node_id, found.bill_micro_usd != found.booked_micro_usd) == ("node-1", True)


def test_entries_of_a_machine_that_the_provider_never_had_are_found() -> None:
    (found,) = reconcile([], cost_of(open_interval("node-7", 3600 * S, 0, ALL_IDLE), S))
    assert (found.node_id, found.what) == ("node-7", "the provider has no such machine")
