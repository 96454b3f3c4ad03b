"""The options that several commands share: what a job needs of its nodes, and what the queue is told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer

from raytide.core.errors import UsageError
from raytide.core.objects.job import BudgetPer
from raytide.sdk.options import GangOptions, JobOptions
from raytide.sdk.script import pairs_of, parse_range, parse_shape

Gpus = Annotated[str | None, typer.Option(help="GPUs of each node: 8, H100:8, or 0.5.")]
Cpus = Annotated[float | None, typer.Option(min=0, help="CPUs of each node; 1 where nothing is asked for.")]
Memory = Annotated[str | None, typer.Option(help="Memory of each node: 64GiB.")]
Nodes = Annotated[str | None, typer.Option(help="The number of nodes; `1:4` starts and goes on with fewer than 4.")]
Spot = Annotated[
    bool | None, typer.Option("--spot/--on-demand", help="Only spot nodes, or none; whichever costs less by default.")
]
Labels = Annotated[list[str] | None, typer.Option(help="A label that the nodes must have, KEY=VALUE.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="2xGPU:8,CPU:16@KEY=VALUE in place of these; several in order of preference."),
]
Priority = Annotated[str, typer.Option(help="A class of metadata.raytide.priorities.")]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="USD[/month]",
        help="Dollars in all or each month. A job that has cost as much is not admitted, and checkpoints and waits "
        "where it may be preempted.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        help="When the job must be done: 8h, 1d12h, or 2026-11-22T08:00 (local time without a zone). The job then runs "
        "on spot, waits, or runs on demand, whichever is the cheapest way to be in time."
    ),
]
EstimateH = Annotated[
    float | None,
    typer.Option("--estimate", help="Hours of work on the whole gang, until the job itself reports its progress."),
]


def resources(
    gpus: str | None,
    cpus: float | None,
    memory: str | None,
    nodes: str | None,
    spot: bool | None,
    labels: Sequence[str] | None,
    shapes: Sequence[str] | None = None,
) -> GangOptions:
    """Returns the options that were given, as the SDK takes them."""
    options: GangOptions = {}
    if gpus is not None:
        options["gpus"] = gpus
    if cpus is not None:
        options["cpus"] = cpus
    if memory is not None:
        options["memory"] = memory
    if nodes is not None:
        options["nodes"] = parse_range(nodes, "--nodes")
    if spot is not None:
        options["spot"] = spot
    if labels:
        options["labels"] = pairs_of(labels, "--labels")
    if shapes:
        if options:
            raise UsageError(
                "--shape cannot be combined with --gpus, --cpus, --memory, --nodes, --spot or --labels.",
                hint="Write all of it into the shape: 2xGPU:8,CPU:16@KEY=VALUE.",
            )
        options["shapes"] = [parse_shape(text) for text in shapes]
    return options


def queueing(priority: str, budget: str | None, deadline: str | None, estimate_h: float | None) -> JobOptions:
    """Returns what the queue is told of a job, as the SDK takes it."""
    options: JobOptions = {"priority": priority, "deadline": _with_zone(deadline), "estimate_h": estimate_h}
    if budget is not None:
        options["budget_usd"], options["budget_per"] = parse_limit(budget)
    return options


def parse_limit(text: str) -> tuple[float, BudgetPer]:
    """Returns the dollars of `500` or `500/month`, and what they are for."""
    amount, slash, period = text.partition("/")
    wrong, hint = f"{text} is no budget.", "Write 250 or 250/month."
    if slash and period != "month":
        raise UsageError(wrong, hint=hint)
    return finite(amount, wrong, hint), "month" if slash else "job"


def finite(text: str, wrong: str, hint: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(wrong, hint=hint)
    return number


def _with_zone(deadline: str | None) -> str | None:
    """A date and time without a zone is local time; any other text is left to the job's own check."""
    try:
        return deadline and datetime.fromisoformat(deadline).astimezone().isoformat()
    except ValueError:
        return deadline
