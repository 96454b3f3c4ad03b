"""Books intervals as entries: each moment of each billed node exactly once, whatever crashes happen.

The amounts of one node telescope from the start of its bill, so its entries sum to the provider's bill, however often
its life is cut. Between two observations the occupancy of the first one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytide.core.money import interval_cost, split
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share

MAX_OPEN_US = 60_000_000
"""The longest open interval, so that the booked cost of a running job is never far behind."""


def open_interval(node_id: str, price_micro_usd_h: int, started_us: int, occupancy: Occupancy) -> OpenInterval:
    """Opens the first interval of a node whose bill began at `started_us`, maybe before its first observation."""
    return OpenInterval(node_id, price_micro_usd_h, started_us, started_us, occupancy)


def book(
    interval: OpenInterval, now_us: int, occupancy: Occupancy, *, at_once: bool = False, energy_mj: int = 0
) -> tuple[tuple[Entry, ...], OpenInterval]:
    """Books up to now, with the energy since the last entries, if the occupancy changed, the interval is long, or
    `at_once` is set; else leaves it open. The clock may step back.
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

    If the provider reports an end before the booked time, `booked` (the node's entries that end after `end_us`) are
    reversed from `end_us` on. `origins`: the start times of its earlier prices.
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
    """Returns the entries of the open interval up to `until_us`: booked at a cut, shown as accrued before. The node's
    energy is split as its cost is.
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
    """Reverses the entries of one span from a moment on, in proportion to what each subject was charged; moved lost
    work is reversed as waste."""
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
