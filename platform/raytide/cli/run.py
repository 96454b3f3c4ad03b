"""run: a script on a gang."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.jobs import Budget, Deadline, EstimateH, Priority, Wait, budgeted, due
from raytide.cli.show import ClusterName, Json, as_json
from raytide.control.client import ApiClient
from raytide.core.objects.job import JobState
from raytide.sdk.client import Client
from raytide.sdk.job_run import Run, explain, patiently
from raytide.sdk.script import between, pairs_of, shape_of

_FOLLOW_S = 0.3


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file or another executable one, or a command.")],
    args: Annotated[list[str] | None, typer.Argument(help="What the script gets.")] = None,
    gpus: Annotated[float, typer.Option(min=0, help="Of each node.")] = 0.0,
    cpus: Annotated[float | None, typer.Option(min=0, help="Of each node; 1 when nothing is asked for.")] = None,
    nodes: Annotated[str, typer.Option(help="How many; `1:4` starts and goes on with fewer.")] = "1",
    select: Annotated[list[str] | None, typer.Option(help="A label that nodes must have, KEY=VALUE.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="2xGPU:8,CPU:16@KEY=VALUE in place of these; several, in order of preference."),
    ] = None,
    nproc_per_node: Annotated[str, typer.Option(help="Processes on each node; `gpu` is one for each GPU.")] = "1",
    working_dir: Annotated[Path, typer.Option(help="Uploaded, and where the script runs.")] = Path(),
    exclude: Annotated[list[str] | None, typer.Option(help="What of it stays here; a pattern.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the script.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Starts after a process ended with an error.")] = 0,
    name: Annotated[str, typer.Option(help="The job's; the script's when left out.")] = "",
    team: Annotated[str | None, typer.Option(help="Whose job it is; the token's own when left out.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Of the job, to find its cost by; KEY=VALUE.")] = None,
    priority: Priority = "normal",
    preemptible: Annotated[bool, typer.Option("--preemptible", help="It may be asked to give way.")] = False,
    budget: Budget = None,
    deadline: Deadline = None,
    estimate: EstimateH = None,
    wait: Wait = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Run a script on every node of a gang.

    Options stand before the script; what follows it is the script's.
    """
    if own := {name for option in context.command.params for name in option.opts}.intersection(args or ()):
        note = f"{', '.join(sorted(own))} after the script is given to it; raytide's own options stand before {script}."
        print(f"raytide: {note}", file=sys.stderr)
    job = Client(ApiClient.find(cluster)).run(
        script,
        *(args or ()),
        shapes=[shape_of(text) for text in shapes or ()],
        gpus=gpus,
        cpus=cpus,
        nodes=between(nodes, "--nodes"),
        selector=pairs_of(select or (), "--select"),
        working_dir=working_dir,
        exclude=exclude or (),
        env=pairs_of(env or (), "--env"),
        nproc_per_node=int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node,
        retries=retries,
        name=name,
        team=team,
        labels=pairs_of(label or (), "--label"),
        priority=priority,
        preemptible=preemptible,
        **budgeted(budget),
        deadline=due(deadline),
        estimate_h=estimate,
    )
    try:
        if wait:
            _follow(job, quiet=json)
    except KeyboardInterrupt:
        hint = f"`raytide logs -f {job.id}` follows it, `raytide stop {job.id}` ends it"
        print(f"{job.id} goes on: {hint}", file=sys.stderr)
        raise
    if json:
        as_json(job.json())
    elif not wait:
        print(f"{job.id} is queued; `raytide logs -f {job.id}` follows it")
    elif job.state is not JobState.SUCCEEDED:
        print(explain(job.view), file=sys.stderr)
    if job.view.job.is_final and job.state is not JobState.SUCCEEDED:
        raise typer.Exit(1)


def _follow(job: Run, *, quiet: bool) -> None:
    """What the script prints goes to stdout, what it waits for to stderr."""
    waits, after = "", ""
    while True:
        view = patiently(job.id, job.refresh).view
        if quiet and view.job.is_final:
            return
        if not quiet:
            latest = explain(view) if view.waiting is not None and not view.job.is_final else ""
            if latest and latest != waits:
                print(latest, file=sys.stderr, flush=True)
            waits = latest or waits
            for part in job.printed(after):
                after = part.after
                print(part.text, end="", flush=True)
            if view.job.is_final:
                return
        time.sleep(_FOLLOW_S)
