"""The commands `quota`, `budget` and `cost`: limits on the resources and the spending of teams, what teams use, and
costs by group.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from raytide.cli.options import finite, parse_limit
from raytide.cli.show import ClusterName, Json, as_json, as_result, as_table
from raytide.control.client import ApiClient
from raytide.control.views import CostReport, CostTable, JobView, TeamView
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.money import MICRO, format_usd, micro_usd
from raytide.core.objects.job import BudgetPer
from raytide.core.objects.team import TeamSpec
from raytide.ledger.report import By

Amounts = Annotated[list[str] | None, typer.Argument(help="RESOURCE=AMOUNT: GPU=8, H100=16, CPU=64.")]
Name = Annotated[str, typer.Argument(help="A team, as cluster.yaml names it.")]

Money = Callable[[int], str]
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_QUOTA = frozenset({"quota", "borrow", "lend", "weight"})
_PAGE = 1000

quota = typer.Typer(rich_markup_mode=None, help="Show or change the quotas of teams.")
budget = typer.Typer(rich_markup_mode=None, help="Show or change the budgets of teams and jobs.")


@quota.callback(invoke_without_command=True)
def quotas(context: typer.Context, cluster: ClusterName = None, json: Json = False) -> None:
    """Show the quota and usage of each team."""
    if context.invoked_subcommand is not None:
        return
    teams = ApiClient.find(cluster).teams()
    if json:
        as_json(teams)
        return
    rows = [row for team in teams for row in _quota_rows(team)]
    head = ("TEAM", "PARENT", "WEIGHT", "RESOURCE", "QUOTA", "IN USE", "BORROWED", "MORE", "RECENT GPU-H", "SET BY")
    as_table(head, rows)


@quota.command("set")
def set_quota(
    team: Name,
    amounts: Amounts = None,
    borrow: Annotated[
        list[str] | None, typer.Option(help="RESOURCE=AMOUNT: the most that it may borrow beyond its quota.")
    ] = None,
    lend: Annotated[
        list[str] | None, typer.Option(help="RESOURCE=AMOUNT: the most of its quota that others may use.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="The team's weight in fair sharing.")] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Change a team's quota. A resource that you do not name keeps its quota. If no earlier `quota set` named the
    resource, its quota still follows cluster.yaml.
    """
    changes: dict[str, object] = {} if weight is None else {"weight": weight}
    for what, given in (("quota", amounts), ("borrow", borrow), ("lend", lend)):
        if given:
            changes[what] = _amounts(given)
    if not changes:
        raise UsageError("no change was given.", hint="Write RESOURCE=AMOUNT, --borrow, --lend or --weight.")
    _show_quota(team, ApiClient.find(cluster).change_team(team, **changes), json)


@quota.command("reset")
def reset_quota(team: Name, cluster: ClusterName = None, json: Json = False) -> None:
    """Remove the settings that `quota set` stored for a team. The settings in cluster.yaml then apply again."""
    _show_quota(team, ApiClient.find(cluster).change_team(team, **dict.fromkeys(_QUOTA)), json)


@budget.callback(invoke_without_command=True)
def budgets(context: typer.Context, cluster: ClusterName = None, json: Json = False) -> None:
    """Show the budget and this month's cost of each team, and the active jobs that have budgets of their own."""
    if context.invoked_subcommand is not None:
        return
    client = ApiClient.find(cluster)
    teams = client.teams()
    if json:
        as_json(teams)
        return
    as_table(("TEAM", "SOFT", "HARD", "SPENT", "WITH RESERVED", "SET BY"), [_budget_row(team) for team in teams])
    jobs = [view for view in _active(client) if _budgets_of(view) != (None, None)]
    if jobs:
        print()
        as_table(("JOB", "NAME", "TEAM", "PER", "SOFT", "HARD", "SPENT"), [_job_row(view) for view in jobs])


@budget.command("set")
def set_budget(
    name: Annotated[str, typer.Argument(help="A team, or a job.")],
    limit: Annotated[
        str,
        typer.Argument(metavar="USD[/month]", help="Dollars: in total for a job, each month for a team; or `none`."),
    ],
    soft: Annotated[bool, typer.Option("--soft", help="A soft limit: beyond it, only spot nodes are used.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Limit the cost of a team or a job. A team's limit applies to each month. A job's limit applies to the whole job,
    or to each month if the limit ends in `/month`.
    """
    usd: float | None = None
    per: BudgetPer = "job"
    if limit != "none":
        usd, per = parse_limit(limit)
    client = ApiClient.find(cluster)
    if name in {team.name for team in client.teams()}:
        changed: object = client.change_team(name, budget={"soft_usd" if soft else "hard_usd": usd})
    else:
        try:
            changed = client.set_job_budget(name, usd, soft=soft, per=per)
        except NotFoundError:
            hint = "`raytide budget` lists the teams, `raytide ps` the jobs."
            raise NotFoundError(f"there is neither a team nor a job {name}.", hint=hint) from None
    span = " a month" if per == "month" or isinstance(changed, TeamSpec) else ""
    amount = "without limit" if usd is None else f"{format_usd(micro_usd(usd))}{span}"
    as_result(changed, f"{name} may spend {amount}{' before it is limited to spot' if soft else ''}", json)


@budget.command("reset")
def reset_budget(team: Name, cluster: ClusterName = None, json: Json = False) -> None:
    """Remove the limits that `budget set` stored for a team. The limits in cluster.yaml then apply again."""
    spec = ApiClient.find(cluster).change_team(team, budget=None)
    as_result(spec, f"{team} may spend what cluster.yaml says", json)


def _show_quota(team: str, spec: TeamSpec, json: bool) -> None:
    text = f"{team}: quota {_words(spec.quota)}, borrows {_words(spec.borrow)}, lends {_words(spec.lend)}"
    as_result(spec, text, json)


def _amounts(given: list[str]) -> dict[str, float]:
    wrong = f"{' '.join(given)} is not a list of RESOURCE=AMOUNT."
    pairs = (text.partition("=") for text in given)
    return {name: finite(amount, wrong, "Write H100=16.") for name, _, amount in pairs}


def _quota_rows(team: TeamView) -> list[tuple[object, ...]]:
    lead = (team.name, team.spec.parent or "-", f"{team.spec.weight:g}")
    end = (f"{team.use.recent_gpu_h:.1f}", "raytide quota" if _QUOTA & set(team.given) else "cluster.yaml")
    names = sorted(team.use.own.keys() | team.spec.quota.keys())
    return [
        (
            *lead,
            name,
            f"{team.use.own.get(name, team.spec.quota.get(name, 0.0)):g}",
            f"{(used := team.use.used.get(name, 0.0)):g}",
            f"{max(0.0, used - team.use.own.get(name, 0.0)):g}",
            f"{team.use.available.get(name, 0.0):g}",
            *end,
        )
        for name in names
    ] or [(*lead, "-", "no limit", "-", "-", "-", *end)]


def _budget_row(team: TeamView) -> tuple[str, ...]:
    shown = _amounts_of(team.spec.budget.soft_usd, team.spec.budget.hard_usd)
    by = "raytide budget" if "budget" in team.given else "cluster.yaml"
    return (team.name, *shown, format_usd(team.spent_micro_usd), format_usd(team.use.committed_micro_usd), by)


def _active(client: ApiClient) -> list[JobView]:
    """Returns all active jobs. The API may shorten any page to limit its bytes, so the last page is the one without new
    jobs."""
    found: dict[str, JobView] = {}
    while True:
        page = client.jobs(limit=_PAGE, offset=len(found), active=True)
        before = len(found)
        found |= {view.job.id: view for view in page}
        if len(found) == before:
            return list(found.values())


def _job_row(view: JobView) -> tuple[str, ...]:
    spec = view.job.spec
    spent = view.cost_micro_usd if view.month_micro_usd is None else view.month_micro_usd
    shown = _amounts_of(*_budgets_of(view))
    return (view.job.id, spec.name, spec.team, spec.budget_per, *shown, format_usd(spent))


def _budgets_of(view: JobView) -> tuple[float | None, float | None]:
    return view.job.spec.soft_budget_usd, view.job.spec.budget_usd


def _amounts_of(*limits: float | None) -> list[str]:
    return ["-" if limit is None else format_usd(micro_usd(limit)) for limit in limits]


def _words(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in sorted(amounts.items())) or "without limit"


def cost(
    by: Annotated[By | None, typer.Option(help="The grouping.")] = None,
    since: Annotated[str, typer.Option(help="Only intervals that began within this time: 12h, 30d.")] = "",
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Add the expected cost at the end of the month.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values in dollars.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the cost by job, endpoint and team, or by the group that --by names."""
    client = ApiClient.find(cluster)
    if by is None and not (since or forecast or as_csv):
        _show_report(client.cost(), json)
        return
    table = client.costs(by or "team", since_s=time.time() - seconds(since) if since else 0.0)
    if json:
        as_json(table)
    elif as_csv:
        csv.writer(sys.stdout).writerows(_columns(table, forecast, lambda amount: f"{amount / MICRO:.6f}"))
    else:
        head, *rows = _columns(table, forecast, format_usd)
        as_table([str(name).upper() for name in head], rows)


def seconds(text: str) -> float:
    """Returns the number of seconds in a duration such as `30d`. Raises UsageError for other texts."""
    if (found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([mhdw])", text)) is None:
        raise UsageError(f"{text!r} is not a duration.", hint="Write 45m, 12h, 30d or 4w.")
    return float(found[1]) * _UNITS_S[found[2]]


def _columns(table: CostTable, forecast: bool, money: Money) -> list[list[str]]:
    """Returns the table's lines, header and total included; columns of energy and emissions only if energy is known."""
    ahead, energy = ["forecast"] if forecast else [], ["kwh", "co2_kg"] if table.kwh else []
    lines = [[table.by, "cost", "per_hour", *ahead, "lost", "lost_to", *energy]]

    def used(kwh: float) -> list[str]:
        return [f"{kwh:.3f}", f"{table.co2_kg(kwh):.3f}"] if energy else []

    for row in table.rows:
        end = [money(row.forecast_micro_usd)] if forecast else []
        lost = [money(row.lost_micro_usd), " ".join(row.lost_to) or "-"]
        lines.append([row.key, money(row.amount_micro_usd), money(row.micro_usd_h), *end, *lost, *used(row.kwh)])
    end = [money(table.forecast_micro_usd)] if forecast else []
    burn, lost_ = sum(row.micro_usd_h for row in table.rows), sum(row.lost_micro_usd for row in table.rows)
    return [*lines, ["total", money(table.total_micro_usd), money(burn), *end, money(lost_), "-", *used(table.kwh)]]


def _show_report(report: CostReport, json: bool) -> None:
    if json:
        as_json(report)
        return
    rows = [
        (line.kind, line.subject or "-", line.team or "-", format_usd(line.amount_micro_usd)) for line in report.lines
    ]
    total = format_usd(report.booked_micro_usd + report.accrued_micro_usd)
    as_table(("FOR", "WHOSE", "TEAM", "COST"), [*rows, ("total", "-", "-", total)])
