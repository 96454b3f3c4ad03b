"""Metrics of backups: their age, their failures, and what the last drill measured."""

from __future__ import annotations

from collections.abc import Iterator

from raytide.control.backup.results import BackupResults
from raytide.core.objects.cluster_config import BackupSection
from raytide.core.telemetry.catalogue import control
from raytide.core.telemetry.metrics import MetricSample


def backup_samples(settings: BackupSection, results: BackupResults, now_s: float) -> Iterator[MetricSample]:
    """Yields nothing for a task that was never done and did not fail: a new cluster is not late."""
    tasks = [("backup", results.backup, settings.every_s), ("drill", results.drill, settings.drill_every_s)]
    if settings.cold_repository:
        tasks.append(("cold", results.cold, settings.cold_every_s))
    for task, run, period_s in tasks:
        yield MetricSample(control.BACKUP_FAILING, bool(run.error), (task,))
        if run.at_s:
            yield MetricSample(control.BACKUP_OVERDUE, max(0.0, now_s - run.at_s) / period_s, (task,))
    if results.backup.at_s:
        yield MetricSample(control.BACKUP_AGE, max(0.0, now_s - results.backup.at_s))
        yield MetricSample(control.BACKUP_ADDED, results.backup.added_bytes)
    if (found := results.found) is not None:
        yield MetricSample(control.BACKUP_RESTORE, found.restore_s)
        yield MetricSample(control.BACKUP_LOST, found.lost_s)
        yield MetricSample(control.BACKUP_PROBLEMS, len(found.problems))
