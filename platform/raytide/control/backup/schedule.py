"""Decides which of a cluster's backup tasks are due. Pure."""

from __future__ import annotations

from typing import Literal

from raytide.control.backup.results import BackupResults, LastRun
from raytide.core.objects.cluster_config import BackupSection

BackupTask = Literal["backup", "cold", "forget", "drill"]

_RETRY_S = 300.0
"""The longest time after a failure before the next try."""
_FORGET_S = 86_400.0


def due_tasks(
    settings: BackupSection, results: BackupResults, started_s: float, now_s: float
) -> tuple[tuple[BackupTask, ...], float]:
    """Returns the tasks that are due, in their order, and the seconds until the next one is.

    After a failure a task is tried again within five minutes. `started_s`: when this process
    began, from which the first drill and clean-up are counted.
    """
    each: list[tuple[BackupTask, LastRun, float]] = [("backup", results.backup, settings.every_s)]
    if settings.cold_repository:
        each.append(("cold", results.cold, settings.cold_every_s))
    each.append(("forget", _counted_from(results.forget, started_s), _FORGET_S))
    each.append(("drill", _counted_from(results.drill, started_s), settings.drill_every_s))
    waits = {task: _wait_s(run, period_s, now_s) for task, run, period_s in each}
    due = tuple(task for task, wait_s in waits.items() if wait_s <= 0)
    return due, max(0.0, min(waits.values()))


def _counted_from(run: LastRun, started_s: float) -> LastRun:
    return run if run.at_s else run.model_copy(update={"at_s": started_s})


def _wait_s(run: LastRun, period_s: float, now_s: float) -> float:
    if run.error:
        return run.failed_at_s + min(period_s, _RETRY_S) - now_s
    return run.at_s + period_s - now_s if run.at_s else 0.0
