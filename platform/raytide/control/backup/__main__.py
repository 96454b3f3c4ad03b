"""Runs a cluster's backups, drills and clean-ups when they are due: `python -m raytide.control.backup RUN_DIR`."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from raytide.control.backup.drill import drill
from raytide.control.backup.place import BackupPlace, place_of
from raytide.control.backup.results import read_results
from raytide.control.backup.run import back_up
from raytide.control.backup.upkeep import BackupTask, copy_to_cold, create_hot, due_tasks, forget
from raytide.control.supervision.daemon import hold_lock
from raytide.core.errors import RaytideError
from raytide.core.logs import log_to, logger

log = logger(__name__)

_TASKS: Mapping[BackupTask, Callable[[BackupPlace], object]] = {
    "backup": back_up,
    "cold": copy_to_cold,
    "forget": forget,
    "drill": drill,
}
_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 3600.0


def run_due(place: BackupPlace, now_s: float) -> float:
    """Runs the tasks that are due, and returns the seconds until the next run: between a second and an hour. A failure
    is logged. It is also recorded, unless another backup, restore or drill of the cluster is running.
    """
    due, _ = due_tasks(place.settings, read_results(place.work_dir), now_s)
    for task in due:
        try:
            if task == "backup":
                create_hot(place)
            _TASKS[task](place)
            log.info("done", extra={"task": task})
        except (RaytideError, OSError) as error:
            log.error("failed", extra={"task": task, "error": str(error)})
    _, wait_s = due_tasks(place.settings, read_results(place.work_dir), time.time())
    return min(max(wait_s, _LEAST_WAIT_S), _MOST_WAIT_S)


def main(run_dir: str) -> None:
    folder, stopped = Path(run_dir), threading.Event()
    log_to()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        raise SystemExit(0)  # ends a running restic too: what it has stored is used by the next run

    signal.signal(signal.SIGTERM, stop)
    with hold_lock(folder / "backup.lock"):
        place = place_of(folder.name)
        wait_s = 0.0
        while not stopped.wait(wait_s):
            wait_s = run_due(place, time.time())


if __name__ == "__main__":
    main(sys.argv[1])
