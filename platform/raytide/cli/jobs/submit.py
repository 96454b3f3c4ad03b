"""The commands that submit a job: `run`, `train` and `data build`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.jobs.datasets import diff, inspect, list_datasets, register, show
from raytide.cli.options import (
    Budget,
    Cpus,
    Deadline,
    EstimateH,
    Gpus,
    Image,
    Labels,
    Memory,
    Nodes,
    Pip,
    Priority,
    RequirementsFile,
    Shapes,
    Spot,
    packages,
    queueing,
    resources,
)
from raytide.cli.show import ClusterName, Json, as_json
from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.objects.job import JobState
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run, explain, patiently, short
from raytide.sdk.jobs.script import pairs_of
from raytide.sdk.options import GangOptions

Spec = Annotated[Path, typer.Argument(help="A YAML file.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the job ends.")]
data = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
_FOLLOW_S = 0.3


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file, another executable file, or a command.")],
    args: Annotated[list[str] | None, typer.Argument(help="The arguments of the script.")] = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    nodes: Nodes = None,
    spot: Spot = None,
    labels: Labels = None,
    shapes: Shapes = None,
    nproc_per_node: Annotated[str, typer.Option(help="Processes on each node; `gpu` starts one for each GPU.")] = "1",
    working_dir: Annotated[Path, typer.Option(help="The folder to upload; the script runs in it.")] = Path(),
    exclude: Annotated[list[str] | None, typer.Option(help="A pattern of files that are not uploaded.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: an environment variable of the script.")] = None,
    pip: Pip = None,
    requirements: RequirementsFile = None,
    image: Image = None,
    retries: Annotated[int, typer.Option(min=0, help="Restarts after a process failed.")] = 0,
    name: Annotated[str, typer.Option(help="The job's name; the script's by default.")] = "",
    team: Annotated[str | None, typer.Option(help="The job's team; the token's own by default.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE: a tag of the job, by which costs can be grouped.")
    ] = None,
    priority: Priority = "normal",
    preemptible: Annotated[bool, typer.Option("--preemptible", help="Allow the queue to preempt the job.")] = False,
    budget: Budget = None,
    deadline: Deadline = None,
    estimate: EstimateH = None,
    wait: Wait = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Run a script on every node of a gang.

    Put options before the script. All arguments after the script are passed to the script.
    """
    if own := {name for option in context.command.params for name in option.opts}.intersection(args or ()):
        note = (
            f"{', '.join(sorted(own))} after the script is passed to it; raytide's own options stand before {script}."
        )
        print(f"raytide: {note}", file=sys.stderr)
    options: GangOptions = {
        **resources(gpus, cpus, memory, nodes, spot, labels, shapes),
        **queueing(priority, budget, deadline, estimate),
        "name": name or Path(script).stem,
        "team": team,
        "tags": pairs_of(tag or (), "--tag"),
        "preemptible": preemptible,
    }
    job = Client(ApiClient.find(cluster)).run(
        script,
        *(args or ()),
        working_dir=working_dir,
        exclude=exclude or (),
        env=pairs_of(env or (), "--env"),
        pip=packages(pip, requirements),
        image=image,
        nproc_per_node=int(nproc_per_node) if nproc_per_node.isdecimal() else nproc_per_node,
        retries=retries,
        **options,
    )
    end_with(job, wait=wait, json=json)


def end_with(job: Run, *, wait: bool, json: bool) -> None:
    """Finishes a command that has submitted a script. With `wait`, follows the job and exits with 1 if the job
    failed.
    """
    finish(job, partial(_follow_script, job, quiet=json), wait=wait, json=json)


def finish(job: Run, follow: Callable[[], None], how: str = "", *, wait: bool, json: bool) -> None:
    """Finishes a command that has submitted a job. With `wait`, calls `follow` and exits with 1 if the job failed.

    `how` is the text that tells the user how to follow the job later. By default it names `raytide logs -f`.
    """
    how = how or f"`raytide logs -f {job.id}` follows it"
    try:
        if wait:
            follow()
    except KeyboardInterrupt:
        print(f"{job.id} keeps running: {how}, `raytide stop {job.id}` ends it", file=sys.stderr)
        raise
    if json:
        as_json(job.json())
    elif not wait:
        print(f"{job.id} is queued; {how}")
    if job.view.job.is_final and job.state is not JobState.SUCCEEDED:
        raise typer.Exit(1)


data.command("inspect")(inspect)
data.command("list")(list_datasets)
data.command()(show)
data.command()(diff)
data.command()(register)


@data.callback()
def datasets() -> None:
    """Build datasets, and look at what the builds dropped."""


@data.command()
def build(
    spec: Spec,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    nodes: Nodes = None,
    spot: Spot = None,
    labels: Labels = None,
    shapes: Shapes = None,
    priority: Priority = "normal",
    budget: Budget = None,
    deadline: Deadline = None,
    estimate: EstimateH = None,
    wait: Wait = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Build a token dataset from text.

    Options for nodes replace the `gang` of the file.
    """
    wanted = resources(gpus, cpus, memory, nodes, spot, labels, shapes)
    options: GangOptions = {**wanted, **queueing(priority, budget, deadline, estimate)}
    job = Client(ApiClient.find(cluster)).data(spec, **options)
    finish(job, partial(follow, job, quiet=json), wait=wait, json=json)


def train(
    spec: Spec,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    nodes: Nodes = None,
    spot: Spot = None,
    labels: Labels = None,
    shapes: Shapes = None,
    pip: Pip = None,
    requirements: RequirementsFile = None,
    image: Image = None,
    priority: Priority = "normal",
    budget: Budget = None,
    deadline: Deadline = None,
    estimate: EstimateH = None,
    wait: Wait = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Train a model on a gang.

    Options for nodes replace the `gang` of the file. Options for packages replace its `pip`. An image option replaces
    its `image`.
    """
    wanted = resources(gpus, cpus, memory, nodes, spot, labels, shapes)
    options: GangOptions = {**wanted, **queueing(priority, budget, deadline, estimate)}
    named = packages(pip, requirements)
    job = Client(ApiClient.find(cluster)).train(spec, pip=named, image=image, **options)
    finish(job, partial(follow, job, quiet=json), wait=wait, json=json)


def follow(run: Run, *, quiet: bool) -> None:
    """Prints a job's state until the job ends, and then the location of its result."""
    if sys.stderr.isatty() and not quiet:
        run.watch(math.inf)
    else:
        line = ""
        for view in run.updates(math.inf):
            latest = _progress(view)
            if latest != line and not quiet:
                line = latest
                print(line, flush=True)
    if run.state is JobState.SUCCEEDED and not quiet:
        print(f"{run.view.job.spec.kind} {run.view.job.spec.name}: {run.output()}")


def _progress(view: JobView) -> str:
    if view.job.is_final or view.waiting is not None or not view.job.progress:
        return explain(view)
    numbers = ", ".join(
        f"{key} {short(value)}" for key, value in view.job.progress.items() if value and key not in ("settled", "image")
    )
    return f"{view.job.id} {view.job.state}: {numbers}"


def _follow_script(job: Run, *, quiet: bool) -> None:
    """Prints the script's output to stdout, and the reasons of its waits and of its failure to stderr."""
    waits, after = "", ""
    while True:
        view = patiently(job.id, job.refresh).view
        if not quiet:
            latest = explain(view) if view.waiting is not None and not view.job.is_final else ""
            if latest and latest != waits:
                print(latest, file=sys.stderr, flush=True)
            waits = latest or waits
            for part in job.log_parts(after):
                after = part.after
                print(part.text, end="", flush=True)
        if view.job.is_final:
            break
        time.sleep(_FOLLOW_S)
    if job.state is not JobState.SUCCEEDED and not quiet:
        print(explain(view), file=sys.stderr)
