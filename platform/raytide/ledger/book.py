"""Books the cost of nodes as ledger entries. Each moment of a billed node is booked exactly once, even after crashes.

An entry's amount is the difference of two cumulative costs since the start of the node's bill. A node's entries
therefore sum to the provider's bill, whatever the intervals are. The time between two observations of the cluster is
booked with the occupancy that the first observation found.

Entries never change. When a job loses work, the cost of that work is moved to waste by a pair of new entries, which
name the cause of the loss. One entry of the pair takes the amount off the job, and the other books the amount as waste.
A pair sums to zero, so the node's entries still sum to the bill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from raytide.core.money import interval_cost, split
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share

MAX_OPEN_US = 60_000_000
"""The longest open interval in microseconds, so that the booked cost of a running job is never far behind."""


def open_interval(node_id: str, price_micro_usd_h: int, started_us: int, occupancy: Occupancy) -> OpenInterval:
    """Returns the first open interval of a node. The node's bill starts at `started_us`, possibly before the first
    observation of the node.
    """
    return OpenInterval(node_id, price_micro_usd_h, started_us, started_us, occupancy)


def book(
    interval: OpenInterval, now_us: int, occupancy: Occupancy, *, at_once: bool = False, energy_mj: int = 0
) -> tuple[tuple[Entry, ...], OpenInterval]:
    """Returns the entries of the interval up to now, and the next open interval.

    The interval is booked if the occupancy has changed, the interval is long, or `at_once` is set. Otherwise there
    are no entries, and the interval stays open. `energy_mj` is the node's energy since its last entries. If the
    clock has stepped back to before the interval's start, there are no entries.
    """
    is_due = at_once or occupancy != interval.occupancy or now_us - interval.from_us >= MAX_OPEN_US
    if not is_due:
        return (), interval
    until_us = max(now_us, interval.from_us)
    return cost_of(interval, until_us, energy_mj), replace(interval, from_us=until_us, occupancy=occupancy)


def close(
    interval: OpenInterval,
    end_us: int,
    booked: Sequence[Entry] = (),
    origins: Sequence[int] = (),
    energy_mj: int = 0,
) -> tuple[Entry, ...]:
    """Returns the ledger entries that end a node's bill at `end_us`. Usually these are the entries for the costs up to
    `end_us` that are not booked yet.

    The provider may report an end that is earlier than the time up to which costs are already booked. In this case,
    the function returns entries that reverse the costs after `end_us`. `booked` are the node's entries that end
    after `end_us`. `origins` are the start times of the node's earlier prices.
    """
    if end_us >= interval.from_us:
        return cost_of(interval, end_us, energy_mj)
    late = [entry for entry in booked if entry.to_us > end_us and not entry.is_reversal]
    spans = sorted({(entry.from_us, entry.to_us) for entry in late})
    return tuple(
        reversal
        for from_us, to_us in spans
        for reversal in _reverse(
            max((origin for origin in (*origins, interval.origin_us) if origin <= from_us), default=from_us),
            max(from_us, end_us),
            [e for e in late if (e.from_us, e.to_us) == (from_us, to_us)],
        )
    )


def cost_of(interval: OpenInterval, until_us: int, energy_mj: int = 0) -> tuple[Entry, ...]:
    """Returns the entries of the open interval up to `until_us`. The caller books them, or shows them as costs not yet
    booked.

    The node's energy is split in the same proportions as the cost.
    """
    if until_us <= interval.from_us:
        return ()
    amount = interval_cost(interval.price_micro_usd_h, interval.origin_us, interval.from_us, until_us)
    shares = {_key(share): share for share in interval.occupancy}
    weights = {key: share.weight for key, share in shares.items()}
    parts, energy = split(amount, weights), split(energy_mj, weights)
    return tuple(
        Entry(
            node_id=interval.node_id,
            from_us=interval.from_us,
            to_us=until_us,
            kind=share.kind,
            subject=share.subject,
            team=share.team,
            price_micro_usd_h=interval.price_micro_usd_h,
            amount_micro_usd=parts[key],
            energy_mj=energy[key],
        )
        for key, share in shares.items()
    )


def _reverse(origin_us: int, from_us: int, together: Sequence[Entry]) -> list[Entry]:
    """Returns the reversals of one span's entries from `from_us` on, in proportion to the charges of each subject.

    Lost work that was moved to waste is reversed as waste.
    """
    span = together[0]
    stays = interval_cost(span.price_micro_usd_h, origin_us, span.from_us, from_us)
    amount = max(0, sum(entry.amount_micro_usd for entry in together) - stays)
    first = {_key(entry): entry for entry in reversed(together)}
    charged = {key: float(sum(e.amount_micro_usd for e in together if _key(e) == key)) for key in first}
    parts = split(amount, charged) if any(charged.values()) else dict.fromkeys(charged, 0)
    return [
        replace(entry, from_us=from_us, amount_micro_usd=-parts[key], is_reversal=True, energy_mj=0)
        for key, entry in first.items()
    ]


def _key(of: Share | Entry) -> str:
    return f"{EntryKind(of.kind)}:{of.subject}"


def lost(entries: Iterable[Entry], until_us: int, lost_us: int, cause: str) -> tuple[Entry, ...]:
    """Returns the pairs of entries that move a job's lost cost to waste. The lost time is the `lost_us` microseconds
    before `until_us`.

    `entries` are the job's entries that end after the start of the lost time. An entry that was moved before is not
    moved again.
    """
    spans: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind is EntryKind.JOB or entry.cause:
            spans[(entry.node_id, entry.to_us)].append(entry)
    return tuple(pair for together in spans.values() for pair in _moved(together, until_us - lost_us, until_us, cause))


def _moved(together: list[Entry], from_us: int, until_us: int, cause: str) -> tuple[Entry, ...]:
    """Returns the pair that moves the lost part of an entry to waste.

    `together` contains the entry, the reversals that cut it short, and the pair of an earlier loss, if there was one.
    """
    first = next((entry for entry in together if not (entry.is_reversal or entry.cause)), None)
    if first is None or any(entry.cause for entry in together):
        return ()
    end_us = min((entry.from_us for entry in together if entry.is_reversal), default=first.to_us)
    part_us = min(end_us, until_us) - max(first.from_us, from_us)
    charged = sum(entry.amount_micro_usd for entry in together)
    amount = charged * part_us // (end_us - first.from_us) if part_us > 0 else 0
    if amount <= 0:
        return ()
    return (
        replace(first, amount_micro_usd=-amount, cause=cause, energy_mj=0),
        replace(first, kind=EntryKind.WASTE, amount_micro_usd=amount, cause=cause, energy_mj=0),
    )
