"""Energy in the ledger: every millijoule that a node's meter has counted is in exactly one entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores import new_store

from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.providers.base import Machine
from raytide.control.accounting.billing_intervals import energy_of, update_intervals
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeReading, NodeState
from raytide.core.state import Changes, Store
from raytide.ledger.report import as_lines, rows

SUBJECTS = ("", "job-1", "job-2", "chat")


def occupancy(weights: tuple[int, ...]) -> Occupancy:
    kinds = (EntryKind.IDLE, EntryKind.JOB, EntryKind.JOB, EntryKind.ENDPOINT)
    shares = zip(kinds, SUBJECTS, weights, strict=True)
    found = tuple(Share(kind, subject, "red", float(weight)) for kind, subject, weight in shares if weight)
    return found or (Share(EntryKind.IDLE, "", "", 1.0),)


def node(state: NodeState, ended_at_s: float | None = None) -> Node:
    return Node("n", "gpu", "a", CapacityType.SPOT, 7_000_000, state, 0.0, started_at_s=0.0, ended_at_s=ended_at_s)


TICK = st.tuples(
    st.integers(1, 90),
    st.floats(0, 1e4),
    st.floats(0, 64),
    st.tuples(*[st.integers(0, 5) for _ in SUBJECTS]),
)


@settings(deadline=None)
@given(st.lists(TICK, min_size=1, max_size=20), st.booleans())
def test_the_entries_of_a_node_sum_to_the_energy_that_was_measured(
    ticks: list[tuple[int, float, float, tuple[int, ...]]], is_lost_once: bool
) -> None:
    meter, intervals = EnergyMeter(watts_per_core=3.5), dict[str, OpenInterval]()
    entries: list[Entry] = []
    now_s = 0.0
    for number, (seconds, watts, cores, weights) in enumerate(ticks):
        now_s += seconds
        meter.add("n", NodeReading(now_s, gpu_power_w=watts, cores_used=cores))
        is_last = number == len(ticks) - 1
        machine = Machine("n", "gpu", "a", 7_000_000, 0.0, now_s if is_last else None)
        nodes = {"n": node(NodeState.GONE, now_s) if is_last else node(NodeState.READY)}
        booking = update_intervals(
            nodes, {"n": machine}, intervals, {"n": occupancy(weights)}, lambda *_: (), round(now_s * 1e6),
            pending_mj=meter.pending_mj(),
        )  # fmt: skip
        if is_lost_once and number == 0 and not is_last:
            continue  # the store refused the commit: nothing was booked, and nothing is taken off
        intervals.update({interval.node_id: interval for interval in booking.intervals})
        entries += booking.entries
        total_mj = int(1000.0 * sum(meter.joules().get("n", {}).values()))
        meter.settle(energy_of(booking.entries), booking.closed)
    assert sum(entry.energy_mj for entry in entries) == total_mj
    assert all(entry.energy_mj >= 0 for entry in entries)
    assert meter.pending_mj() == {}, "a closed node is forgotten"
    by_job = rows(as_lines(entries), {}, "job", {}, 0)
    assert sum(row.energy_mj for row in by_job) == total_mj


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path)
    yield opened
    opened.close()


def test_the_store_adds_up_energy_as_it_adds_up_money(store: Store) -> None:
    def entry(at_us: int, subject: str, energy_mj: int, node_id: str = "n") -> Entry:
        return Entry(node_id, at_us, at_us + 1, EntryKind.JOB, subject, "red", 1, 10, energy_mj=energy_mj)

    booked = (entry(0, "job-1", 5), entry(1, "job-1", 7), entry(1, "job-2", 11))
    store.commit(Changes(at_s=0.0, entries=booked))
    store.commit(Changes(at_s=1.0, entries=(entry(2, "job-1", 13, "m"),)))
    expected = {"job-1": 25, "job-2": 11}
    for lines in (store.books.lines(), store.books.lines(since_us=-1), store.books.lines(with_node=True)):
        found: defaultdict[str, int] = defaultdict(int)
        for line in lines:
            found[line.subject] += line.energy_mj
        assert dict(found) == expected
    assert store.books.entries()[0].energy_mj == 5
