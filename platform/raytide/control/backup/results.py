"""The results of a cluster's last backup, drill and copy, in a file that the API shows as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.core.config import Config, home
from raytide.core.errors import RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.storage import full_disk_is_an_error

if TYPE_CHECKING:
    from raytide.control.backup.place import BackupPlace
    from raytide.control.backup.repository import BackupSummary

FILE = "results.json"


class LastRun(Config):
    """The last successful run of a backup task, and the last failure after that run."""

    at_s: float = 0.0
    """The time of the run; 0 if there was none. A backup does not have the changes after this time."""
    took_s: float = 0.0
    snapshot: str = ""
    bytes: int = 0
    added_bytes: int = 0
    failed_at_s: float = 0.0
    error: str = ""
    """The failure after the last successful run; empty if there is none."""


class DrillResult(Config):
    """The measurements and the problems that a drill found."""

    at_s: float
    snapshot: str
    restore_s: float = 0.0
    """The seconds to restore (RTO): from the start until the restored control plane answered; 0 if it gave no answer
    or an incomplete one."""
    lost_s: float
    """The seconds of changes lost if the head had been lost at the drill's start (RPO): the age of the snapshot."""
    bytes: int = 0
    problems: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """Checks that could not be made here, with the reason."""


class BackupResults(Config):
    backup: LastRun = LastRun()
    forget: LastRun = LastRun()
    cold: LastRun = LastRun()
    drill: LastRun = LastRun()
    first_at_s: float = 0.0
    """The time of the first recorded backup; 0 if there was none."""
    found: DrillResult | None = None
    """The result of the last drill of the hot repository that could be made."""


def work_dir_of(cluster: str) -> Path:
    """Returns the folder for a cluster's unfinished backups, their lock and their results. This folder is outside the
    run folder, because the run folder may be lost or renamed."""
    return home().resolve() / "backup" / cluster


def read_results(work_dir: Path) -> BackupResults:
    """Returns the recorded results. The results are empty if nothing is recorded or the file cannot be read."""
    try:
        return BackupResults.parse(read_json(work_dir / FILE) or {}, where=FILE)
    except (OSError, ValueError, RaytideError):
        return BackupResults()


def record_backup(place: BackupPlace, at_s: float, summary: BackupSummary, took_s: float) -> None:
    run = LastRun(
        at_s=at_s, took_s=took_s, snapshot=summary.snapshot, bytes=summary.bytes, added_bytes=summary.added_bytes
    )
    _update(place, {"backup": run, "first_at_s": read_results(place.work_dir).first_at_s or at_s})


def record_run(place: BackupPlace, kind: str, took_s: float, snapshot: str = "") -> None:
    """Records that the task `kind` (`forget` or `cold`) succeeded, and that it took `took_s` seconds."""
    _update(place, {kind: LastRun(at_s=time.time(), took_s=took_s, snapshot=snapshot)})


@contextmanager
def failures_recorded(place: BackupPlace, kind: str, now_s: Callable[[], float] = time.time) -> Iterator[None]:
    """Records a RaytideError or OSError that the block raises, for the metrics. The error is then raised again."""
    try:
        yield
    except (RaytideError, OSError) as error:
        before: LastRun = getattr(read_results(place.work_dir), kind)
        _update(place, {kind: before.model_copy(update={"failed_at_s": now_s(), "error": str(error)})})
        raise


def record_drill(place: BackupPlace, result: DrillResult) -> None:
    run = LastRun(at_s=result.at_s, took_s=result.restore_s, snapshot=result.snapshot, bytes=result.bytes)
    _update(place, {"drill": run, "found": result})


def _update(place: BackupPlace, fields: Mapping[str, Any]) -> None:
    after = read_results(place.work_dir).model_copy(update=dict(fields))
    with full_disk_is_an_error(str(place.work_dir / FILE)):
        place.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(place.work_dir / FILE, after.model_dump(mode="json"))
