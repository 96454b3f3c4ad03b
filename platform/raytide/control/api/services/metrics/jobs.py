"""Metrics of jobs, from what their drivers report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from raytide.core.state.queries.jobs import HeldJob, WaitingJob
from raytide.core.telemetry.catalogue import queue, training
from raytide.core.telemetry.metrics import Metric, MetricSample

MOST_REPORTS = 20
"""The values of one job's own that are shown, the first by name."""
_REPORTED: Mapping[str, Metric] = {
    "step": training.JOB_STEP,
    "loss": training.JOB_LOSS,
    "tokens_per_s": training.JOB_TOKENS_PER_SECOND,
    "mfu": training.JOB_MFU,
    "step_s": training.JOB_STEP_SECONDS,
    "data_wait": training.JOB_DATA_WAIT,
    "scaling": training.JOB_SCALING,
}
_AGES: Mapping[str, Metric] = {"step_at_s": training.JOB_LAST_STEP_AGE, "saved_at_s": training.JOB_CHECKPOINT_AGE}
"""Metrics whose value is the time since a reported moment."""
_ANOTHER_WAY = frozenset(
    {
        "steps", "restarts", "resizes", "steps_lost", "recovery_s", "world", "settled", "left_s", "redo_s", "lost_s",
        "lost_at_s",
    }
)  # fmt: skip
"""Reports of raytide's own drivers for its decisions, which are no values of the user's."""


def job_samples(held: Iterable[HeldJob], waiting: Iterable[WaitingJob], now_s: float) -> Iterator[MetricSample]:
    """Yields the last values of the jobs that hold a gang, and the times of those that wait longest for one."""
    for job in held:
        labels = (job.id, job.team)
        yield MetricSample(training.JOB_RESTARTS, job.restarts + (_number(job.progress, "restarts") or 0), labels)
        for name, metric in _REPORTED.items():
            if (value := _number(job.progress, name)) is not None:
                yield MetricSample(metric, value, labels)
        for name, metric in _AGES.items():
            if (at_s := _number(job.progress, name)) is not None:
                yield MetricSample(metric, max(0.0, now_s - at_s), labels)
        own = sorted(job.progress.keys() - _REPORTED.keys() - _AGES.keys() - _ANOTHER_WAY)
        numbers = ((name, value) for name in own if (value := _number(job.progress, name)) is not None)
        for name, value in islice(numbers, MOST_REPORTS):
            yield MetricSample(training.JOB_REPORT, value, (*labels, name))
    for each in waiting:
        yield MetricSample(queue.GANG_PENDING, max(0.0, now_s - each.since_s), (each.id, each.team))


def _number(progress: Mapping[str, object], name: str) -> float | None:
    value = progress.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
