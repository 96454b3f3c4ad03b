"""quota, budget: what teams may hold and spend, and how much of it they do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import ApiClient
from raytide.control.views import JobView, TeamView
from raytide.control.wire import to_json
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.money import format_usd, micro_usd
from raytide.core.objects.job import BudgetPer
from raytide.core.objects.team import TeamSpec

Amounts = Annotated[list[str] | None, typer.Argument(help="RESOURCE=AMOUNT: GPU=8, H100=16, CPU=64.")]
Name = Annotated[str, typer.Argument(help="A team, as cluster.yaml names it.")]

_QUOTA = frozenset({"quota", "borrow", "lend", "weight"})
_PAGE = 1000

quota = typer.Typer(help="What teams may hold.")
budget = typer.Typer(help="What teams and jobs may spend.")


@quota.callback(invoke_without_command=True)
def quotas(context: typer.Context, cluster: ClusterName = None, json: Json = False) -> None:
    """What teams may hold, and hold."""
    if context.invoked_subcommand is not None:
        return
    teams = ApiClient.find(cluster).teams()
    if json:
        as_json([to_json(team) for team in teams])
        return
    rows = [row for team in teams for row in _quota_rows(team)]
    head = ("TEAM", "PARENT", "WEIGHT", "RESOURCE", "QUOTA", "IN USE", "BORROWED", "MORE", "RECENT GPU-H", "SET BY")
    as_table(head, rows)


@quota.command("set")
def set_quota(
    team: Name,
    amounts: Amounts = None,
    borrow: Annotated[list[str] | None, typer.Option(help="RESOURCE=AMOUNT beyond its own at most.")] = None,
    lend: Annotated[list[str] | None, typer.Option(help="RESOURCE=AMOUNT of its own that others may use.")] = None,
    weight: Annotated[float | None, typer.Option(help="Its part in the fair share.")] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Change what a team may hold; resources that are not named stay as they are, and follow cluster.yaml."""
    changes: dict[str, object] = {} if weight is None else {"weight": weight}
    for what, given in (("quota", amounts), ("borrow", borrow), ("lend", lend)):
        if given:
            changes[what] = _amounts(given)
    if not changes:
        raise UsageError("nothing was given to set.", hint="Write RESOURCE=AMOUNT, --borrow, --lend or --weight.")
    _show_quota(team, ApiClient.find(cluster).change_team(team, **changes), json)


@quota.command("reset")
def reset_quota(team: Name, cluster: ClusterName = None, json: Json = False) -> None:
    """Forget what `quota set` set: cluster.yaml holds again."""
    _show_quota(team, ApiClient.find(cluster).change_team(team, **dict.fromkeys(_QUOTA)), json)


@budget.callback(invoke_without_command=True)
def budgets(context: typer.Context, cluster: ClusterName = None, json: Json = False) -> None:
    """What teams may spend this month, and have; and jobs that are not over and have a budget of their own."""
    if context.invoked_subcommand is not None:
        return
    client = ApiClient.find(cluster)
    teams = client.teams()
    if json:
        as_json([to_json(team) for team in teams])
        return
    as_table(("TEAM", "SOFT", "HARD", "SPENT", "WITH RESERVED", "SET BY"), [_budget_row(team) for team in teams])
    jobs = [view for view in _active(client) if _budgets_of(view) != (None, None)]
    if jobs:
        print()
        as_table(("JOB", "NAME", "TEAM", "PER", "SOFT", "HARD", "SPENT"), [_job_row(view) for view in jobs])


@budget.command("set")
def set_budget(
    who: Annotated[str, typer.Argument(help="A team, or a job.")],
    limit: Annotated[
        str,
        typer.Argument(metavar="USD[/month]", help="Dollars: in all for a job, each month for a team; or `none`."),
    ],
    soft: Annotated[bool, typer.Option("--soft", help="The limit from which on it has spot nodes only.")] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Limit what a team spends a month, or a job in all or a month."""
    usd: float | None = None
    per: BudgetPer = "job"
    if limit != "none":
        usd, per = dollars(limit)
    client = ApiClient.find(cluster)
    if who in {team.name for team in client.teams()}:
        changed: object = client.change_team(who, budget={"soft_usd" if soft else "hard_usd": usd})
    else:
        try:
            changed = client.set_job_budget(who, usd, soft=soft, per=per)
        except NotFoundError:
            hint = "`raytide budget` lists the teams, `raytide ps` the jobs."
            raise NotFoundError(f"there is neither a team nor a job {who}.", hint=hint) from None
    if json:
        as_json(to_json(changed))
    else:
        span = " a month" if per == "month" or isinstance(changed, TeamSpec) else ""
        amount = "without limit" if usd is None else f"{format_usd(micro_usd(usd))}{span}"
        print(f"{who} may spend {amount}{' before it is limited to spot' if soft else ''}")


@budget.command("reset")
def reset_budget(team: Name, cluster: ClusterName = None, json: Json = False) -> None:
    """Forget what `budget set` set for a team: cluster.yaml holds again."""
    spec = ApiClient.find(cluster).change_team(team, budget=None)
    if json:
        as_json(to_json(spec))
    else:
        print(f"{team} may spend what cluster.yaml says")


def _show_quota(team: str, spec: TeamSpec, json: bool) -> None:
    if json:
        as_json(to_json(spec))
    else:
        print(f"{team}: quota {_words(spec.quota)}, borrows {_words(spec.borrow)}, lends {_words(spec.lend)}")


def dollars(text: str) -> tuple[float, BudgetPer]:
    """`500`, or `500/month`."""
    amount, slash, period = text.partition("/")
    wrong, hint = f"{text} is no budget.", "Write 250 or 250/month."
    if slash and period != "month":
        raise UsageError(wrong, hint=hint)
    return _finite(amount, wrong, hint), "month" if slash else "job"


def _amounts(given: list[str]) -> dict[str, float]:
    wrong = f"{' '.join(given)} is no list of RESOURCE=AMOUNT."
    pairs = (text.partition("=") for text in given)
    return {name: _finite(amount, wrong, "Write H100=16.") for name, _, amount in pairs}


def _finite(text: str, wrong: str, hint: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(wrong, hint=hint)
    return number


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
    """All jobs that are not over. A page may be cut off by its size, so only one without a new job is the last."""
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
