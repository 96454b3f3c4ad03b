"""cost: who pays for what."""

from __future__ import annotations

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import Client
from raytide.control.wire import to_json
from raytide.core.money import format_usd


def cost(cluster: ClusterName = None, json: Json = False) -> None:
    """Dollars by job, endpoint and team."""
    report = Client.find(cluster).cost()
    if json:
        as_json(to_json(report))
        return
    rows = [
        (line.kind, line.subject or "-", line.team or "-", format_usd(line.amount_micro_usd)) for line in report.lines
    ]
    total = format_usd(report.booked_micro_usd + report.accrued_micro_usd)
    as_table(("FOR", "WHOSE", "TEAM", "COST"), [*rows, ("total", "-", "-", total)])
