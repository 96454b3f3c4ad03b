"""Books intervals as entries: each moment of each billed node exactly once, whatever crashes happen.

The amounts of one node telescope from the start of its bill. Its entries therefore sum to the provider's bill, however
many intervals they split the node's life into. The time between two observations is booked with the occupancy of the
first one. The cost of lost work moves from the job to waste, with the cause of the loss. Entries never change: for each
entry with a part of the loss, a pair is booked over the same span, one that takes the part off the job and one that
books it as waste. A pair sums to zero, so a node's entries still sum to its bill.
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
    """Returns a node's first open interval. Its bill began at `started_us`, which may be before the node was first
    observed.
    """
    return OpenInterval(node_id, price_micro_usd_h, started_us, started_us, occupancy)


def book(
    interval: OpenInterval, now_us: int, occupancy: Occupancy, *, at_once: bool = False, energy_mj: int = 0
) -> tuple[tuple[Entry, ...], OpenInterval]:
    """Books the interval up to now if the occupancy changed, the interval is long, or `at_once` is set; else leaves it
    open.

    Returns the entries and the open interval. `energy_mj` is the node's energy since its last entries. The clock may
    step back.
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
    """Returns the last entries of a node whose bill ends at `end_us`.

    If the provider reports an end before the booked time, `booked`, the node's entries that end after `end_us`, are
    reversed from `end_us` on. `origins` are the start times of the node's earlier prices.
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
    """Returns the entries of the open interval up to `until_us`, either to book them or to show them as accrued.

    The node's energy is split in the same proportions as its cost.
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
    """Returns the pairs that move the job's charges in the `lost_us` microseconds before `until_us` to waste.

    `entries` are all entries of the job that end within that time or after it. No entry is moved twice.
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
