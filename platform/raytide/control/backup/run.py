"""Makes one backup: copies the state, then all folders that the state names, so that no reference dangles."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from raytide.control.backup.contents import Contents, contents_of, is_there, paths_to_save, pinned
from raytide.control.backup.place import CONFIG, BackupPlace
from raytide.control.backup.repository import BackupSummary
from raytide.control.backup.results import failures_recorded, read_results, record_backup, work_dir_of
from raytide.control.backup.state_copy import copy_sqlite, copy_state, is_sqlite_file
from raytide.core import bounds
from raytide.core.config import Config, raytide_version
from raytide.core.errors import ConflictError, StorageError
from raytide.core.io.atomic_file import write_json
from raytide.core.io.private_folder import lock_file, take
from raytide.core.io.storage import full_disk_is_an_error

MANIFEST, STATE, FILES, STAGING = "backup.json", "state.db", "files", "staging"
_LOCK = "lock"
_WAIT_S, _POLL_S = 300.0, 0.2
"""The time for which a command waits for the scheduled backup of the same cluster, and the interval of its checks, in
seconds.
"""
_TRANSIENT = (
    *("pids", "logs", "monitoring", "targets"),
    *("nodes/events", "nodes/*/[^me]*", "nodes/*/meter*"),  # the bill stays: machine.json and ended.json
    *("cluster.json", "client.json", "gateway.json", "alertmanager.token", "live.json", "*.lock", "page.html"),
)
"""Entries of a run folder that describe processes of this machine, or can always be made again."""
_DATABASES = ("*.db", "*.sqlite")


class BackupManifest(Config):
    """The content of a snapshot's `backup.json`: what belongs to the snapshot. A restore ignores all other files."""

    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    version: int = 1
    cluster: str
    at_s: float
    """The time of the backup, which does not have later changes."""
    raytide: str
    run_dir: str
    state_sha256: str
    staging: str
    """The folder in the snapshot with this file and the copies of databases."""
    databases: tuple[str, ...] = ()
    """Paths of other databases, relative to the run folder."""
    contents: Contents


def back_up(place: BackupPlace, now_s: Callable[[], float] = time.time) -> tuple[BackupManifest, BackupSummary]:
    """Saves a new snapshot. Raises ConflictError if another backup, restore or drill of this cluster still runs after
    five minutes.

    Any other failure is recorded for the metrics, and raised.
    """
    with working(place.cluster) as handle, failures_recorded(place, "backup", now_s):
        began_s = time.monotonic()
        with _staging(place) as staging:
            at_s = now_s()
            copy_state(place.state_url, staging / STATE)
            with pinned(contents_of(staging / STATE, place.settings.paths)) as contents:
                manifest = _stage(place, staging, contents, at_s)
                runs = (each.stored_as for each in contents.folders if each.kind == "run")
                summary = place.hot.backup(
                    [staging, *_of_run_dir(place), *paths_to_save(contents)],
                    cluster=place.cluster,
                    list_file=place.work_dir / "paths",
                    exclude=_excluded(place),
                    parent=read_results(place.work_dir).backup.snapshot,
                    may_vanish=[str(place.run_dir), *runs],
                    pass_fds=[handle],
                )
                if lost := [each.path for each in contents.folders if not is_there(each)]:
                    place.hot.remove(summary.snapshot)
                    raise StorageError(
                        f"{', '.join(lost)} changed while it was saved.", hint="The backup is tried again later."
                    )
        record_backup(place, manifest.at_s, summary, time.monotonic() - began_s)
        return manifest, summary


@contextmanager
def working(cluster: str) -> Iterator[int]:
    """Holds the lock of a cluster's backups inside the block, and yields the lock's file descriptor. If another backup,
    restore or drill holds the lock, waits for a while and then raises ConflictError.

    restic inherits the descriptor. If this process is killed, the lock is held until restic has ended too.
    """
    folder = work_dir_of(cluster)
    with full_disk_is_an_error(str(folder)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = lock_file(folder / _LOCK)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not take(handle, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise ConflictError(
                    f"another backup, restore or drill of cluster {cluster} runs.", hint="Wait until it has ended."
                )
            time.sleep(_POLL_S)
        yield handle
    finally:
        os.close(handle)


def _stage(place: BackupPlace, staging: Path, contents: Contents, at_s: float) -> BackupManifest:
    """Copies the run folder's other databases into the staging folder, which has the state; writes the manifest."""
    databases = []
    for source in _databases(place):
        relative = source.relative_to(place.run_dir)
        target = staging / FILES / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_sqlite(source, target)
        databases.append(str(relative))
    manifest = BackupManifest(
        cluster=place.cluster,
        at_s=at_s,
        raytide=raytide_version(),
        run_dir=str(place.run_dir),
        state_sha256=sha256_of(staging / STATE),
        staging=str(staging),
        databases=tuple(databases),
        contents=contents,
    )
    with full_disk_is_an_error(str(staging)):
        write_json(staging / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_run_dir(place: BackupPlace) -> list[Path]:
    if not (place.run_dir / CONFIG).exists():
        raise StorageError(f"{place.run_dir} has no {CONFIG}.", hint="It was removed or moved while it was backed up.")
    return [place.run_dir]


def _databases(place: BackupPlace) -> list[Path]:
    """Returns the SQLite files of the run folder, besides the state's."""
    found = sorted(path for pattern in _DATABASES for path in place.run_dir.rglob(pattern))
    transient = {place.run_dir / name for name in _TRANSIENT}
    own = [path for path in found if path.is_file() and not transient & set(path.parents)]
    return [path for path in own if path != place.run_dir / STATE and is_sqlite_file(path)]


def _excluded(place: BackupPlace) -> list[str]:
    """Returns the patterns of files that restic leaves out, such as databases: the staging folder has their copies."""
    patterns = [str(place.run_dir / name) for name in _TRANSIENT]
    for name in (place.run_dir / STATE, *_databases(place)):
        patterns += [str(name), f"{name}-wal", f"{name}-shm", f"{name}-journal"]
    return [_literal_parent(pattern, place.run_dir) for pattern in patterns]


def _literal_parent(pattern: str, run_dir: Path) -> str:
    """Returns the pattern with special characters in the run folder's own path escaped."""
    folder = "".join(f"\\{char}" if char in "*?[\\" else char for char in str(run_dir))
    return folder + pattern.removeprefix(str(run_dir))


@contextmanager
def _staging(place: BackupPlace) -> Iterator[Path]:
    """Yields an empty folder, at the same path in each backup, so that restic recognises unchanged files."""
    staging = place.work_dir / STAGING
    with full_disk_is_an_error(str(staging)):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
