"""autoscaler explain and --dry-run: every decision with its reason, those that were made and the one that would be."""

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
        bool, typer.Option("--dry-run", help="Decide on what the cluster is now; print it, do nothing of it.")
    ] = False,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Look into the autoscaler."""
    if context.invoked_subcommand is not None:
        if dry_run:
            raise UsageError("--dry-run stands alone.", hint="Say `raytide autoscaler --dry-run`.")
        return
    if not dry_run:
        raise UsageError("nothing was asked for.", hint="Say --dry-run, or what: `raytide autoscaler --help`.")
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
        str | None, typer.Option(help="What held then: HH:MM, HH:MM:SS, or a date with a time (ISO 8601).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many decisions, the latest last; 20, or 1 with --at.")
    ] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show decisions with their reasons.

    What was launched, drained, placed or left waiting, why, what it costs, and what was rejected for it.
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


def moment(said: str, now: datetime) -> datetime:
    """The time that is meant: without a date the last one that was, without a zone the local one."""
    try:
        if "-" in said:
            return datetime.fromisoformat(said).astimezone(now.tzinfo)
        at = datetime.combine(now, time.fromisoformat(said), now.tzinfo)
    except ValueError:
        raise UsageError(f"{said!r} is no time.", hint="Say 14:03, 14:03:20 or 2026-05-01T14:03:20+02:00.") from None
    return at if at <= now else at - timedelta(days=1)


def _held(plans: list[dict[str, object]], until_s: float) -> str:
    """Whether the last of the plans still held at that time."""
    if not plans:
        return "nothing had been decided by then, or it is too long ago"
    last_at_s = float(str(plans[-1]["last_at_s"]))
    if last_at_s >= until_s:
        return "this held then:"
    return f"nothing was to be done then; the last decision before it, {until_s - last_at_s:.0f} s earlier:"
