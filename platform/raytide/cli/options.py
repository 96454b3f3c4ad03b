"""The options that several commands share: the resources of a job, and its settings for the queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from raytide.core.errors import UsageError
from raytide.core.objects.job import BudgetPer
from raytide.sdk.jobs.script import pairs_of, parse_range, parse_shape
from raytide.sdk.options import GangOptions, JobOptions

Gpus = Annotated[str | None, typer.Option(help="GPUs of each node: 8, H100:8, or 0.5.")]
Cpus = Annotated[float | None, typer.Option(min=0, help="CPUs of each node; 1 without any request.")]
Memory = Annotated[str | None, typer.Option(help="Memory of each node: 64GiB.")]
Nodes = Annotated[str | None, typer.Option(help="The number of nodes; `1:4` runs with any number from 1 to 4.")]
Spot = Annotated[
    bool | None,
    typer.Option("--spot/--on-demand", help="Only spot or only on-demand nodes; the default is the cheaper one."),
]
Labels = Annotated[list[str] | None, typer.Option(help="A label that the nodes must have, KEY=VALUE.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="2xGPU:8,CPU:16@KEY=VALUE in place of these options; repeat it in order of preference."
    ),
]
Pip = Annotated[
    list[str] | None, typer.Option(help="A package that is needed beside raytide's, such as peft==0.17; repeatable.")
]
RequirementsFile = Annotated[
    Path | None, typer.Option("--requirements", help="A file with such packages, one on each line.")
]
Image = Annotated[
    str | None,
    typer.Option(help="A container image in place of raytide's environment: REGISTRY/NAME:TAG or ...@sha256:DIGEST."),
]
Priority = Annotated[str, typer.Option(help="A priority class of metadata.raytide.priorities.")]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="USD[/month]",
        help="Dollars in total or each month. A job that has reached its budget is not admitted; a preemptible one "
        "that runs saves a checkpoint and waits.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        help="When the job must be done: 8h, 1d12h, or 2026-11-22T08:00 (local time without a zone). The job then runs "
        "on spot, waits, or runs on demand, whichever is the cheapest way to meet the deadline."
    ),
]
EstimateH = Annotated[
    float | None,
    typer.Option("--estimate", help="Hours of work on the whole gang; used until the job reports its progress."),
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
    """Returns the resource options that were given, as keyword arguments of the SDK."""
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
                hint="Write everything into the shape: 2xGPU:8,CPU:16@KEY=VALUE.",
            )
        options["shapes"] = [parse_shape(text) for text in shapes]
    return options


def queueing(priority: str, budget: str | None, deadline: str | None, estimate_h: float | None) -> JobOptions:
    """Returns the queue options that were given, as keyword arguments of the SDK."""
    options: JobOptions = {"priority": priority, "deadline": _with_zone(deadline), "estimate_h": estimate_h}
    if budget is not None:
        options["budget_usd"], options["budget_per"] = parse_limit(budget)
    return options


def parse_limit(text: str) -> tuple[float, BudgetPer]:
    """Parses a limit such as `500` or `500/month` into dollars and period. Raises UsageError for other texts."""
    amount, slash, period = text.partition("/")
    wrong, hint = f"{text} is not a budget.", "Write 250 or 250/month."
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
    """Returns a date and time with its zone, by default the local one; any other text unchanged, for the job to
    check."""
    try:
        return deadline and datetime.fromisoformat(deadline).astimezone().isoformat()
    except ValueError:
        return deadline


def packages(pip: Sequence[str] | None, requirements: Path | None) -> list[str]:
    """Returns the packages of --pip and of the requirements file. Comments in the file are left out."""
    if requirements is None:
        return [*(pip or ())]
    try:
        lines = requirements.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--requirements: {requirements} cannot be read: {error}.", hint="Name a text file.") from None
    named = (line.partition(" #")[0].strip() for line in lines)
    return [*(pip or ()), *(line for line in named if line and not line.startswith("#"))]
