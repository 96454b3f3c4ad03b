"""The table of commands. The module of a command is imported only when the command is run, so that `raytide ps` does
not wait for the imports of other commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "quota": ("tenancy.money:quota", "Show or change the quotas of teams."),
    "budget": ("tenancy.money:budget", "Show or change the budgets of teams and jobs."),
    "demo": ("cluster:demo", "Run the whole life of a model on this machine."),
    "up": ("cluster:up", "Start a cluster: a Ray head, raytide's controller and its API."),
    "down": ("cluster:down", "End a cluster and check that no process of it is left."),
    "head": ("cluster:head", "Start controller and API beside the Ray head of this machine."),
    "status": ("cluster:status", "Show the nodes, jobs and cost of the cluster."),
    "page": ("operations.page:page", "Show the address of the web page, and open it."),
    "token": ("operations.page:token", "Print the API token, which the web page asks for."),
    "cost": ("tenancy.money:cost", "Show the cost by job, endpoint and team, or by the group that --by names."),
    "run": ("jobs.submit:run", "Run a script on every node of a gang."),
    "ps": ("jobs.queue:ps", "List jobs, and show for each job what it waits for and what it costs."),
    "why": ("jobs.queue:why", "Show what a job waits for, or why it ended."),
    "logs": ("jobs.logs:logs", "Print the output of a job's driver, or of an endpoint's replicas."),
    "stop": ("jobs.queue:stop", "Stop jobs; their leases are freed."),
    "retry": ("jobs.queue:retry", "Submit a finished job again."),
    "train": ("jobs.submit:train", "Train a model on a gang."),
    "plan": ("operations.plan:plan", "Show what a training or an endpoint needs, and what a budget buys."),
    "metrics": ("jobs.runs:metrics", "Print the latest steps of a training run."),
    "plot": ("jobs.runs:plot", "Plot a training run's metrics over its steps, and mark the interruptions of the run."),
    "profile": ("jobs.runs:profile", "Profile the next steps of a running job without restarting it."),
    "serve": ("serving.serve:serve", "Serve a model, or list what is served."),
    "endpoint": ("serving.endpoints:endpoint", "Show endpoints, change their adapters, and end rollouts."),
    "model": ("serving.models:model", "Manage registered models."),
    "compress": ("serving.compress:compression", "Follow a recipe to make a model smaller: prune, distil, quantise."),
    "eval": (
        "serving.evaluate:evaluation",
        "Evaluate a model and its parent with a suite, and show the results side by side.",
    ),
    "bench": ("serving.bench:bench", "Load an endpoint or measure a node type."),
    "flow": ("jobs.flow:flow", "Run workflows: stages from data to an endpoint."),
    "batch": ("serving.batch:batch", "Answer the requests of a file, in a job of the queue."),
    "key": ("tenancy.keys:key", "Manage the API keys of the gateway."),
    "usage": (
        "tenancy.keys:usage",
        "Show the tokens and cost of the gateway's requests, summed by key or by another group.",
    ),
    "audit": ("tenancy.audit:audit", "Show or check the audit log."),
    "schema": ("cluster:schema", "Print the JSON schema of a spec, or of cluster.yaml's settings."),
    "doctor": (
        "cluster:doctor",
        "Check this machine, or one of your own machines over ssh, for problems, and show how to fix them.",
    ),
    "data": ("jobs.submit:data", "Build datasets, and look at what the builds dropped."),
    "alerts": ("operations.alerts:alerts", "Show alerts and what they did, test and silence them."),
    "nodes": ("operations.alerts:nodes", "Show nodes, replace them, and keep bad ones out of use."),
    "autoscaler": ("operations.autoscaler:scaler", "Show the autoscaler's decisions."),
    "simulate": ("simulate:simulation", "Replay recorded traces, or look ahead (--from-live)."),
    "backup": ("operations.backup:backups", "Back a cluster up, restore it, and prove that it can be restored."),
    "resume": (
        "operations.backup:resume",
        "Let a restored controller act again.",
    ),
    "checkpoint": ("jobs.runs:checkpoints", "Check checkpoints."),
}
"""Module and name of each command or group of commands, and its line in `--help`. A test compares that line with the
command's docstring."""

_OWN_ARGUMENTS = {"run": {"allow_interspersed_args": False}}
"""Commands whose arguments after the first are passed on to a script."""
_HIDDEN = {"watch-notices": "cluster:watch_notices", "export-metrics": "cluster:export_metrics"}


class LazyGroup(TyperGroup):
    """A command group that imports a command's module only when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        home = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else _HIDDEN.get(cmd_name)
        if home is None:
            return None
        module, _, name = home.partition(":")
        found = getattr(import_module(f"raytide.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(cmd_name, context_settings=_OWN_ARGUMENTS.get(cmd_name))(found)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table of commands for `--help`, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(
    cls=LazyGroup,
    name="raytide",
    help="One pool of mixed, partly spot, accelerators where teams prepare data, train and serve language models.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from raytide import __version__

        print(f"raytide {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handles the options that precede the command."""
