"""cost: who pays for what."""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import ApiClient
from raytide.control.views import CostReport, CostTable
from raytide.control.wire import to_json
from raytide.core.errors import UsageError
from raytide.core.money import MICRO, format_usd
from raytide.ledger.report import By

Money = Callable[[int], str]
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def cost(
    by: Annotated[By | None, typer.Option(help="How to group it.")] = None,
    since: Annotated[str, typer.Option(help="Only what began since then: 12h, 30d.")] = "",
    forecast: Annotated[bool, typer.Option("--forecast", help="Also what it will be at the month's end.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, in dollars.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Dollars by job, endpoint and team, or grouped."""
    client = ApiClient.find(cluster)
    if by is None and not (since or forecast or as_csv):
        _show_report(client.cost(), json)
        return
    table = client.costs(by or "team", since_s=time.time() - seconds(since) if since else 0.0)
    if json:
        as_json(to_json(table))
    elif as_csv:
        csv.writer(sys.stdout).writerows(_columns(table, forecast, lambda amount: f"{amount / MICRO:.6f}"))
    else:
        head, *rows = _columns(table, forecast, format_usd)
        as_table([str(name).upper() for name in head], rows)


def seconds(text: str) -> float:
    """`30d` in seconds."""
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)) is None:
        raise UsageError(f"{text!r} is no time.", hint="Write 45m, 12h, 30d or 4w.")
    return float(found[1]) * _UNITS_S[found[2]]


def _columns(table: CostTable, forecast: bool, money: Money) -> list[list[str]]:
    lines = [[table.by, "cost", "per_hour", *(["forecast"] if forecast else []), "lost", "lost_to"]]
    for row in table.rows:
        end = [money(row.forecast_micro_usd)] if forecast else []
        lost = [money(row.lost_micro_usd), " ".join(row.lost_to) or "-"]
        lines.append([row.key, money(row.amount_micro_usd), money(row.micro_usd_h), *end, *lost])
    end = [money(table.forecast_micro_usd)] if forecast else []
    burn, lost_ = sum(row.micro_usd_h for row in table.rows), sum(row.lost_micro_usd for row in table.rows)
    return [*lines, ["total", money(table.total_micro_usd), money(burn), *end, money(lost_), "-"]]


def _show_report(report: CostReport, json: bool) -> None:
    if json:
        as_json(to_json(report))
        return
    rows = [
        (line.kind, line.subject or "-", line.team or "-", format_usd(line.amount_micro_usd)) for line in report.lines
    ]
    total = format_usd(report.booked_micro_usd + report.accrued_micro_usd)
    as_table(("FOR", "WHOSE", "TEAM", "COST"), [*rows, ("total", "-", "-", total)])
