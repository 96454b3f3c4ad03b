"""Keeps a cluster's repositories: decides which tasks are due, applies the retention, and copies the newest snapshot to
the cold repository."""

from __future__ import annotations

import time
from typing import Literal

from raytide.control.backup.place import BackupPlace
from raytide.control.backup.repository import Repository
from raytide.control.backup.results import BackupResults, LastRun, failures_recorded, record_run
from raytide.control.backup.run import working
from raytide.core.errors import ConfigError
from raytide.core.objects.cluster_config import BackupSection

BackupTask = Literal["backup", "cold", "forget", "drill"]

_RETRY_S = 300.0
"""The longest time after a failure before the next try."""
_FORGET_S = 86_400.0


def due_tasks(settings: BackupSection, results: BackupResults, now_s: float) -> tuple[tuple[BackupTask, ...], float]:
    """Returns the tasks that are due, in the order in which they should run. Also returns the seconds until the next
    task is due.

    A failed task is tried again within five minutes. The first drill and the first clean-up are due one period after
    the first backup.
    """
    each: list[tuple[BackupTask, LastRun, float]] = [("backup", results.backup, settings.every_s)]
    if settings.cold_repository:
        each.append(("cold", results.cold, settings.cold_every_s))
    first_s = results.first_at_s or now_s
    each.append(("forget", _counted_from(results.forget, first_s), _FORGET_S))
    each.append(("drill", _counted_from(results.drill, first_s), settings.drill_every_s))
    waits = {task: _wait_s(run, period_s, now_s) for task, run, period_s in each}
    due = tuple(task for task, wait_s in waits.items() if wait_s <= 0)
    return due, max(0.0, min(waits.values()))


def _counted_from(run: LastRun, first_s: float) -> LastRun:
    return run if run.at_s else run.model_copy(update={"at_s": first_s})


def _wait_s(run: LastRun, period_s: float, now_s: float) -> float:
    at_s, pause_s = (run.failed_at_s, min(period_s, _RETRY_S)) if run.error else (run.at_s, period_s)
    if not at_s or at_s > now_s:  # it never ran, or the clock was set back since
        return 0.0
    return at_s + pause_s - now_s


def create_hot(place: BackupPlace) -> bool:
    """Creates the hot repository for the next backup. Returns False if the repository exists already. A failure is
    recorded as a failed backup.
    """
    with working(place.cluster), failures_recorded(place, "backup"):
        return place.hot.init()


def create_repositories(place: BackupPlace) -> list[Repository]:
    """Creates the configured repositories that do not exist yet, and returns the new ones."""
    created = [place.hot] if place.hot.init() else []
    if place.cold is not None and place.cold.init(like=place.hot):
        created.append(place.cold)
    return created


def forget(place: BackupPlace) -> tuple[int, int]:
    """Removes the snapshots that the retention rules do not keep. Returns the numbers of snapshots kept and removed."""
    with working(place.cluster), failures_recorded(place, "forget"):
        began_s = time.monotonic()
        found = place.hot.forget(place.cluster, place.settings.keep.model_dump())
        record_run(place, "forget", time.monotonic() - began_s)
        return found


def copy_to_cold(place: BackupPlace) -> str:
    """Copies the newest snapshot to the cold repository, and returns the snapshot's id. Creates the cold repository if
    it does not exist yet. Data that is already in the cold repository is not sent again.
    """
    if place.cold is None:
        raise ConfigError("there is no cold repository.", hint="Set metadata.raytide.backup.cold_repository.")
    with working(place.cluster), failures_recorded(place, "cold"):
        began_s = time.monotonic()
        known = place.hot.snapshots(place.cluster)
        if not known:
            raise ConfigError("there is no snapshot to copy.", hint="`raytide backup run` makes one.")
        place.cold.init(like=place.hot)
        place.cold.copy_from(place.hot, [known[-1].id])
        record_run(place, "cold", time.monotonic() - began_s, known[-1].id)
        return known[-1].id
