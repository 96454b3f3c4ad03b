"""Intervals of the ledger follow what the provider lists, also when it forgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.stores import new_store

from raytide.autoscaler.providers.base import Machine
from raytide.control.accounting.billing_intervals import update_intervals
from raytide.control.accounting.final_accounting import close_books
from raytide.core.money import to_us
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.state import Changes
from raytide.ledger.reconcile import bill, reconcile

IDLE = (Share(EntryKind.IDLE, "", "", 1.0),)
S = 1_000_000


def test_a_node_that_the_provider_forgot_is_closed_at_its_end_and_costs_no_more() -> None:
    node = Node(
        "node-1", "cpu", "a", CapacityType.SPOT, 3600 * S, NodeState.GONE, 0.0, started_at_s=1.0, ended_at_s=11.0
    )
    interval = OpenInterval("node-1", 3600 * S, 1 * S, 4 * S, IDLE)
    booking = update_intervals({"node-1": node}, {}, {"node-1": interval}, {}, lambda *_: (), 99 * S)
    assert booking.closed == ("node-1",)
    assert [(e.from_us, e.to_us, e.amount_micro_usd) for e in booking.entries] == [(4 * S, 11 * S, 7 * S)]


def test_a_node_that_the_provider_does_not_list_yet_is_left_open() -> None:
    node = Node("node-1", "cpu", "a", CapacityType.SPOT, 3600 * S, NodeState.READY, 0.0, started_at_s=1.0)
    interval = OpenInterval("node-1", 3600 * S, 1 * S, 4 * S, IDLE)
    booking = update_intervals({"node-1": node}, {}, {"node-1": interval}, {}, lambda *_: (), 99 * S)
    assert (booking.entries, booking.intervals, booking.closed) == ((), (), ())


@given(
    changes=st.lists(st.tuples(st.floats(0.1, 500.0), st.integers(0, 9_000_000)), max_size=5),
    looks=st.lists(st.floats(0.1, 300.0), min_size=1, max_size=12),
    early_s=st.one_of(st.just(0.0), st.floats(0.0, 1000.0)),
)
def test_a_machine_whose_price_changes_is_booked_each_time_at_its_price_and_in_sum_as_it_is_billed(
    changes: list[tuple[float, int]], looks: list[float], early_s: float
) -> None:
    """A price changes when the provider sees it, which is before the look that books it. Of the end it may say later
    that it was `early_s` before."""
    node = Node("node-1", "cpu", "a", CapacityType.SPOT, 1, NodeState.READY, 0.0, started_at_s=5.0)
    machine, interval, entries, now_s = Machine("node-1", "cpu", "a", 3_600_000, 5.0), None, [], 5.0
    due = list(changes)
    for wait_s in looks:
        now_s += wait_s
        if due and due[0][0] < wait_s * 2:
            machine = replace(
                machine, price_micro_usd_h=due[0][1], earlier=(*machine.earlier, (now_s, machine.price_micro_usd_h))
            )
            due.pop(0)
        before = {"node-1": interval} if interval is not None else {}
        booking = update_intervals(
            {"node-1": node}, {"node-1": machine}, before, {"node-1": IDLE}, lambda *_: (), to_us(now_s)
        )
        entries += booking.entries
        interval = booking.intervals[0] if booking.intervals else interval
    assert interval is not None
    assert reconcile([machine], entries) == ()
    end_s = max(5.0, now_s + 1.0 - early_s)
    gone, ended = replace(node, state=NodeState.GONE, ended_at_s=end_s), replace(machine, ended_at_s=end_s)
    late = [entry for entry in entries if entry.to_us > to_us(end_s)]
    last = update_intervals(
        {"node-1": gone}, {"node-1": ended}, {"node-1": interval}, {}, lambda *_: late, to_us(now_s + 1)
    )
    assert [entry.from_us for entry in entries[1:]] == [entry.to_us for entry in entries[:-1]]
    entries += last.entries
    assert sum(entry.amount_micro_usd for entry in entries) == bill(ended)
    assert reconcile([ended], entries) == ()
    assert {entry.price_micro_usd_h for entry in entries} <= {
        price for _, price in (*machine.earlier, (0.0, machine.price_micro_usd_h))
    }


def test_the_end_of_a_cluster_says_where_the_books_do_not_balance(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.commit(Changes(1.0, entries=(Entry("ghost", 0, 1_000_000, EntryKind.IDLE, "", "", 3_600, 1),)))
    closed = close_books(store, (), 2.0)
    store.close()
    assert [(d.node_id, d.booked_micro_usd, d.bill_micro_usd) for d in closed.differences] == [("ghost", 1, 0)]
