"""Opens, splits and closes the billing intervals of nodes in each controller tick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from raytide.autoscaler.providers.base import Machine
from raytide.core.money import to_us
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share
from raytide.core.objects.node import Node, NodeState
from raytide.ledger.book import book, close, cost_of, open_interval

_STARTING: Occupancy = (Share(EntryKind.STARTUP, "", "", 1.0),)


@dataclass(frozen=True, slots=True)
class Booking:
    entries: tuple[Entry, ...]
    intervals: tuple[OpenInterval, ...]
    """The intervals that are new or have changed and stay open."""
    closed: tuple[str, ...]


def update_intervals(
    nodes: Mapping[str, Node],
    machines: Mapping[str, Machine],
    intervals: Mapping[str, OpenInterval],
    occupancies: Mapping[str, Occupancy],
    booked_after: Callable[[str, int], Sequence[Entry]],
    now_us: int,
    at_once: Collection[str] = (),
    pending_mj: Mapping[str, int] = MappingProxyType({}),
) -> Booking:
    """Books each billing interval of `nodes` that is due, up to the time `now_us`.

    No node in `nodes` was GONE before this tick, so each interval is closed exactly once. `at_once` contains ids of
    jobs. If such a job holds a node, the node's interval is always due. `booked_after(node_id, time_us)` returns a
    node's ledger entries that end after a time. `pending_mj` maps node ids to the energy in mJ that is not booked
    yet.
    """
    entries: list[Entry] = []
    kept: list[OpenInterval] = []
    closed: list[str] = []
    for node in nodes.values():
        machine, before = machines.get(node.id), intervals.get(node.id)
        if machine is None:
            if node.state is NodeState.GONE and node.ended_at_s is not None and before is not None:
                # providers forget ended machines; an open interval would cost forever
                end_us = to_us(node.ended_at_s)
                entries += close(before, end_us, booked_after(node.id, end_us), energy_mj=pending_mj.get(node.id, 0))
                closed.append(node.id)
            continue
        interval = before or _opened(machine, occupancies.get(node.id, _STARTING))
        at_old_prices, interval = _repriced(interval, machine)
        entries += at_old_prices
        if node.state is NodeState.GONE and machine.ended_at_s is not None:
            end_us = to_us(machine.ended_at_s)
            origins = to_us(machine.started_at_s), *(to_us(until_s) for until_s, _ in machine.earlier)
            entries += close(interval, end_us, booked_after(node.id, end_us), origins, pending_mj.get(node.id, 0))
            closed.append(node.id)
            continue
        is_due = any(share.kind is EntryKind.JOB and share.subject in at_once for share in interval.occupancy)
        held, energy_mj = occupancies.get(node.id, interval.occupancy), pending_mj.get(node.id, 0)
        due, after = book(interval, now_us, held, at_once=is_due, energy_mj=energy_mj)
        entries += due
        if after != before:
            kept.append(after)
    return Booking(tuple(entries), tuple(kept), tuple(closed))


def _opened(machine: Machine, occupancy: Occupancy) -> OpenInterval:
    first = machine.earlier[0][1] if machine.earlier else machine.price_micro_usd_h
    return open_interval(machine.node_id, first, to_us(machine.started_at_s), occupancy)


def _repriced(interval: OpenInterval, machine: Machine) -> tuple[tuple[Entry, ...], OpenInterval]:
    """Returns the entries up to each price change of the machine, and the interval that opens at the last one.
    Repeating it has no effect."""
    entries: tuple[Entry, ...] = ()
    prices = [*(price for _, price in machine.earlier[1:]), machine.price_micro_usd_h]
    for (until_s, _), price in zip(machine.earlier, prices, strict=False):
        if to_us(until_s) > interval.origin_us:
            until_us = max(to_us(until_s), interval.from_us)
            entries += cost_of(interval, until_us)
            interval = open_interval(interval.node_id, price, until_us, interval.occupancy)
    return entries, interval


def energy_of(entries: Iterable[Entry]) -> dict[str, int]:
    """Returns, for each node, the total energy in the node's ledger entries, in millijoules."""
    found: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        found[entry.node_id] += entry.energy_mj
    return dict(found)
