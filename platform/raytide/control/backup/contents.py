"""Finds the folders to back up: checkpoints, datasets, models, and the files of runs. The records in a copy of the
state store refer to these folders.

Checkpoints, datasets and exported models are sealed: a manifest, which is written last, contains the hash of each
file. A backup leaves incomplete folders out. After a restore, the hash of a sealed folder is compared with the hash
that the backup recorded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import open_store
from raytide.core.config import Config
from raytide.core.errors import CheckpointError, DataError, StorageError
from raytide.core.io import token_dataset
from raytide.core.io.storage import local_path
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import FINAL_STATES, JobKind
from raytide.core.state.database import Database
from raytide.core.state.registry import tables as registry
from raytide.core.state.tables import endpoints, jobs
from raytide.registry.content_digest import digest_to_compare

FolderKind = Literal["checkpoint", "dataset", "model", "run", "path"]
_PINNED = ".backup"
"""A folder beside checkpoints, with links to the files of the checkpoint that is being saved."""
_TRIES = 5
_CHECKPOINTS = "checkpoints"
"""A run's folder of checkpoints, if its spec names no other."""


class SavedFolder(Config):
    """A folder in a snapshot."""

    kind: FolderKind
    path: str
    stored_as: str
    """The folder's path in the snapshot. It differs from `path` if symbolic links lead to the folder, or if hard links
    to a checkpoint are saved."""
    sha256: str = ""
    """The hash of a checkpoint's or dataset's manifest, or of a registered model's content; empty where none is
    known."""
    owner: str = ""
    """The job, or the version in the registry, that names the folder."""


class Contents(Config):
    """The folders and URLs that the records in a copy of the state refer to."""

    folders: tuple[SavedFolder, ...] = ()
    remote: tuple[str, ...] = ()
    """URLs of object stores, which stay where they are."""
    missing: tuple[str, ...] = ()
    """Paths that are missing on this machine, or incomplete."""


@dataclass(frozen=True, slots=True)
class _Named:
    kind: FolderKind
    location: str
    owner: str
    sha256: str = ""
    is_needed: bool = True
    """False for folders that a finished job used, because they are often removed afterwards."""


def contents_of(state: Path, paths: Iterable[str] = ()) -> Contents:
    """Returns the folders and URLs that the state store names, and the `paths` that the configuration adds. `state` is
    a copy of the state store.
    """
    with closing(Database(f"sqlite:///{state}")) as database, database.read() as c:
        named = [*_of_registry(c), *_of_jobs(c), *_of_endpoints(c)]  # the registry knows the hashes
    named += [_Named("path", path, "metadata.raytide.backup.paths") for path in paths]
    folders: dict[tuple[str, str], SavedFolder] = {}
    remote: dict[str, None] = {}
    missing: dict[str, None] = {}
    for each in named:
        path = local_path(each.location)
        if path is None:
            remote[each.location] = None
        elif (found := _on_disk(each, Path(path))) is not None:
            folders.setdefault((found.kind, found.path), found)
        elif each.is_needed:
            missing[path] = None
    return Contents(folders=tuple(folders.values()), remote=tuple(remote), missing=tuple(missing))


@contextmanager
def pinned(contents: Contents) -> Iterator[Contents]:
    """Yields the contents with each checkpoint replaced by a folder of hard links to its files. The links keep the
    files if the run removes the checkpoint during the backup. If a checkpoint was removed already, the run's newest
    checkpoint takes its place. If the run has no checkpoint left, the path is added to `missing`. If no links can be
    made, the checkpoint itself is saved.
    """
    places = {Path(each.stored_as).parent / _PINNED for each in contents.folders if each.kind == "checkpoint"}
    try:
        folders = [_pin(each) if each.kind == "checkpoint" else each for each in contents.folders]
        lost = tuple(each.path for each, kept in zip(contents.folders, folders, strict=True) if kept is None)
        kept = tuple(each for each in folders if each is not None)
        yield contents.model_copy(update={"folders": kept, "missing": (*contents.missing, *lost)})
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def _pin(folder: SavedFolder) -> SavedFolder | None:
    """Returns the checkpoint with the path of its hard links; if it was removed, the run's newest checkpoint; None if
    there is none.

    If no links can be made, it keeps its own path: if it is then removed, the backup fails and is repeated.
    """
    for _ in range(_TRIES):
        source = Path(folder.stored_as)
        target = source.parent / _PINNED / source.name
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, copy_function=os.link)
            if _manifest_sha256(target) == folder.sha256 and _is_whole(target):
                return folder.model_copy(update={"stored_as": str(target)})
        except (OSError, shutil.Error):
            if source.is_dir() and _is_whole(source):
                return folder  # a file system without links, or files of another user
        newest = _newest_checkpoint(source.parent)
        if newest is None:
            return None
        path = str(Path(folder.path).with_name(newest.name))
        found = {"path": path, "stored_as": str(newest), "sha256": _manifest_sha256(newest)}
        folder = folder.model_copy(update=found)
    return None


def paths_to_save(contents: Contents) -> list[Path]:
    """Returns the files and folders to save. The folder of a run is saved without its checkpoints. Each checkpoint to
    save is listed separately."""
    found: dict[Path, None] = {}
    checkpoints = {parent for each in contents.folders if each.kind == "checkpoint" for parent in _above(each.path)}
    for folder in contents.folders:
        path = Path(folder.stored_as)
        if folder.kind == "run":
            entries = (path / entry.name for entry in sorted(path.iterdir()) if entry.name != _CHECKPOINTS)
            found |= dict.fromkeys(entry for entry in entries if entry not in checkpoints)
        else:
            found[path] = None
    return [path for path in found if not any(parent in found for parent in path.parents)]


def _above(path: str) -> list[Path]:
    return [*Path(path).parents, *Path(path).resolve().parents]


def is_there(folder: SavedFolder) -> bool:
    """Returns whether a folder is still there after the backup. The folder must exist, and a dataset must have the same
    manifest and all its files. The check is needed because restic skips files that disappear.
    """
    path = Path(folder.stored_as)
    if folder.kind != "dataset":
        return path.exists()
    try:
        found = token_dataset.load_manifest(str(path))
        is_same = token_dataset.sha256_of(str(path)) == folder.sha256
    except (DataError, OSError):
        return False
    return is_same and all((path / each.file).is_file() for each in found.files)


def problem_of(folder: SavedFolder, path: Path) -> str:
    """Returns the problem of a sealed folder that was restored to `path`. Returns an empty text if there is no problem.
    Reads every byte of the folder."""
    try:
        if folder.kind == "checkpoint":
            manifest.verify(open_store(str(path.parent)), path.name)
            found = _manifest_sha256(path)
        elif folder.kind == "dataset":
            token_dataset.verify(str(path))
            found = token_dataset.sha256_of(str(path))
        elif folder.kind == "model" and folder.sha256:
            found = digest_to_compare(str(path), folder.sha256).sha256
        else:
            return "" if path.exists() else f"{folder.path} was not restored."
    except (CheckpointError, DataError, StorageError, OSError) as error:
        return f"{folder.kind} {folder.path}: {error}"
    is_same = not folder.sha256 or found == folder.sha256
    return "" if is_same else f"{folder.kind} {folder.path} is not the one that was saved: its hash differs."


def _of_jobs(c: sa.Connection) -> Iterator[_Named]:
    query = sa.select(jobs.c.id, jobs.c.state, jobs.c.spec).where(jobs.c.kind == JobKind.TRAIN).order_by(jobs.c.number)
    for row in c.execute(query):
        config = _mapping(_mapping(row.spec).get("config"))
        is_live = row.state not in FINAL_STATES
        if isinstance(out := config.get("out"), str):
            yield _Named("run", out, row.id, is_needed=False)
            where = config.get("checkpoint_dir") or f"{out.rstrip('/')}/{_CHECKPOINTS}"
            yield _Named("checkpoint", str(where), row.id, is_needed=False)
        if is_live:
            yield from (_Named("dataset", dataset, row.id) for dataset in _datasets_of(config))
        if is_live and isinstance(model := config.get("init_from"), str) and model.startswith(("/", "~")):
            yield _Named("model", model, row.id)


def _datasets_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the token datasets that a training reads: its own or the sources of its mixture, and the held-out one."""
    sources = _mapping(config.get("dataset")).get("sources") or ()
    places = (config, *map(_mapping, sources), _mapping(config.get("eval")))
    yield from (dataset for place in places if isinstance(dataset := place.get("dataset"), str))


def _of_registry(c: sa.Connection) -> Iterator[_Named]:
    for kind, table in (("dataset", registry.datasets), ("model", registry.models)):
        for row in c.execute(sa.select(table).order_by(table.c.name, table.c.version)):
            spec = _mapping(row.spec)
            if isinstance(location := spec.get("location"), str):
                owner, sha256 = f"{row.name}:{row.version}", str(spec.get("sha256") or "")
                yield _Named("dataset" if kind == "dataset" else "model", location, owner, sha256)


def _of_endpoints(c: sa.Connection) -> Iterator[_Named]:
    query = sa.select(endpoints.c.name, endpoints.c.spec).where(endpoints.c.state != EndpointState.DELETED)
    for row in c.execute(query.order_by(endpoints.c.name)):
        spec = _mapping(row.spec)
        for location in (spec.get("model"), spec.get("weights"), *_mapping(spec.get("adapters")).values()):
            if isinstance(location, str) and (location.startswith(("/", "~")) or "://" in location):
                yield _Named("model", location, row.name)


def _on_disk(named: _Named, path: Path) -> SavedFolder | None:
    """Returns the folder to save; None if it is missing or incomplete."""
    sha256 = named.sha256
    try:
        if named.kind == "checkpoint":
            newest = _newest_checkpoint(path)
            if newest is None:
                return None
            path, sha256 = newest, _manifest_sha256(newest)
        elif named.kind == "dataset":
            sha256 = token_dataset.sha256_of(str(path))
            if sha256 != (named.sha256 or sha256):
                return None
        elif named.kind == "model" and _leads_out(path.resolve()):
            return None  # restic saves a link, not the file to which it leads
    except (DataError, StorageError, OSError):
        return None
    if not path.exists() or (named.kind != "path" and not path.is_dir()):
        return None
    stored_as = str(path.resolve())
    return SavedFolder(
        kind=named.kind, path=str(path.absolute()), stored_as=stored_as, sha256=sha256, owner=named.owner
    )


def _leads_out(folder: Path) -> bool:
    """Returns True if the model has links to files outside it, as in the snapshots of Hugging Face's cache."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[:1] != "."]  # the digest leaves them out, too
        links = (path for name in names if name[:1] != "." and os.path.islink(path := os.path.join(at, name)))
        if any(not Path(os.path.realpath(path)).is_relative_to(folder) for path in links):
            return True
    return False


def _newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest checkpoint whose files all have the sizes in its manifest."""
    if not folder.is_dir():
        return None
    names = manifest.folders_newest_first(open_store(str(folder)))
    return next((folder / name for name in names if _is_whole(folder / name)), None)


def _is_whole(checkpoint: Path) -> bool:
    """Returns whether the manifest exists and each file has the size that the manifest has for it."""
    store = open_store(str(checkpoint.parent))
    try:
        files = manifest.read(store, checkpoint.name).manifest.files
    except CheckpointError:
        return False
    sizes = store.sizes(checkpoint.name)
    return all(sizes.get(file) == record.size for file, record in files.items())


def _manifest_sha256(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / manifest.MANIFEST).read_bytes()).hexdigest()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
