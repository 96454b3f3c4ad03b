"""The controller is killed at any moment: what it had committed stands, what it had not is booked by the next one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.stores import new_store

from raytide.core.money import cumulative
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share
from raytide.core.state import Changes, Store
from raytide.ledger.book import book, close, open_interval
from raytide.ledger.reconcile import reconcile

PRICE = 918_001
S = 1_000_000
IDLE = Share(EntryKind.IDLE, "", "", 1.0)


@dataclass(frozen=True)
class Machine:
    node_id: str
    started_at_s: float
    ended_at_s: float | None = None
    price_micro_usd_h: int = PRICE
    earlier: tuple[tuple[float, int], ...] = ()


def tick(store: Store, machines: dict[str, Machine], seen: Occupancy, now_us: int) -> Changes:
    """Returns the changes that a controller would commit, from nothing but the store and the provider."""
    entries: list[Entry] = []
    intervals: list[OpenInterval] = []
    closed: list[str] = []
    there = store.load().intervals
    done = {entry.node_id for entry in store.books.entries()} - set(there)
    for machine in machines.values():
        if machine.node_id in done:
            continue
        before = there.get(machine.node_id)
        interval = before or open_interval(machine.node_id, PRICE, round(machine.started_at_s * S), seen)
        if machine.ended_at_s is not None:
            end_us = round(machine.ended_at_s * S)
            entries += close(interval, end_us, store.books.entries(node_id=machine.node_id, ending_after_us=end_us))
            closed.append(machine.node_id)
            continue
        due, after = book(interval, now_us, seen)
        entries += due
        intervals += [after] if after != before else []
    return Changes(now_us / S, entries=tuple(entries), intervals=tuple(intervals), closed=tuple(closed))


@pytest.mark.parametrize("seed", range(2))
def test_the_books_equal_the_bill_after_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = new_store(tmp_path)
    machines: dict[str, Machine] = {}
    now_us = 1_700_000_000 * S
    for number in range(60):
        now_us += chance.randrange(S, 90 * S)
        if chance.random() < 0.2:
            machines[f"node-{number}"] = Machine(f"node-{number}", (now_us - chance.randrange(S)) / S)
        for machine in list(machines.values()):
            if machine.ended_at_s is None and chance.random() < 0.1:
                # It ended a while before anybody noticed.
                ended_at_s = max(machine.started_at_s + 1, now_us / S - chance.randrange(120))
                machines[machine.node_id] = replace(machine, ended_at_s=ended_at_s)
        job = Share(EntryKind.JOB, f"job-{chance.randrange(3)}", "blue", 0.3)
        changes = tick(store, machines, (replace(IDLE, weight=0.7), job), now_us)
        if chance.random() < 0.7:  # else it was killed before the commit
            store.commit(changes)
        if chance.random() < 0.3:  # killed after it
            store.close()
            store = new_store(tmp_path)
    store.commit(tick(store, machines, (IDLE,), now_us + S))
    entries = store.books.entries()
    assert reconcile(machines.values(), entries) == ()
    ended = [machine for machine in machines.values() if machine.ended_at_s is not None]
    assert len(ended) > 3
    bill = sum(cumulative(PRICE, round(m.started_at_s * S), round((m.ended_at_s or 0) * S)) for m in ended)
    booked = store.books.booked("node")
    assert sum(booked[m.node_id] for m in ended) == bill
    store.close()
