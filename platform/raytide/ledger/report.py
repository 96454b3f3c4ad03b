"""Cost reports. A report groups the ledger's costs, and counts every micro-dollar in exactly one row.

The module also computes costs up to now, which include the open intervals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from raytide.core.objects.ledger_entry import DAY_US, CostBy, Entry, EntryKind, Line, OpenInterval
from raytide.ledger.book import cost_of

By = Literal["team", "project", "job", "model", "node", "day"]
Tags = Mapping[str, Mapping[str, str]]
"""The labels `project` and `model` of each job or endpoint."""
MJ_PER_KWH = 3_600_000_000
Rates = Mapping[tuple[EntryKind, str, str, str], float]
"""The present cost rates in micro-dollars an hour, by kind, subject, team and node."""


def accrued(intervals: Iterable[OpenInterval], now_us: int) -> tuple[Entry, ...]:
    """Returns the entries that would be booked if all open intervals were booked now."""
    return tuple(entry for interval in intervals for entry in cost_of(interval, now_us))


def costs(booked: Mapping[str, int], open_entries: Iterable[Entry], by: CostBy) -> dict[str, int]:
    """Returns the costs by key in micro-dollars: the amounts in `booked` plus those of the open entries.

    `booked` is the result of `LedgerQueries.booked(by)`.
    """
    total = dict(booked)
    for entry in open_entries:
        if (key := _entry_key(entry, by)) is not None:
            total[key] = total.get(key, 0) + entry.amount_micro_usd
    return total


def rate_micro_usd_h(intervals: Iterable[OpenInterval], kind: EntryKind, subject: str) -> float:
    """Returns the present cost of a subject (a job or endpoint) in micro-dollars an hour."""
    return sum(
        interval.price_micro_usd_h * share.weight / sum(s.weight for s in interval.occupancy)
        for interval in intervals
        for share in interval.occupancy
        if (share.kind, share.subject) == (kind, subject)
    )


def _entry_key(entry: Entry, by: CostBy) -> str | None:
    match by:
        case "kind":
            return str(entry.kind)
        case "team":
            return entry.team
        case "node":
            return entry.node_id
        case "job" | "endpoint":
            return entry.subject if entry.kind == EntryKind(by) else None


@dataclass(frozen=True, slots=True)
class CostRow:
    key: str
    amount_micro_usd: int
    micro_usd_h: int
    """The present cost rate."""
    forecast_micro_usd: int
    """The amount at the end of the month (UTC) if the present rate stays; in a report by day, at the end of the day."""
    lost_micro_usd: int = 0
    """The part of the amount for work that was lost."""
    lost_to: tuple[str, ...] = ()
    """The causes of the losses (preempting jobs, lost nodes), the costliest first."""
    energy_mj: int = 0
    """The energy in millijoules, measured or estimated; it is booked up to a minute after it was used."""

    @property
    def kwh(self) -> float:
        return self.energy_mj / MJ_PER_KWH


def rows(
    lines: Iterable[Line], rates: Rates, by: By, tags: Tags, now_us: int, losses: Iterable[Line] = ()
) -> tuple[CostRow, ...]:
    """Returns the rows of a cost report, the most expensive row first. The rows of a report by day are in order of
    date.

    All rows sum to the total cost. In reports by team, project, job and model, costs that belong to no job or
    endpoint have separate rows, such as `(idle)` or `(waste)`. A job's row includes the start-up of nodes for the
    job and the job's lost work. `losses` are the lines for lost work, which are already contained in `lines`.
    """
    amounts: defaultdict[str, int] = defaultdict(int)
    energy: defaultdict[str, int] = defaultdict(int)
    burn: defaultdict[str, float] = defaultdict(float)
    lost: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        amounts[_key(line, by, tags)] += line.amount_micro_usd
        energy[_key(line, by, tags)] += line.energy_mj
    for line in losses:
        lost[_key(line, by, tags)][line.cause] += line.amount_micro_usd
    for (kind, subject, team, node_id), micro_usd_h in rates.items():
        now = Line(kind, subject, team, node_id, now_us // DAY_US, 0)
        burn[_key(now, by, tags)] += micro_usd_h
    # a day ends at midnight; all other keys continue to the end of the month
    left_h = (DAY_US - now_us % DAY_US) / 3.6e9 if by == "day" else hours_left_in_month(now_us)
    found = [
        CostRow(
            key,
            amounts[key],
            round(burn[key]),
            amounts[key] + round(burn[key] * left_h),
            lost[key].total(),
            tuple(cause for cause, amount in lost[key].most_common() if amount > 0),
            energy[key],
        )
        for key in amounts.keys() | burn.keys()
    ]
    if by == "day":
        return tuple(sorted(found, key=lambda row: row.key))
    return tuple(sorted(found, key=lambda row: (-row.amount_micro_usd, row.key)))


def as_lines(entries: Iterable[Entry]) -> list[Line]:
    return [
        Line(e.kind, e.subject, e.team, e.node_id, e.from_us // DAY_US, e.amount_micro_usd, energy_mj=e.energy_mj)
        for e in entries
    ]


def rates(intervals: Sequence[OpenInterval]) -> dict[tuple[EntryKind, str, str, str], float]:
    found: defaultdict[tuple[EntryKind, str, str, str], float] = defaultdict(float)
    for interval in intervals:
        whole = sum(share.weight for share in interval.occupancy)
        for share in interval.occupancy:
            part = interval.price_micro_usd_h * share.weight / whole
            found[(share.kind, share.subject, share.team, interval.node_id)] += part
    return dict(found)


def _key(line: Line, by: By, tags: Tags) -> str:
    match by:
        case "node":
            return line.node_id
        case "day":
            return (datetime.fromtimestamp(0, UTC) + timedelta(days=line.day)).date().isoformat()
        case "team":
            return line.team or f"({line.kind})"
        case "job":
            return line.subject or f"({line.kind})"
        case _:
            return tags.get(line.subject, {}).get(by, "-") if line.subject else f"({line.kind})"


def hours_left_in_month(now_us: int) -> float:
    """Returns the hours until the end of the month (UTC), when monthly budgets restart."""
    now = datetime.fromtimestamp(now_us / 1e6, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end = (first + timedelta(days=32)).replace(day=1)
    return (end - now).total_seconds() / 3600.0
