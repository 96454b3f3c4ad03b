"""Checkpoint folders. A folder such as `step-00000050-5f3a9c01` contains files and a manifest with the hashes of these
files. The manifest is written last.

A folder without a manifest is an unfinished write and is never loaded. The hashes detect later damage. Each restart
of the gang begins a new generation of ranks. A rank of an earlier generation may still be saving then. It cannot
touch the files of another generation, because each save has its own folder. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, field_validator

from raytide.actors.trainer.checkpoint import safe_unpickler
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage
from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.errors import CheckpointError, ConfigError
from raytide.core.io.storage import named_failures

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""The file with DCP's table of the tensor shards in each file."""
MAX_BYTES = 256 << 20
"""The size limit of a manifest in bytes; an entry takes 0.15 KiB."""
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")
_CHUNK = 1 << 20
_RESTORE = "Delete the folder: the run then resumes from the previous checkpoint."


class FileRecord(Config):
    sha256: str
    size: int = Field(ge=0, lt=1 << 63)
    """The file's size in bytes."""


class Manifest(Config):
    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    step: int = Field(ge=0, lt=1 << 63)
    """Steps done, which is also the index of the next step."""
    samples: int = Field(ge=0, lt=1 << 63)
    """Sequences consumed. With the spec's seed this is the whole state of the data."""
    digests: dict[str, str]
    """Digests of what a resumed run must match, by name."""
    world: int = Field(ge=1, lt=1 << 31)
    """The number of ranks that wrote the checkpoint. Any number of ranks may read it."""
    files: dict[str, FileRecord]
    """Files by their name in the folder."""

    @field_validator("files")
    @classmethod
    def _check_names(cls, value: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in value:
            if not _FILE.fullmatch(name) or name in (".", "..", MANIFEST):
                raise ValueError(f"{name[:100]!r} is not a file name inside a checkpoint's folder")
        return value


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    """Folder name in the storage."""
    manifest: Manifest

    @property
    def size(self) -> int:
        return sum(file.size for file in self.manifest.files.values())


def folder_name(step: int, attempt: str) -> str:
    """Returns the name of a checkpoint folder. `attempt` is eight hexadecimal digits, unique among the run's saves."""
    return f"step-{step:08d}-{attempt}"


def step_of(name: str) -> int | None:
    """Returns the step in the name of a checkpoint folder. Returns None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def commit(store: CheckpointStorage, name: str, manifest: Manifest) -> Checkpoint:
    """Publishes the manifest. The folder becomes a checkpoint when its manifest is published."""
    body = manifest.model_dump()
    with named_failures(f"{store.url}/{name}"):
        store.publish(f"{name}/{MANIFEST}", json.dumps({**body, "sha256": _digest(body)}, indent=1).encode())
    return Checkpoint(name, manifest)


def read(store: CheckpointStorage, name: str) -> Checkpoint:
    """Reads a folder's manifest, but not the files. Raises CheckpointError if the manifest is missing or altered."""
    where = f"{store.url}/{name}"
    try:
        with named_failures(where), store.read(f"{name}/{MANIFEST}") as stream:
            text = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{where} is unfinished: it has no {MANIFEST}.", hint=_RESTORE) from None
    try:
        if len(text) > MAX_BYTES:
            raise ValueError("it is too large")
        body = json.loads(text)
        digest = body.pop("sha256")
        manifest = Manifest.parse(body, where=f"{where}/{MANIFEST}")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, ConfigError):
        raise CheckpointError(f"{where}/{MANIFEST} was altered: it is not a manifest.", hint=_RESTORE) from None
    if digest != _digest(body):
        raise CheckpointError(f"{where}/{MANIFEST} was altered: it does not match its own hash.", hint=_RESTORE)
    if step_of(name) not in (None, manifest.step):
        raise CheckpointError(f"{where}/{MANIFEST} is of step {manifest.step}, not of its folder's.", hint=_RESTORE)
    return Checkpoint(name, manifest)


def find_problems(store: CheckpointStorage, checkpoint: Checkpoint, files: Iterable[str] | None = None) -> list[str]:
    """Reads the files `files` of a checkpoint completely, and returns their problems. If `files` is None, reads all
    files of the checkpoint.
    """
    found = []
    for name in checkpoint.manifest.files if files is None else files:
        path, expected = f"{checkpoint.name}/{name}", checkpoint.manifest.files[name]
        try:
            with named_failures(f"{store.url}/{path}"):
                digest, size = _sha256(store, path)
        except FileNotFoundError:
            found.append(f"{store.url}/{path} is missing from its checkpoint.")
            continue
        except CheckpointError as error:
            found.append(error.message)
            continue
        if size != expected.size:
            found.append(f"{store.url}/{path} was altered: it has {size} bytes of {expected.size}.")
        elif digest != expected.sha256:
            found.append(f"{store.url}/{path} was altered: its SHA-256 is not the manifest's.")
        elif name == METADATA:
            found += _metadata_problems(store, path, size)
    return found


def _metadata_problems(store: CheckpointStorage, path: str, size: int) -> list[str]:
    """Returns the problem of a metadata file that was crafted to run code; an empty list if it has none. The file's
    hash does not show that, because its author could write the manifest too. See `safe_unpickler`.
    """
    try:
        with named_failures(f"{store.url}/{path}"), store.read(path) as stream:
            safe_unpickler.read(stream.read(min(size, safe_unpickler.MAX_BYTES + 1)), f"{store.url}/{path}")
    except CheckpointError as error:
        return [error.message]
    return []


def verify(store: CheckpointStorage, name: str) -> Checkpoint:
    """Reads a checkpoint completely and checks every byte. Raises a CheckpointError that names the first bad file."""
    checkpoint = read(store, name)
    for problem in find_problems(store, checkpoint):
        raise bad_checkpoint(problem)
    return checkpoint


def bad_checkpoint(problem: str) -> CheckpointError:
    return CheckpointError(problem, hint=_RESTORE)


def folders_newest_first(store: CheckpointStorage) -> list[str]:
    """Returns the names of the folders of checkpoints and unfinished writes, newest first."""
    with named_failures(store.url):
        steps = {name: step for name in store.folders() if (step := step_of(name)) is not None}
    return sorted(steps, key=lambda name: (steps[name], name), reverse=True)


def unfinished_folders(store: CheckpointStorage) -> list[str]:
    """Returns the names of folders whose write is in progress or was interrupted."""
    return [name for name in folders_newest_first(store) if MANIFEST not in sizes_of(store, name)]


def prune(store: CheckpointStorage, keep: int, committed: Checkpoint, rejected: Collection[str] = ()) -> None:
    """Removes old checkpoints after the checkpoint `committed` was written. Considers only checkpoints up to the step
    of `committed`. The newest `keep` steps that have an intact checkpoint keep all of their intact checkpoints. All
    other checkpoints are removed.

    Folders of later steps belong to another generation of the gang. They are neither counted nor removed. Unfinished
    folders stay, because a rank may be writing to them until the next restart.
    """
    kept_steps: set[int] = set()
    for name in folders_newest_first(store):
        step = step_of(name)
        assert step is not None
        sizes = sizes_of(store, name)
        if step > committed.manifest.step or MANIFEST not in sizes:
            continue
        is_intact = name == committed.name or (name not in rejected and _looks_whole(store, name, sizes))
        if is_intact and (step in kept_steps or len(kept_steps) < keep):
            kept_steps.add(step)
        else:
            remove(store, name)


def remove(store: CheckpointStorage, name: str) -> None:
    """Removes a folder, the manifest first. An interrupted removal thus leaves an unfinished write, not a bad
    checkpoint.
    """
    with named_failures(f"{store.url}/{name}"):
        store.remove(name, first=MANIFEST)


def _looks_whole(store: CheckpointStorage, name: str, sizes: dict[str, int]) -> bool:
    try:
        files = read(store, name).manifest.files
    except CheckpointError:
        return False
    return all(sizes.get(file) == record.size for file, record in files.items())


def sizes_of(store: CheckpointStorage, name: str) -> dict[str, int]:
    """Returns the size of each file in a folder, in bytes, by file name. Raises StorageError if the storage cannot be
    reached.
    """
    with named_failures(f"{store.url}/{name}"):
        return store.sizes(name)


def _sha256(store: CheckpointStorage, path: str) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with store.read(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
