"""The commands, put together. A module is imported when one of its commands is run: `raytide ps` does not wait for what
other commands need."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "quota": ("money:quota", "What teams may hold."),
    "budget": ("money:budget", "What teams and jobs may spend."),
    "demo": ("cluster:demo", "The whole life of a model, on this machine."),
    "up": ("cluster:up", "Start a cluster: a Ray head, raytide's controller and its API."),
    "down": ("cluster:down", "End a cluster and check that no process of it is left."),
    "head": ("cluster:head", "Start controller and API beside the Ray head of this machine."),
    "status": ("cluster:status", "Nodes, jobs and dollars of the cluster."),
    "cost": ("money:cost", "Dollars by job, endpoint and team, or grouped."),
    "run": ("run:run", "Run a script on every node of a gang."),
    "ps": ("jobs:ps", "Jobs, with what each waits for and what it costs."),
    "why": ("jobs:why", "Say what a job waits for, or why it ended."),
    "logs": ("jobs:logs", "Print what a job's driver wrote."),
    "stop": ("jobs:stop", "Stop jobs; their leases are freed."),
    "retry": ("jobs:retry", "Submit a job that is over again."),
    "train": ("run:train", "Train a model on a gang."),
    "metrics": ("runs:metrics", "Print the latest steps of a training run."),
    "plot": ("runs:plot", "Draw a training run: its numbers over its steps, and its breaks."),
    "profile": ("runs:profile", "Profile the next steps of a running job, which goes on as it is."),
    "serve": ("serve:serve", "Serve a model, or list what is served."),
    "schema": ("cluster:schema", "Print the JSON schema of a spec, or of cluster.yaml's settings."),
    "doctor": ("cluster:doctor", "Check what this machine lacks, and say how to mend it."),
    "data": ("run:data", "Build datasets."),
    "autoscaler": ("autoscaler:scaler", "Look into the autoscaler."),
    "simulate": ("simulate:simulation", "Replay recorded traces, or look ahead (--from-live)."),
    "checkpoint": ("runs:checkpoints", "Look into checkpoints."),
}
"""Module and name of each command or group of commands, and the line that `--help` shows of it, which a test compares
with the command's own."""

_OWN_ARGUMENTS = {"run": {"allow_interspersed_args": False}}
"""Commands whose arguments after the first belong to somebody else."""
_HIDDEN = {"watch-notices": "cluster:watch_notices"}


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is asked for."""

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
        """Writes the table, without importing a command."""
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
    """The options before the command."""
