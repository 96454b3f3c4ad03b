"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from raytide.cli import autoscaler, cluster, jobs, money, run, runs, serve, simulate

app = typer.Typer(
    name="raytide",
    help="One pool of mixed, partly spot, accelerators where teams prepare data, train and serve language models.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = typer.Typer(help="Build datasets.", no_args_is_help=True)
scaler = typer.Typer(callback=autoscaler.options, no_args_is_help=True, invoke_without_command=True)
simulation = typer.Typer(callback=simulate.options, no_args_is_help=True, invoke_without_command=True)
checkpoints = typer.Typer(help="Look into checkpoints.", no_args_is_help=True)


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
    """What stands before the command."""


app.add_typer(data, name="data")
app.add_typer(scaler, name="autoscaler")
app.add_typer(simulation, name="simulate")
app.add_typer(checkpoints, name="checkpoint")
app.add_typer(money.quota, name="quota")
app.add_typer(money.budget, name="budget")

app.command()(cluster.demo)
app.command()(cluster.up)
app.command()(cluster.down)
app.command()(cluster.head)
app.command(hidden=True)(cluster.watch_notices)
app.command()(cluster.status)
app.command()(money.cost)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(jobs.ps)
app.command()(jobs.why)
app.command()(jobs.logs)
app.command()(jobs.stop)
app.command()(jobs.retry)
data.command("build")(jobs.data_build)
app.command()(jobs.train)
app.command()(runs.metrics)
app.command()(runs.plot)
app.command()(runs.profile)
app.command()(serve.serve)
scaler.command("explain")(autoscaler.explain)
simulation.command("serving")(simulate.serving)
simulation.command("deadline")(simulate.deadline)
checkpoints.command("verify")(runs.verify)
simulation.command("jobs")(simulate.jobs)
app.command()(cluster.schema)
app.command()(cluster.doctor)
