"""endpoint: the revisions of endpoints, and the starts of their replicas."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import ApiClient
from raytide.control.views import to_json

PHASES = ("node", "process", "stage", "load", "warm-up")
endpoint = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show endpoints and their adapters.")


@endpoint.command()
def history(
    name: Annotated[str, typer.Argument(help="The endpoint.")], cluster: ClusterName = None, json: Json = False
) -> None:
    """List the revisions of an endpoint, newest first."""
    revisions = ApiClient.find(cluster).revisions(name)
    if json:
        as_json([to_json(revision) for revision in revisions])
        return
    rows = [
        (
            each.number,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.at_s)),
            each.user,
            (each.spec.version or "-") if each.spec else "-",
            each.spec.model if each.spec else f"unreadable: {each.unreadable}",
            each.why,
        )
        for each in revisions
    ]
    as_table(("REVISION", "AT", "USER", "VERSION", "MODEL", "WHY"), rows)


@endpoint.command()
def startup(
    name: Annotated[str, typer.Argument(help="The endpoint.")], cluster: ClusterName = None, json: Json = False
) -> None:
    """Show how long each phase of its replicas' starts took, or takes so far.

    A start waits for a node, then for a process of Ray on it, copies the model from its object store, loads it, and
    warms the engine up.
    """
    startups = ApiClient.find(cluster).endpoint(name).startups
    if json:
        as_json([to_json(each) for each in startups])
        return
    rows = []
    for each in startups:
        seconds = dict(each.phases)
        last = len(each.phases) - (not each.is_ready)
        shown = [
            f"{seconds[phase]:.1f}" + ("..." if place >= last else "") if phase in seconds else "-"
            for place, phase in enumerate(PHASES)
        ]
        rows.append((each.id, *shown, f"{sum(seconds.values()):.1f}", each.detail or "-"))
    as_table(("REPLICA", *(f"{phase.upper()} (s)" for phase in PHASES), "ALL (s)", "MODEL"), rows)
