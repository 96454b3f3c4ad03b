"""The commands `metrics`, `plot`, `profile` and `checkpoint verify`, for training runs. A run is named by its job or
its directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_result, as_table
from raytide.control.client import ApiClient
from raytide.core.errors import CheckpointError, UsageError
from raytide.core.objects.job import JobKind
from raytide.sdk.client import Client
from raytide.sdk.jobs.train_run import TrainRun

if TYPE_CHECKING:
    from raytide.actors.trainer.run_log.history import RunHistory

Which = Annotated[str, typer.Argument(metavar="RUN_OR_JOB", help="A training job, or a run's `out` directory.")]
Target = Annotated[str, typer.Argument(help="The path or fsspec URL of a run, of its checkpoints, or of one of them.")]
checkpoints = typer.Typer(rich_markup_mode=None, help="Check checkpoints.", no_args_is_help=True)
_NO_RUN = "Name a training job, or a run's directory."
COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "data_s", "world")


def metrics(
    which: Which,
    last: Annotated[int, typer.Option(min=1, help="The number of latest steps.")] = 20,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Print the latest steps of a training run."""
    steps = _history(which, cluster).steps[-last:]
    if json:
        as_json(steps)
    else:
        as_table([name.upper() for name in COLUMNS], [[_short(line.get(name)) for name in COLUMNS] for line in steps])


def plot(
    which: Which,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .svg, .png or .html file.")] = Path("run.svg"),
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Plot a training run's metrics over its steps, and mark the interruptions of the run."""
    from raytide.dashboards.figures.style import check_format
    from raytide.dashboards.figures.training import picture

    check_format(output)
    run = _history(which, cluster)
    picture(run, which).save(output)
    as_result({"file": str(output), "steps": len(run.steps)}, f"{output} shows {len(run.steps)} steps", json)


def profile(
    which: Which,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps.")] = 3,
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Profile the next steps of a running job without restarting it."""
    from raytide.actors.trainer.run_log import profiler

    out = _out(which, cluster)
    profiler.request(out, steps)
    text = f"the next {steps} steps are profiled; traces and tables appear in {out}/profile"
    as_result({"out": f"{out}/profile", "steps": steps}, text, json)


@checkpoints.callback()
def checkpoint() -> None:
    """Check checkpoints."""


@checkpoints.command()
def verify(target: Target, json: Json = False) -> None:
    """Read all bytes of the checkpoints and compare them with the checkpoints' manifests.

    The exit code is 1 if any checkpoint is damaged, or if no checkpoint is complete.
    """
    from raytide.actors.trainer.checkpoint.verify import verify as read_all

    verdicts = read_all(target)
    if json:
        as_json(verdicts)
    else:
        rows = [(v.step, v.state, v.size, v.world or "-", v.url, "; ".join(v.problems) or "-") for v in verdicts]
        as_table(("STEP", "STATE", "BYTES", "RANKS", "WHERE", "WHY"), rows)
    bad = [verdict for verdict in verdicts if verdict.state == "bad"]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(verdicts)} checkpoints at {target} are bad.",
            hint="Delete them. A run ignores them.",
        )
    if not any(verdict.state == "whole" for verdict in verdicts):
        raise CheckpointError(f"no checkpoint at {target} is whole.", hint="The run has not finished its first save.")


def _history(which: str, cluster: str | None) -> RunHistory:
    """Returns the steps and events of a run, named by its directory or its job. Those of a job come from the API if its
    files are not on this machine."""
    from raytide.actors.trainer.run_log import history

    if "://" in which or Path(which).is_dir():
        return history.read(which)
    run = Client(ApiClient.find(cluster)).job(which)
    if not isinstance(run, TrainRun):
        raise UsageError(f"{which} is a {run.view.job.spec.kind} job.", hint=_NO_RUN)
    return run.history()


def _out(which: str, cluster: str | None) -> str:
    """Returns the run's directory or URL, looked up if a job is given."""
    if "://" in which or Path(which).is_dir():
        return which
    job = ApiClient.find(cluster).job(which).job
    if job.spec.kind is not JobKind.TRAIN:
        raise UsageError(f"{which} is a {job.spec.kind} job.", hint=_NO_RUN)
    return str(job.spec.config["out"])


def _short(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
