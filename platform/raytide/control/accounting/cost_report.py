"""Compares the ledger with the provider's bill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from raytide.autoscaler.providers.base import Machine
from raytide.control.views import CostLine, CostReport
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.ledger.cost import accrued
from raytide.ledger.reconcile import bill


def cost_report(books: LedgerQueries, machines: Iterable[Machine], now_us: int, team: str | None = None) -> CostReport:
    """Returns all costs up to now, and for ended machines what was booked and billed.

    With `team`, returns only the team's costs and no bill, because a machine may serve several teams.
    """
    lines = [line for line in books.lines() if team in (None, line.team)]
    booked = Counter({(str(line.kind), line.subject, line.team): line.amount_micro_usd for line in lines})
    pending = [entry for entry in accrued(books.intervals(), now_us) if team in (None, entry.team)]
    by_node = {} if team else books.booked("node")
    total = Counter(booked)
    for entry in pending:
        total[(str(entry.kind), entry.subject, entry.team)] += entry.amount_micro_usd
    ended = [machine for machine in machines if machine.ended_at_s is not None and not team]
    return CostReport(
        lines=tuple(CostLine(*key, amount_micro_usd=amount) for key, amount in sorted(total.items())),
        booked_micro_usd=sum(booked.values()),
        accrued_micro_usd=sum(entry.amount_micro_usd for entry in pending),
        billed_micro_usd=sum(bill(machine) for machine in ended),
        booked_ended_micro_usd=sum(by_node.get(machine.node_id, 0) for machine in ended),
    )
