"""Lost work: its cost moves from the job to waste, with the cause of the loss.

Entries never change: for each entry with a part of the loss, a pair is booked over the same span, one that takes the
part off the job and one that books it as waste. A pair sums to zero, so a node's entries still sum to its bill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from raytide.core.objects.ledger_entry import Entry, EntryKind


def lost(entries: Iterable[Entry], until_us: int, lost_us: int, cause: str) -> tuple[Entry, ...]:
    """Returns the pairs that move the job's charges over the last `lost_us` before `until_us` to waste.

    `entries`: all of the job's that end within that time or after it. No entry is moved twice.
    """
    spans: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind is EntryKind.JOB or entry.cause:
            spans[(entry.node_id, entry.to_us)].append(entry)
    return tuple(pair for together in spans.values() for pair in _moved(together, until_us - lost_us, until_us, cause))


def _moved(together: list[Entry], from_us: int, until_us: int, cause: str) -> tuple[Entry, ...]:
    """Returns entries that move the lost part to waste. `together`: an entry, the reversals that cut it short, and the
    pair of an earlier loss, if any.
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
