"""The commands `autoscaler explain`, which shows past decisions with their reasons, and `autoscaler --dry-run`, which
shows the decision for the present state.
"""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_lines
from raytide.control.client import ApiClient
from raytide.core.errors import UsageError

scaler = typer.Typer(rich_markup_mode=None, no_args_is_help=True, invoke_without_command=True)


@scaler.callback()
def options(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the decision for the present state; execute nothing.")
    ] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the autoscaler's decisions."""
    if context.invoked_subcommand is not None:
        if dry_run:
            raise UsageError("--dry-run takes no command.", hint="Run `raytide autoscaler --dry-run`.")
        return
    if not dry_run:
        raise UsageError("a command or --dry-run is missing.", hint="See `raytide autoscaler --help`.")
    from raytide.autoscaler.explain import AFTER_KIND, lines
    from raytide.control.reconcile.decide import decide

    plan = decide(ApiClient.find(cluster).snapshot()).to_json()
    if json:
        as_json(plan)
        return
    as_lines(lines([plan]) or ["there is nothing to do"], indent=AFTER_KIND)


@scaler.command()
def explain(
    at: Annotated[
        str | None, typer.Option(help="The decision in force at this time: HH:MM, HH:MM:SS, or ISO 8601.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The number of decisions, latest last; 20, or 1 with --at.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show decisions with their reasons.

    Each line shows a decision (what was launched, drained, placed or left waiting), its reason, its cost, and the
    rejected alternatives.
    """
    until_s = None if at is None else moment(at, datetime.now().astimezone()).timestamp()
    plans = ApiClient.find(cluster).plans(limit=limit or (20 if at is None else 1), until_s=until_s)
    if json:
        as_json(plans)
        return
    from raytide.autoscaler.explain import AFTER_KIND, lines

    if until_s is not None:
        print(_held(plans, until_s))
    as_lines(lines(plans), indent=AFTER_KIND)


def moment(text: str, now: datetime) -> datetime:
    """Returns the time that a text names. A time without a date is the latest such time before `now`. A time without a
    zone is local.
    """
    try:
        if "-" in text:
            return datetime.fromisoformat(text).astimezone(now.tzinfo)
        of_day = time.fromisoformat(text)
        zone = of_day.tzinfo or now.tzinfo
        at = datetime.combine(now.astimezone(zone), of_day, zone).astimezone(now.tzinfo)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a time.", hint="Write 14:03, 14:03:20 or 2026-05-01T14:03:20+02:00."
        ) from None
    return at if at <= now else at - timedelta(days=1)


def _held(plans: list[dict[str, object]], until_s: float) -> str:
    """Returns a heading, which says whether the last plan was still in force at `until_s`."""
    if not plans:
        return "no decision is stored from that time or before it"
    last_at_s = float(str(plans[-1]["last_at_s"]))
    if last_at_s >= until_s:
        return "the decision in force then:"
    return f"nothing was to be done then; the last decision, {until_s - last_at_s:.0f} s earlier:"
