"""From intervals to entries: each moment of each billed node is booked exactly once, whatever happens in between.

The amounts of one node telescope from the moment its bill began, so however often its life is cut, its entries sum to
the provider's bill. Nobody knows what happened between two looks: the occupancy seen at the first holds to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytide.core.money import interval_cost, split
from raytide.core.objects.ledger_entry import Entry, EntryKind, Occupancy, OpenInterval, Share

MAX_OPEN_US = 60_000_000
"""An interval is booked at the latest after this long, so that what a running job cost is never far behind."""


def open_interval(node_id: str, price_micro_usd_h: int, started_us: int, occupancy: Occupancy) -> OpenInterval:
    """A node whose bill began at `started_us`, perhaps a while before it was first seen."""
    return OpenInterval(node_id, price_micro_usd_h, started_us, started_us, occupancy)


def book(
    interval: OpenInterval, now_us: int, occupancy: Occupancy, *, at_once: bool = False
) -> tuple[tuple[Entry, ...], OpenInterval]:
    """Book up to now if the occupancy changed, the interval is long, or it has to be `at_once`; else leave it open.
    The clock may step back."""
    is_due = at_once or occupancy != interval.occupancy or now_us - interval.from_us >= MAX_OPEN_US
    if not is_due:
        return (), interval
    until_us = max(now_us, interval.from_us)
    return cost_of(interval, until_us), replace(interval, from_us=until_us, occupancy=occupancy)


def close(
    interval: OpenInterval, end_us: int, booked: Sequence[Entry] = (), origins: Sequence[int] = ()
) -> tuple[Entry, ...]:
    """The last entries of a node whose bill ends at `end_us`.

    A provider may say afterwards that a node ended earlier than it was booked to. Then `booked`, this node's entries
    that end after `end_us`, are taken back by reversals from `end_us` on. `origins`: when each of its earlier prices
    began.
    """
    if end_us >= interval.from_us:
        return cost_of(interval, end_us)
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


def cost_of(interval: OpenInterval, until_us: int) -> tuple[Entry, ...]:
    """What the open interval costs up to `until_us`: booked at a cut, shown as accrued in between."""
    if until_us <= interval.from_us:
        return ()
    amount = interval_cost(interval.price_micro_usd_h, interval.origin_us, interval.from_us, until_us)
    shares = {_key(share): share for share in interval.occupancy}
    parts = split(amount, {key: share.weight for key, share in shares.items()})
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
        )
        for key, share in shares.items()
    )


def _reverse(origin_us: int, from_us: int, together: Sequence[Entry]) -> list[Entry]:
    """Take what is from a moment on back from whoever was charged for one span, at its price and in proportion: lost
    work as what it is."""
    span = together[0]
    stays = interval_cost(span.price_micro_usd_h, origin_us, span.from_us, from_us)
    amount = max(0, sum(entry.amount_micro_usd for entry in together) - stays)
    first = {_key(entry): entry for entry in reversed(together)}
    charged = {key: float(sum(e.amount_micro_usd for e in together if _key(e) == key)) for key in first}
    parts = split(amount, charged) if any(charged.values()) else dict.fromkeys(charged, 0)
    return [
        replace(entry, from_us=from_us, amount_micro_usd=-parts[key], is_reversal=True) for key, entry in first.items()
    ]


def _key(of: Share | Entry) -> str:
    return f"{EntryKind(of.kind)}:{of.subject}"
