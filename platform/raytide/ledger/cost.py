"""The cost of jobs, teams and nodes up to now: booked entries plus open intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytide.core.objects.ledger_entry import CostBy, Entry, EntryKind, OpenInterval
from raytide.ledger.book import cost_of


def accrued(intervals: Iterable[OpenInterval], now_us: int) -> tuple[Entry, ...]:
    """Returns the entries that a cut of all open intervals would book now."""
    return tuple(entry for interval in intervals for entry in cost_of(interval, now_us))


def costs(booked: Mapping[str, int], open_entries: Iterable[Entry], by: CostBy) -> dict[str, int]:
    """Adds open entries to `Books.booked(by)`, micro-dollars by the same key."""
    total = dict(booked)
    for entry in open_entries:
        if (key := _key(entry, by)) is not None:
            total[key] = total.get(key, 0) + entry.amount_micro_usd
    return total


def rate_micro_usd_h(intervals: Iterable[OpenInterval], kind: EntryKind, subject: str) -> float:
    """Returns the present cost rate of a subject, in micro-dollars an hour."""
    return sum(
        interval.price_micro_usd_h * share.weight / sum(s.weight for s in interval.occupancy)
        for interval in intervals
        for share in interval.occupancy
        if (share.kind, share.subject) == (kind, subject)
    )


def _key(entry: Entry, by: CostBy) -> str | None:
    match by:
        case "kind":
            return str(entry.kind)
        case "team":
            return entry.team
        case "node":
            return entry.node_id
        case "job" | "endpoint":
            return entry.subject if entry.kind == EntryKind(by) else None
