"""Reports a job's progress from inside the job."""

from __future__ import annotations

from raytide.control.client import ApiClient
from raytide.core.config import environment
from raytide.core.errors import UsageError


def report(**values: float | int | str) -> None:
    """Reports numbers of the job in which this process runs: `rt.report(step=3, loss=2.1)`.

    `raytide ps` shows the numbers. Sweeps of workflows use them to compare trials. For a script stage, the numbers
    are the stage's metrics. Call this function on one rank, about once a second. Raises UsageError outside of a job.
    """
    job = environment("JOB")
    if job is None:
        raise UsageError("this process runs in no job.", hint="`raytide run` and script stages of flows start one.")
    ApiClient.find().report(job, values)
