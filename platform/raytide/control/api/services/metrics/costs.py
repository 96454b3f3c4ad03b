"""Metrics of money: what is booked, and how far teams are into their budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raytide.core.money import MICRO, month_of
from raytide.core.objects.ledger_entry import OpenInterval
from raytide.core.objects.team import TeamSpec
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.core.telemetry.catalogue import cost
from raytide.core.telemetry.metrics import MetricSample
from raytide.ledger.report import hours_left_in_month, rates


def cost_samples(
    books: LedgerQueries, teams: Mapping[str, TeamSpec], intervals: Sequence[OpenInterval], now_us: int
) -> Iterator[MetricSample]:
    booked = books.booked("kind")
    yield from (MetricSample(cost.BOOKED, amount / MICRO, (kind,)) for kind, amount in sorted(booked.items()))
    spent = books.spent([], month_of(now_us)).teams_month
    burn: Counter[str] = Counter()
    for (_, _, team, _), micro_usd_h in rates(intervals).items():
        burn[team] += round(micro_usd_h)
    for name, spec in sorted(teams.items()):
        budget_usd = spec.budget.soft_usd if spec.budget.hard_usd is None else spec.budget.hard_usd
        if budget_usd:
            amount = spent.get(name, 0)
            at_end = amount + burn[name] * hours_left_in_month(now_us)
            yield MetricSample(cost.BUDGET_USED, amount / MICRO / budget_usd, (name,))
            yield MetricSample(cost.BUDGET_FORECAST, at_end / MICRO / budget_usd, (name,))
