"""A job's losses are moved to waste, to the micro-dollar: over its own spans, once, and with their cause."""

from __future__ import annotations

from dataclasses import replace

from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.ledger.book import close, lost, open_interval

S = 1_000_000


def entry(from_s: int, to_s: int, amount: int, node: str = "node-1", kind: EntryKind = EntryKind.JOB) -> Entry:
    return Entry(node, from_s * S, to_s * S, kind, "job-1", "blue", 3600 * S, amount)


def brief(entries: tuple[Entry, ...]) -> list[tuple[str, int, str, int]]:
    return [(e.node_id, e.from_us // S, str(e.kind), e.amount_micro_usd) for e in entries]


def test_the_last_seconds_of_every_node_are_moved_and_of_an_entry_its_part() -> None:
    mine = [entry(0, 60, 600), entry(60, 90, 301), entry(0, 90, 900, "node-2"), entry(90, 120, 300)]
    moved = lost(mine, 90 * S, 40 * S, "job-7")
    assert brief(moved) == [
        ("node-1", 0, "job", -100),
        ("node-1", 0, "waste", 100),
        ("node-1", 60, "job", -301),
        ("node-1", 60, "waste", 301),
        ("node-2", 0, "job", -400),
        ("node-2", 0, "waste", 400),
    ]
    assert {(e.cause, e.team, e.subject) for e in moved} == {("job-7", "blue", "job-1")}


def test_no_entry_bears_two_losses_and_other_kinds_bear_none() -> None:
    mine = [entry(0, 60, 600), entry(60, 120, 600), entry(60, 120, 50, "node-2", EntryKind.STARTUP)]
    first = lost(mine, 120 * S, 30 * S, "node-3")
    assert brief(first) == [("node-1", 60, "job", -300), ("node-1", 60, "waste", 300)]
    assert brief(lost([*mine, *first], 120 * S, 90 * S, "job-7")) == [
        ("node-1", 0, "job", -300),
        ("node-1", 0, "waste", 300),
    ]


def test_of_a_node_that_ended_before_it_was_booked_to_only_what_was_left_is_moved() -> None:
    whole = entry(0, 60, 600)
    cut = replace(whole, from_us=20 * S, amount_micro_usd=-400, is_reversal=True)
    assert brief(lost([whole, cut], 60 * S, 60 * S, "node-1")) == [
        ("node-1", 0, "job", -200),
        ("node-1", 0, "waste", 200),
    ]
    assert lost([whole, replace(cut, from_us=0, amount_micro_usd=-600)], 60 * S, 60 * S, "node-1") == ()


def test_a_reversal_takes_lost_work_back_as_what_it_is() -> None:
    whole = entry(0, 60, 60 * S)
    moved = lost([whole], 60 * S, 15 * S, "job-7")
    back = close(replace(open_interval("node-1", 3600 * S, 0, ()), from_us=60 * S), 20 * S, [whole, *moved])
    assert {(str(e.kind), e.cause, e.amount_micro_usd) for e in back} == {
        ("job", "", -30 * S),
        ("waste", "job-7", -10 * S),
    }
