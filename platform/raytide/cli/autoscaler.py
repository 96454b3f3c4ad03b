"""autoscaler explain: every decision with its reason."""

from __future__ import annotations

from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json
from raytide.control.client import Client


def explain(
    limit: Annotated[int, typer.Option(min=1, help="How many decisions, the latest last.")] = 20,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the latest decisions, with reasons.

    What was launched, drained, placed or left waiting, and why.
    """
    plans = Client.find(cluster).plans(limit=limit)
    if json:
        as_json(plans)
        return
    from raytide.autoscaler.explain import lines

    for line in lines(plans):
        print(line)
