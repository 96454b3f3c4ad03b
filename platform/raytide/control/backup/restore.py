"""Restores a snapshot: first into a scratch folder, where it is checked, and from there to the original paths.

The folders that the state store names are moved first. The state store is moved last. If a restore is killed before
this last move, there is no state store yet that could name missing folders. Existing files are never overwritten.
"""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa

from raytide.autoscaler.providers.local.files import node_folders
from raytide.control.accounting.restored_records import ENDED
from raytide.control.backup.contents import SavedFolder, problem_of
from raytide.control.backup.place import CONFIG
from raytide.control.backup.repository import Repository, RepositorySnapshot
from raytide.control.backup.results import work_dir_of
from raytide.control.backup.run import FILES, MANIFEST, STATE, BackupManifest, sha256_of, working
from raytide.control.backup.state_copy import check_state, write_state
from raytide.core.errors import ConfigError, ConflictError, NotFoundError, RaytideError, StorageError
from raytide.core.io.atomic_file import read_json
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.specs.order import HOLD, Order
from raytide.core.state.database import Database
from raytide.core.state.tables import counters, leaders, orders

SKIPPED_NUMBERS = 1000
"""The number of ids that a restore skips for jobs, leases and nodes. They may have been given out after the backup, and
Ray and the provider may still know them.
"""
_NUMBERED = ("job", "lease", "node")
_SCRATCH = "restore-"


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A snapshot that was restored into a scratch folder."""

    snapshot: RepositorySnapshot
    scratch: Path
    manifest: BackupManifest
    problems: tuple[str, ...]
    """restic's messages about files that it could not read."""

    @property
    def staging(self) -> Path:
        return below(self.scratch, self.manifest.staging)

    @property
    def run_dir(self) -> Path:
        return below(self.scratch, self.manifest.run_dir)


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore."""

    snapshot: str
    at_s: float
    run_dir: Path
    folders: tuple[str, ...]
    """Folders that were restored, or that existed already and were intact."""
    problems: tuple[str, ...]
    """Folders that were not restored, and why."""


def find_snapshot(repository: Repository, cluster: str | None, id: str = "latest") -> RepositorySnapshot:
    """Returns a cluster's snapshot with this id. For the id `latest`, returns the cluster's newest snapshot. Without
    `cluster`, the snapshots of all clusters are searched. Raises NotFoundError if no snapshot is found, or if the found
    snapshots belong to several clusters.
    """
    found = repository.snapshots(cluster)
    if id != "latest":
        found = tuple(each for each in found if each.id.startswith(id[:8]))
    if not found:
        what = f"snapshot {id}" + (f" of cluster {cluster}" if cluster else "")
        raise NotFoundError(
            f"there is no {what} in {repository.shown_url}.", hint="`raytide backup list` shows the snapshots."
        )
    if len(names := sorted({each.cluster for each in found})) > 1:
        raise NotFoundError(
            f"{repository.shown_url} has snapshots of the clusters {', '.join(names)}.",
            hint="Choose one with --cluster.",
        )
    return found[-1]


def restore_cluster(
    repository: Repository, snapshot: RepositorySnapshot, run_dir: Path, *, state_url: str | None = None
) -> Restored:
    """Restores a lost cluster into this run folder, and the cluster's datasets, models, checkpoints and other folders
    to their original paths."""
    with working(run_dir.name):
        work_dir = work_dir_of(run_dir.name)
        for left in work_dir.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        check_is_free(run_dir)
        scratch = work_dir / f"{_SCRATCH}{secrets.token_hex(4)}"
        try:
            return put_in_place(unpack(repository, snapshot, scratch), run_dir, state_url=state_url)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_is_free(run_dir: Path) -> None:
    """Raises ConflictError if the run folder contains a cluster."""
    for name in ("cluster.json", CONFIG, STATE):
        if (run_dir / name).exists():
            raise ConflictError(
                f"{run_dir} holds a cluster already ({name}).",
                hint="Move the folder away, or restore under another name: --name NAME.",
            )


def unpack(repository: Repository, snapshot: RepositorySnapshot, scratch: Path) -> Unpacked:
    """Restores all of a snapshot into a new scratch folder. Raises StorageError if the snapshot's manifest or state is
    missing or damaged."""
    with full_disk_is_an_error(str(scratch)):
        scratch.mkdir(mode=0o700, parents=True)
    problems = repository.restore(snapshot.id, scratch)
    staged = next((below(scratch, path) for path in snapshot.paths if (below(scratch, path) / MANIFEST).exists()), None)
    if staged is None:
        raise StorageError(
            f"snapshot {snapshot.id} of {repository.shown_url} has no {MANIFEST}: "
            f"{'; '.join(problems[:3]) or 'incomplete'}.",
            hint="Use an earlier snapshot (`raytide backup list`).",
        )
    try:
        manifest = BackupManifest.parse(read_json(staged / MANIFEST) or {}, where=str(staged / MANIFEST))
    except (ValueError, ConfigError) as error:
        problem = error.message if isinstance(error, ConfigError) else f"{error}."
        raise StorageError(
            f"{MANIFEST} of snapshot {snapshot.id} is damaged or from another release: {problem}", hint=_EARLIER
        ) from None
    state = staged / STATE
    if not state.exists() or sha256_of(state) != manifest.state_sha256:
        raise StorageError(f"the state in snapshot {snapshot.id} is not the one that was saved.", hint=_EARLIER)
    check_state(state)
    return Unpacked(snapshot, scratch, manifest, problems)


_EARLIER = "Use an earlier snapshot: `raytide backup list`."


def put_in_place(unpacked: Unpacked, run_dir: Path, *, state_url: str | None = None) -> Restored:
    """Moves the unpacked files to their original paths. The result names the folders that were moved, and the problems.

    `state_url` replaces the URL of the state store in the restored configuration. Raises ConflictError if the run
    folder or the state store contains a cluster. A second call continues where a killed restore stopped. However, if
    the killed restore had already put the state store in place, the second call raises ConflictError, too.
    """
    check_is_free(run_dir)
    restored, problems = [], []
    for folder in sorted(unpacked.manifest.contents.folders, key=_from_the_inside):
        problem = _put_folder(folder, below(unpacked.scratch, folder.stored_as))
        if problem:
            problems.append(problem)
        else:
            restored.append(folder.path)
    with full_disk_is_an_error(str(run_dir)):
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in unpacked.manifest.databases:
            _move(unpacked.staging / FILES / name, run_dir / name)
        _merge(unpacked.run_dir, run_dir, last=CONFIG)
        for node in node_folders(run_dir) if (run_dir / "nodes").is_dir() else ():
            node.record_earlier_end(unpacked.manifest.at_s, ENDED)
    _put_state(unpacked, run_dir, state_url)
    with full_disk_is_an_error(str(run_dir)):
        _move(unpacked.run_dir / CONFIG, run_dir / CONFIG)
    return Restored(unpacked.snapshot.id, unpacked.manifest.at_s, run_dir, tuple(restored), tuple(problems))


def hold_back(state: Path, manifest: BackupManifest, snapshot: str) -> None:
    """Puts a hold into a copied state, so that the restored controller only observes until `raytide resume`. A second
    call has no effect.

    The state is changed in two more ways. Its counters skip the ids that may have been given out after the backup. The
    name of the leading controller is removed.
    """
    order = Order(
        id=f"restore-{snapshot}",
        kind=HOLD,
        subject=manifest.cluster,
        replica="",
        reason=f"the state was restored from snapshot {snapshot}",
        user="raytide",
        at_s=manifest.at_s,
    )
    with closing(Database(f"sqlite:///{state}")) as database:
        database.upgrade()
        with database.write() as c:
            if c.execute(orders.select().where(orders.c.id == order.id)).first() is not None:
                return
            c.execute(orders.insert(), asdict(order))
            c.execute(leaders.update().values(holder=""))
            known = set(c.execute(sa.select(counters.c.name)).scalars())
            if unused := [{"name": name, "next": 1} for name in _NUMBERED if name not in known]:
                c.execute(counters.insert(), unused)
            skipped = counters.update().where(counters.c.name.in_(_NUMBERED))
            c.execute(skipped.values(next=counters.c.next + sa.literal(SKIPPED_NUMBERS)))


def below(root: Path, path: str) -> Path:
    """Returns the path below `root` at which restic restores a file with this absolute path."""
    return root / path.lstrip("/")


def _put_folder(folder: SavedFolder, found: Path) -> str:
    """Moves one folder to its path; returns why it could not, or an empty text. An intact folder that is there already
    stays."""
    target, is_merged = Path(folder.path), folder.kind in ("run", "path")
    if is_merged and not found.exists():
        return "" if folder.kind == "run" else f"{folder.path} was not restored."
    if not is_merged and target.exists():
        problem = problem_of(folder, target)
        return f"{problem} It was there already: move it away, and restore again." if problem else ""
    if not is_merged and (problem := problem_of(folder, found)):
        return problem
    try:
        with full_disk_is_an_error(str(target)):
            _merge(found, target) if is_merged and found.is_dir() else _move(found, target)
    except RaytideError as error:
        return str(error)
    return ""


def _from_the_inside(folder: SavedFolder) -> tuple[bool, int]:
    """Returns a sort key: sealed folders before those of runs, which may contain them, and inner before outer ones."""
    return folder.kind in ("run", "path"), -len(Path(folder.path).parts)


def _put_state(unpacked: Unpacked, run_dir: Path, state_url: str | None) -> None:
    state = unpacked.staging / STATE
    hold_back(state, unpacked.manifest, unpacked.snapshot.id)
    url = state_url or load_cluster(unpacked.run_dir / CONFIG).settings.state_url or f"sqlite:///{run_dir / STATE}"
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        write_state(state, url)
        return
    target = Path(str(parsed.database))
    if target.exists():
        raise ConflictError(f"{target} exists already.", hint="Move it away: nothing is overwritten.")
    with closing(sqlite3.connect(state)) as copy:
        copy.execute("PRAGMA journal_mode=DELETE")
    with full_disk_is_an_error(str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        _move(state, target)


def _move(source: Path, target: Path) -> None:
    """Moves a file or a folder so that it appears at its target complete, even on another disk. An existing target
    stays; pipes and sockets are left out."""
    if target.exists() or target.is_symlink() or not (source.is_file() or source.is_dir() or source.is_symlink()):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:  # another file system
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".restored", dir=target.parent) as part:
            copy = Path(part) / target.name
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, copy, symlinks=True)
            else:
                shutil.copy2(source, copy, follow_symlinks=False)
            copy.rename(target)


def _merge(source: Path, target: Path, last: str | None = None) -> None:
    """Moves the files of a folder into another one, except the file `last`. Pipes and sockets are left out."""
    target.mkdir(mode=source.stat().st_mode & 0o777, parents=True, exist_ok=True)
    for entry in sorted(source.iterdir()):
        if entry.name == last:
            continue
        if entry.is_dir() and not entry.is_symlink():
            _merge(entry, target / entry.name)
        else:
            _move(entry, target / entry.name)
