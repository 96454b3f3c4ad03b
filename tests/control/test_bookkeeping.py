"""Intervals of the ledger follow what the provider lists, also when it forgets."""

from __future__ import annotations

from pathlib import Path

from raytide.control.bookkeeping import keep_books
from raytide.control.closing import close_books
from raytide.core.entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.fleet import Market, Node, NodeState
from raytide.core.state import Changes, Store

IDLE = (Share(EntryKind.IDLE, "", "", 1.0),)
S = 1_000_000


def test_a_node_that_the_provider_forgot_is_closed_at_its_end_and_costs_no_more() -> None:
    node = Node("node-1", "cpu", "a", Market.SPOT, 3600 * S, NodeState.GONE, 0.0, started_at_s=1.0, ended_at_s=11.0)
    interval = OpenInterval("node-1", 3600 * S, 1 * S, 4 * S, IDLE)
    booking = keep_books({"node-1": node}, {}, {"node-1": interval}, {}, lambda *_: (), 99 * S)
    assert booking.closed == ("node-1",)
    assert [(e.from_us, e.to_us, e.amount_micro_usd) for e in booking.entries] == [(4 * S, 11 * S, 7 * S)]


def test_a_node_that_the_provider_does_not_list_yet_is_left_open() -> None:
    node = Node("node-1", "cpu", "a", Market.SPOT, 3600 * S, NodeState.READY, 0.0, started_at_s=1.0)
    interval = OpenInterval("node-1", 3600 * S, 1 * S, 4 * S, IDLE)
    booking = keep_books({"node-1": node}, {}, {"node-1": interval}, {}, lambda *_: (), 99 * S)
    assert (booking.entries, booking.intervals, booking.closed) == ((), (), ())


def test_the_end_of_a_cluster_says_where_the_books_do_not_balance(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/state.db")
    store.commit(Changes(1.0, entries=(Entry("ghost", 0, 1_000_000, EntryKind.IDLE, "", "", 3_600, 1),)))
    closed = close_books(store, (), 2.0)
    store.close()
    assert [(d.node_id, d.booked_micro_usd, d.bill_micro_usd) for d in closed.differences] == [("ghost", 1, 0)]
