"""The commands `ps`, `why`, `stop` and `retry`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from raytide.cli.show import ClusterName, Json, as_json, as_list, as_result
from raytide.control.client import ApiClient
from raytide.control.views import JobView
from raytide.core.clock import ago
from raytide.core.errors import ClusterError, RaytideError
from raytide.core.money import format_usd
from raytide.core.objects.job import Job, JobState
from raytide.sdk.jobs.job_run import AWAY_S, explain

JobId = Annotated[str, typer.Argument(help="A job, as `raytide ps` lists it.")]
_FOLLOW_S = 0.5
_MOST = 1000
"""The most jobs that the API returns in one response."""
_HEAD = (
    *("JOB", "NAME", "KIND", "TEAM", "STATE", "POS", "AGE", "DUE"),
    *("STEP", "LEFT", "SCALING", "COST", "PRICE", "WHY"),
)


def ps(
    cluster: ClusterName = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="The number of jobs, newest first.")] = 50,
    active: Annotated[bool, typer.Option("--active", "-a", help="Only jobs that have not ended.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print the table again whenever it changes.")] = False,
    json: Json = False,
) -> None:
    """List jobs, and show for each job what it waits for and what it costs."""
    look = partial(ApiClient.find(cluster).jobs, limit=limit, active=active)
    views = look()
    _show(views, json)
    if len(views) == limit and not json:
        more = ["`--limit` shows more"] * (limit < _MOST) + ["`--active` only those that have not ended"] * (not active)
        print(f"the newest {limit}{'; ' * bool(more)}{', '.join(more)}", file=sys.stderr)
    if watch:
        _watch(look, views, json)


def _watch(look: Callable[[], list[JobView]], views: list[JobView], json: bool) -> None:
    """Prints the table again and again: on a terminal in place, cut to its height; in a pipe, when a job's state,
    place in the queue, stage or unmet constraint changes."""
    is_drawn = sys.stdout.isatty() and not json
    away_since_s: float | None = None
    while True:
        time.sleep(_FOLLOW_S)
        try:
            before, views = views, look()
        except ClusterError as error:  # a restart of the API does not end the watch
            if away_since_s is None:
                away_since_s = time.monotonic()
                print(f"raytide: {error}", file=sys.stderr)
            elif time.monotonic() - away_since_s >= AWAY_S:
                raise
            continue
        away_since_s = None
        if is_drawn:
            print("\033[H\033[J", end="")
            _show(views, json, height=shutil.get_terminal_size().lines - 1)
        elif list(map(_standing, views)) != list(map(_standing, before)):
            _show(views, json)


def _standing(view: JobView) -> tuple[object, ...]:
    """Returns the fields whose changes are worth printing. Cost and steps are left out, because they always change."""
    waits = "" if view.waiting is None else view.waiting.constraint
    return view.job.id, view.job.state, view.position, view.job.progress.get("stage"), waits


def _show(views: list[JobView], json: bool, *, height: int = 0) -> None:
    as_list(views, _HEAD, partial(_row, now=time.time()), json, height=height)


def why(
    job_id: Annotated[str, typer.Argument(help="A job, or `unmanaged` for all work in Ray without a lease.")],
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Show what a job waits for, or why it ended."""
    client = ApiClient.find(cluster)
    if json:
        as_json(client.why(job_id))
    elif job_id == "unmanaged":
        found = client.why(job_id)
        print(f"{found.reason} {found.remedy}".strip())
    else:
        print(explain(client.job(job_id)))


def stop(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB", help="Jobs, as `raytide ps` lists them.")],
    cluster: ClusterName = None,
    json: Json = False,
) -> None:
    """Stop jobs; their leases are freed."""
    client = ApiClient.find(cluster)
    views: list[JobView] = []
    wrong: list[RaytideError] = []
    for job_id in job_ids:
        try:
            views.append(client.stop(job_id))
        except RaytideError as error:  # the others are still stopped
            wrong.append(error)
            continue
        if not json:
            print(f"{job_id} is {views[-1].job.state if views[-1].job.is_final else 'being stopped'}")
    if json and views:
        as_json(views[0] if len(job_ids) == 1 else views)
    for other in wrong[:-1]:
        print(f"raytide: {other}", file=sys.stderr)
    if wrong:
        raise wrong[-1]


def retry(job_id: JobId, cluster: ClusterName = None, json: Json = False) -> None:
    """Submit a finished job again.

    Training continues from its last checkpoint.
    """
    view = ApiClient.find(cluster).retry(job_id)
    as_result(view, f"{view.job.id} is {view.job.state}: {job_id} again", json)


def _row(view: JobView, now: float) -> tuple[object, ...]:
    job = view.job
    until = job.ended_at_s if job.ended_at_s is not None else now
    step = job.progress.get("step", job.progress.get("stage", "-"))
    reason = view.waiting.reason if view.waiting is not None and not job.is_final else job.reason
    if view.stance is not None and view.waiting is None:
        reason = view.stance.reason
    return (
        job.id,
        job.spec.name,
        job.spec.kind,
        job.spec.team,
        job.state,
        view.position or "-",
        ago(until - job.submitted_at_s),
        _due(job, now),
        step,
        _left(job, now),
        f"{scaling:.0%}" if isinstance(scaling := job.progress.get("scaling"), float) else "-",
        format_usd(view.cost_micro_usd),
        format_usd(view.price_micro_usd_h) + "/h",
        reason.partition("\n")[0],
    )


def _left(job: Job, now: float) -> str:
    """Returns the time that a running job still needs at its present speed; "-" if it is unknown."""
    left_s, at_s = job.progress.get("left_s"), job.progress.get("step_at_s")
    if job.state is not JobState.RUNNING or not isinstance(left_s, float) or not isinstance(at_s, float):
        return "-"
    return ago(max(0.0, left_s - (now - at_s)))


def _due(job: Job, now: float) -> str:
    """Returns the time left until the deadline, how late the job is, or "kept" if it met the deadline.

    Returns "-" without a deadline, and for a job that ended before its deadline without success.
    """
    if (due_at_s := job.spec.due_at_s) is None:
        return "-"
    end_s = job.ended_at_s if job.ended_at_s is not None else now
    if end_s > due_at_s:
        return f"{ago(end_s - due_at_s)} late"
    if job.is_final:
        return "kept" if job.state is JobState.SUCCEEDED else "-"
    return f"in {ago(due_at_s - now)}"
