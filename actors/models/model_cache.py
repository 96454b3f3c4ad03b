"""A cache, on this node, of model directories from object stores. It is keyed by content: each model is copied once,
however many processes use it.

An entry has these names in the cache's folder:
- `KEY.lock` is a file that holds the entry's size in bytes. A process holds an exclusive lock on it
  while it copies or deletes the model, and a shared lock while it uses the model. The kernel releases
  the lock when the process ends.
- `KEY` is the folder with the model. It appears by a rename once the copy is complete.
- `KEY.*.part` is a copy in progress or an incomplete copy, which nobody reads.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.models.quantized.gguf.packaged_models import packaged_path
from raytide.actors.models.remote_directory import RemoteDirectory
from raytide.core.config import environment
from raytide.core.errors import ConfigError, DataError, StorageError
from raytide.core.io.private_folder import (
    LOCK_TIMEOUT_S,
    MARGIN_BYTES,
    held_too_long,
    lock,
    lock_file,
    private_folder,
    take,
)
from raytide.core.io.private_paths import check_named
from raytide.core.io.storage import check_url, full_disk_is_an_error, local_path

CACHE_GB = "MODEL_CACHE_GB"
"""The name, without prefix, of the environment variable RAYTIDE_MODEL_CACHE_GB: the cache's capacity in GB."""
_SHARE_OF_DISK = 0.5
_POLL_S = 0.1
_KEY = re.compile(r"[0-9a-f]{32}\.lock")

Progress = Callable[[int, int], None]
"""A function that is called now and then with the bytes copied so far and the total bytes."""


@dataclass(slots=True)
class StagedModel:
    """A model on this node. A copy in the model cache is protected from deletion until `close`, or until this process
    ends. A local directory outside of the cache is not protected.
    """

    path: str
    bytes: int = 0
    """The bytes that were copied for this caller: 0 if the model was there already."""
    _lock: int | None = None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def staged_model(location: str, on_progress: Progress = lambda done, total: None) -> StagedModel:
    """Returns the local path of a model or adapter. A model in an object store is first copied to this node. For a
    packaged model or a GGUF file, the path is that of the file.

    Blocks while the copy makes progress. Errors:
    - DataError: the location is not allowed or cannot be read.
    - DeniedError: the location is outside the data roots.
    - StorageError: the model does not fit.
    - WaitTimeoutError: no bytes arrive, or another process copies or deletes the model for too long.
    - ConfigError: a packaged model is not installed on this node.
    """
    if (path := packaged_path(location)) is not None:
        return StagedModel(path)
    check_url(location)
    check_named(location, "a model", links=True)
    if (path := local_path(location)) is not None:
        return StagedModel(path)
    return ModelCache(private_folder("models"), capacity_bytes()).stage(location, on_progress)


def capacity_bytes() -> int:
    """Returns the cache's capacity in bytes: the value of RAYTIDE_MODEL_CACHE_GB, or else half of the disk's size."""
    if (text := environment(CACHE_GB)) is None:
        return int(shutil.disk_usage(private_folder("models")).total * _SHARE_OF_DISK)
    try:
        capacity = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        capacity = 0
    if capacity <= 0:
        raise ConfigError(f"RAYTIDE_{CACHE_GB} is {text!r}.", hint="Give the gigabytes that models may take: 200.")
    return capacity


class ModelCache:
    """The cache entries in one folder, which many processes share."""

    def __init__(self, folder: Path, capacity: int, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._folder, self._capacity, self._lock_timeout_s = folder, capacity, lock_timeout_s

    def stage(self, url: str, on_progress: Progress = lambda done, total: None) -> StagedModel:
        """Returns the local copy of a model directory. Copies the directory if there is no copy yet."""
        remote = RemoteDirectory.read(url)
        home, lock_path = self._folder / remote.key, self._folder / f"{remote.key}.lock"
        deadline_s, copied = time.monotonic() + self._lock_timeout_s, 0
        while True:
            handle = lock_file(lock_path)
            try:
                is_ours = not home.is_dir() and take(handle, fcntl.LOCK_EX) and _is_at(handle, lock_path)
                if is_ours and not home.is_dir():
                    self._copy(remote, home, handle, on_progress)
                    copied = remote.bytes
                if home.is_dir() and take(handle, fcntl.LOCK_SH) and _is_at(handle, lock_path) and home.is_dir():
                    os.utime(handle)
                    return StagedModel(str(home), copied, handle)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            if time.monotonic() > deadline_s:
                raise held_too_long(lock_path, self._lock_timeout_s)
            time.sleep(_POLL_S)

    def _copy(self, remote: RemoteDirectory, home: Path, handle: int, on_progress: Progress) -> None:
        """Copies the files and renames the folder once it is complete. The caller holds the entry's exclusive lock."""
        with lock(self._folder / "room.lock"):
            self._make_room(remote)
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(remote.bytes).encode(), 0)
        _delete_parts(home)
        part = home.with_name(f"{home.name}.{secrets.token_hex(4)}.part")
        try:
            with full_disk_is_an_error(f"{remote.url} to {part}"):
                part.mkdir(mode=0o700)
                remote.copy_to(part, on_progress)
                if RemoteDirectory.read(remote.url).key != remote.key:
                    raise DataError(f"{remote.url} changed while it was read.", hint="Use a model that is complete.")
                part.rename(home)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, remote: RemoteDirectory) -> None:
        """Deletes the least recently used entries until the model fits."""
        if remote.bytes > self._capacity:
            raise StorageError(
                f"{remote.url} has {remote.bytes / 1e9:.3f} GB, more than this node keeps of all models.",
                hint=f"RAYTIDE_{CACHE_GB} raises the {self._capacity / 1e9:.3f} GB; TMPDIR names another disk.",
            )
        sizes = {path: _size(path) for path in self._folder.iterdir() if _KEY.fullmatch(path.name)}
        sizes.pop(self._folder / f"{remote.key}.lock", None)
        used = sum(sizes.values())
        for path in sorted(sizes, key=_used_at_s):
            if self._fits(remote, used):
                return
            if _delete(path):
                used -= sizes[path]
        if not self._fits(remote, used):
            raise StorageError(
                f"{remote.url} needs {remote.bytes / 1e9:.3f} GB in {self._folder}, where models in use take "
                f"{used / 1e9:.3f} GB of {self._capacity / 1e9:.3f}.",
                hint=f"End other endpoints here, free space, or raise RAYTIDE_{CACHE_GB}.",
            )

    def _fits(self, remote: RemoteDirectory, used: int) -> bool:
        free = shutil.disk_usage(self._folder).free
        return used + remote.bytes <= self._capacity and remote.bytes + MARGIN_BYTES <= free


def _is_at(handle: int, path: Path) -> bool:
    """Returns whether an open lock file is still the entry's, that is, was not deleted together with an entry."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _used_at_s(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _delete(path: Path) -> bool:
    """Deletes the entry of a lock file; returns False if it is in use."""
    handle = lock_file(path)
    try:
        if not take(handle, fcntl.LOCK_EX):
            return False
        home = path.with_suffix("")
        with suppress(FileNotFoundError):  # a deletion that is interrupted leaves no torn folder under its name
            home.rename(home.with_name(f"{home.name}.{secrets.token_hex(4)}.part"))
        _delete_parts(home)
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(handle)


def _delete_parts(home: Path) -> None:
    for part in home.parent.glob(f"{home.name}.*.part"):
        shutil.rmtree(part, ignore_errors=True)
