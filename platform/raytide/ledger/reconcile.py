"""Checks the ledger against the provider's bill. The two must agree to the micro-dollar, without gaps or overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raytide.core.money import cumulative, to_us
from raytide.core.objects.ledger_entry import Entry


class Billed(Protocol):
    """The provider's billing record of one machine."""

    @property
    def node_id(self) -> str: ...
    @property
    def price_micro_usd_h(self) -> int: ...
    @property
    def started_at_s(self) -> float: ...
    @property
    def ended_at_s(self) -> float | None: ...
    @property
    def earlier(self) -> tuple[tuple[float, int], ...]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A node whose ledger entries differ from the provider's bill."""

    node_id: str
    bill_micro_usd: int
    booked_micro_usd: int
    what: str


def reconcile(bill: Iterable[Billed], entries: Iterable[Entry]) -> tuple[Difference, ...]:
    """Returns the nodes whose ledger entries differ from the provider's bill. The result is empty if ledger and bill
    agree.

    An ended machine must be booked up to its end. A running machine must be booked without gaps.
    """
    machines = {machine.node_id: machine for machine in bill}
    of_node: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        of_node[entry.node_id].append(entry)
    found = [
        Difference(node_id, 0, _sum(booked), "the provider has no such machine")
        for node_id, booked in sorted(of_node.items())
        if node_id not in machines and _sum(booked)
    ]
    found += [d for machine in machines.values() if (d := _compare(machine, of_node[machine.node_id])) is not None]
    return tuple(found)


def bill(machine: Billed, end_us: int | None = None) -> int:
    """Returns the provider's charge for a machine, at the prices that were valid at each time.

    The charge runs up to `end_us`, by default up to the machine's end.
    """
    if end_us is None:
        assert machine.ended_at_s is not None
        end_us = to_us(machine.ended_at_s)
    total, since_us = 0, to_us(machine.started_at_s)
    prices = [(to_us(until_s), price) for until_s, price in machine.earlier]
    for until_us, price in (*prices, (end_us, machine.price_micro_usd_h)):
        until_us = max(since_us, min(until_us, end_us))
        total, since_us = total + cumulative(price, since_us, until_us), until_us
    return total


def _compare(machine: Billed, booked: Sequence[Entry]) -> Difference | None:
    start_us = to_us(machine.started_at_s)
    reached_us = _reach(booked, start_us)
    if reached_us is None:
        return Difference(machine.node_id, 0, _sum(booked), "a gap, or a moment that is booked twice")
    end_us = reached_us if machine.ended_at_s is None else max(start_us, to_us(machine.ended_at_s))
    amount = bill(machine, end_us)
    if reached_us != end_us:
        what = f"booked to {reached_us / 1e6:.6f} s where the provider ended at {end_us / 1e6:.6f} s"
        return Difference(machine.node_id, amount, _sum(booked), what)
    return None if _sum(booked) == amount else Difference(machine.node_id, amount, _sum(booked), "another amount")


def _reach(booked: Sequence[Entry], start_us: int) -> int | None:
    """Returns the time up to which the entries, cut short by reversals, have no gap or overlap; None if they do not fit
    together.

    The pairs that move lost work to waste are left out.
    """
    reach = start_us
    for from_us, to_us_ in sorted({(e.from_us, e.to_us) for e in booked if not (e.is_reversal or e.cause)}):
        if from_us != reach:
            return None
        reach = to_us_
    for from_us, to_us_ in sorted({(e.from_us, e.to_us) for e in booked if e.is_reversal}, reverse=True):
        if to_us_ != reach:
            return None
        reach = from_us
    return reach


def _sum(entries: Iterable[Entry]) -> int:
    return sum(entry.amount_micro_usd for entry in entries)
