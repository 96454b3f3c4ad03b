"""Intervals of the ledger follow what the provider lists, also when it forgets."""

from __future__ import annotations

from raytide.control.bookkeeping import keep_books
from raytide.core.entry import EntryKind, OpenInterval, Share
from raytide.core.fleet import Market, Node, NodeState

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
