"""simulate deadline, simulate jobs: production decisions and their baselines on recorded traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.show import Json, as_json, as_table


def deadline(
    spot: Annotated[Path, typer.Option(help="A JSON file of spot traces.")],
    collection: Annotated[str, typer.Option(help="The traces whose key contains this.")],
    policy: Annotated[
        str,
        typer.Option(help="raytide, greedy, uniform-progress (its variant C), uniform-progress-a, -b, -c, optimal."),
    ] = "raytide",
    zones: Annotated[str, typer.Option(help="Zones of one pool, separated by commas; all when left out.")] = "",
    slack: Annotated[float, typer.Option(help="What the deadline leaves beyond the work, as a share of it.")] = 0.25,
    hours: Annotated[float, typer.Option(help="Work on one node.")] = 48.0,
    restart_hours: Annotated[float, typer.Option(help="What every start wastes.")] = 0.2,
    starts: Annotated[int, typer.Option(help="Runs, evenly over the trace.")] = 12,
    gpu: Annotated[str | None, typer.Option(help="The GPU of the traces, where they are of several.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="The same for the GPUs of a node.")] = None,
    json: Json = False,
) -> None:
    """Run a job with a deadline on recorded spot markets.

    Costs are shares of the job's cost on demand, means over the starts.
    """
    from raytide.simulate.deadline import run
    from raytide.simulate.deadline_policies import policy as named
    from raytide.simulate.spot import read, select

    runs = named(policy)
    wanted = [zone.strip() for zone in zones.split(",") if zone.strip()]
    traces = select(read(spot), collection, gpu=gpu, gpus_per_node=gpus_per_node, zones=wanted)
    report = asdict(
        run(
            traces,
            runs,
            policy=policy,
            collection=collection,
            slack=slack,
            hours=hours,
            restart_h=restart_hours,
            count=starts,
        )
    )
    if json:
        as_json(report)
    else:
        as_table(("WHAT", "VALUE"), report.items())
