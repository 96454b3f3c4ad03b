"""endpoint: the revisions of endpoints."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_table
from raytide.control.client import ApiClient
from raytide.control.views import to_json

endpoint = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show the revisions of endpoints.")


@endpoint.callback()
def _group() -> None:
    """Makes `endpoint` a group although it has one command."""


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
