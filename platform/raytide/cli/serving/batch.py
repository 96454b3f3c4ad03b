"""The command `batch`, which submits a job that answers the requests in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.jobs.submit import end_with
from raytide.cli.options import (
    Budget,
    Cpus,
    Deadline,
    EstimateH,
    Gpus,
    Labels,
    Memory,
    Priority,
    Spot,
    queueing,
    resources,
)
from raytide.cli.show import ClusterName, Json
from raytide.control.client import ApiClient
from raytide.sdk.client import Client
from raytide.sdk.options import GangOptions


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A JSON line for each request, as in OpenAI's batches.")
    ],
    model: Annotated[str, typer.Option(help="A Hugging Face directory, registry:NAME@ALIAS, or an endpoint's name.")],
    out: Annotated[Path, typer.Option(help="The file for the answers, in the order of the input.")],
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    spot: Spot = None,
    labels: Labels = None,
    name: Annotated[str, typer.Option(help="The job's name; the input's by default.")] = "",
    team: Annotated[str | None, typer.Option(help="The job's team; the token's own by default.")] = None,
    priority: Priority = "low",
    budget: Budget = None,
    deadline: Deadline = None,
    estimate: EstimateH = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the job ends.")] = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Answer the requests of a file, in a job of the queue.

    The job is preemptible and continues where it was stopped. Both files must be on storage that all nodes can read.
    """
    options: GangOptions = {
        **resources(gpus, cpus, memory, None, spot, labels),
        **queueing(priority, budget, deadline, estimate),
        "name": name or source.stem,
        "team": team,
    }
    end_with(Client(ApiClient.find(cluster)).batch(source, out, model=model, **options), wait=wait, json=json)
