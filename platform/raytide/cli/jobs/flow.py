"""The commands `flow run`, `show`, `resume` and `list`, for workflows of stages."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raytide.cli.jobs.submit import finish
from raytide.cli.show import ClusterName, Json, as_json, as_list, as_table
from raytide.control.client import ApiClient
from raytide.control.views import to_json
from raytide.core.errors import NotFoundError, UsageError
from raytide.core.objects.job import JobState
from raytide.sdk.jobs.flow_run import FlowRun, is_flow, submit_flow
from raytide.sdk.jobs.script import pairs_of
from raytide.workflows.sweep.spec import Value
from raytide.workflows.view import COLUMNS

flow = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Run workflows: stages from data to an endpoint.")
Which = Annotated[str, typer.Argument(metavar="JOB_OR_NAME", help="The flow's job, or its name for the newest run.")]
_DECIMAL = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MOST = 1000
_JOB = re.compile("job-[0-9]+")
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the flow ends.")]


@flow.command()
def run(
    file: Annotated[Path, typer.Argument(help="A YAML file of stages.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: a parameter of the flow.")] = None,
    working_dir: Annotated[
        Path | None, typer.Option(help="The folder to upload for script stages; the file's own by default.")
    ] = None,
    wait: Wait = True,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Submit a workflow and follow it.

    The workflow runs on the cluster: an interrupt ends only this command.
    """
    params = {name: value_of(text) for name, text in pairs_of(set_ or (), "--set").items()}
    _follow(submit_flow(ApiClient.find(cluster), file, params, working_dir), wait=wait, json=json)


@flow.command()
def resume(which: Which, wait: Wait = True, cluster: ClusterName = None, json: Json = False) -> None:
    """Run the failed and skipped stages of a workflow again. Finished stages are kept."""
    _follow(_flow(ApiClient.find(cluster), which).resume(), wait=wait, json=json)


@flow.command()
def show(
    which: Which,
    graph: Annotated[Path | None, typer.Option(help="Write the graph to this .svg file.")] = None,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show the stages of a workflow: their state, results, jobs, and why some were skipped."""
    found = _flow(ApiClient.find(cluster), which)
    if graph is not None:
        if graph.suffix != ".svg":
            raise UsageError(f"{graph} is no .svg file.", hint="Name a file that ends in .svg.")
        graph.write_text(str(found.graph()))
    as_list(found.stages(), [name.upper() for name in COLUMNS], lambda view: view.row(), json)


@flow.command("list")
def flows(
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="The number of jobs to look through.")] = 200,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """List workflows, newest first."""
    client = ApiClient.find(cluster)
    found = [FlowRun(client, view) for view in client.jobs(limit=limit) if is_flow(view)]
    if json:
        as_json([to_json(each.view) for each in found])
        return
    rows = [(each.id, each.view.job.spec.name, each.state, each.progress.get("stage", ""), each.run) for each in found]
    as_table(("JOB", "FLOW", "STATE", "STAGES", "RUN"), rows)


def value_of(text: str) -> Value:
    """Parses a text as YAML and returns the result if it is a decimal number, a boolean or a quoted string. Otherwise
    returns the text itself, such as a commit or a time that YAML would read as a number, or a text with ` #` in it.
    """
    import yaml

    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        return text
    if isinstance(value, bool) or (isinstance(value, str) and text.lstrip().startswith(("'", '"'))):
        return value
    return value if isinstance(value, int | float) and _DECIMAL.fullmatch(text.strip()) else text


def _flow(client: ApiClient, which: str) -> FlowRun:
    """Returns the workflow with this job id, else the newest workflow of this name."""
    hint = "`raytide flow list` lists workflows."
    if _JOB.fullmatch(which):
        view = client.job(which)
        if not is_flow(view):
            raise UsageError(f"{which} is no workflow.", hint=hint)
        return FlowRun(client, view)
    for view in client.jobs(limit=_MOST):
        if view.job.spec.name == which and is_flow(view):
            return FlowRun(client, view)
    raise NotFoundError(f"none of the newest {_MOST:,} jobs is a workflow {which}.", hint=hint)


def _follow(found: FlowRun, *, wait: bool, json: bool) -> None:
    """Prints each stage when its state changes, until the flow ends; exits with 1 if it failed."""
    follow, how = partial(_print_changes, found, quiet=json), f"`raytide flow show {found.id}` shows its stages"
    finish(found, follow, how, wait=wait, json=json)


def _print_changes(found: FlowRun, *, quiet: bool) -> None:
    if sys.stderr.isatty() and not quiet:
        found.watch(math.inf)
    else:
        before: dict[str, str] = {}
        for _ in found.updates(math.inf):
            for view in found.stages():
                if view.status != before.get(view.name, "waiting") and not quiet:
                    shown = "cached" if view.is_cached else view.status
                    parts = (f"{view.name} {shown}", view.job, view.result, view.why)
                    print(": ".join(filter(None, parts)), flush=True)
                before[view.name] = view.status
    if found.state is not JobState.SUCCEEDED and not quiet:
        print(f"{found.id} {found.state}; `raytide flow resume {found.id}` goes on with it", file=sys.stderr)
