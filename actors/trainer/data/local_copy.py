"""Local copies of remote data in this user's private cache folder, and locks between processes.

The folder has a fixed name in the system's temporary folder (set TMPDIR to move it), where any user may create files.
So it is used only if this user owns it and no other user may write to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raytide.core.errors import StorageError, WaitTimeoutError
from raytide.core.io.storage import full_disk_is_an_error, join, open_url, read_bytes
from raytide.core.io.token_dataset import CONFIG, ITEM_BYTES, MANIFEST, TokenManifest, parse_manifest

LOCK_TIMEOUT_S = 6 * 3600.0
"""Time limit for waiting on another process's copy. The lock is released when that process ends."""
_POLL_S = 0.05
_MARGIN_BYTES = 16 << 20
"""Disk space left free beside a copy."""


def private_folder(*names: str) -> Path:
    """Returns a folder that only this user can write to. StorageError if another user owns the name."""
    top = Path(tempfile.gettempdir()) / f"raytide-{os.getuid()}"
    with full_disk_is_an_error(str(top)):
        top.mkdir(mode=0o700, exist_ok=True)
        about = top.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise StorageError(
                f"{top} is not private to this user.", hint="Remove it, or set TMPDIR to a folder of your own."
            )
        folder = top.joinpath(*names)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yields whether this process holds the lock. The lock is released when the process ends."""
    with full_disk_is_an_error(str(path)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


@contextmanager
def lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Wait for the lock. WaitTimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with try_lock(path) as held:
            if held:
                yield
                return
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(
                f"another process has held {path} for {timeout_s:g} s.", hint="Check what that process is waiting for."
            )
        time.sleep(_POLL_S)


def require_free_space(folder: Path, needed: int, what: str) -> None:
    """Raise StorageError if the folder's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN_BYTES:
        raise StorageError(
            f"{what} needs {needed / 1e9:.3f} GB in {folder}, which has {free / 1e9:.3f} GB left.",
            hint="Free space there, or set TMPDIR to a larger disk.",
        )


def local_copy(dataset: str) -> Path:
    """Returns the dataset's local directory; a remote one is copied once per machine and user, keyed by its manifest's
    hash.

    Only the files that the manifest names are copied. StorageError if they do not fit; a partial copy is removed.
    """
    if "://" not in dataset:
        return Path(dataset)
    body = read_bytes(join(dataset, MANIFEST))
    manifest = parse_manifest(body, join(dataset, MANIFEST))
    home = private_folder("datasets") / hashlib.sha256(body).hexdigest()[:32]
    if home.exists():
        return home
    with lock(home.with_suffix(".lock")):
        if not home.exists():
            files = _files(dataset, manifest)
            _fetch(dataset, files, home, sum(size for size in files.values()))
    return home


def local_file_copy(url: str, version: str, suffix: str) -> Path:
    """Returns a local copy of one remote file, made once per machine, user and version."""
    home = private_folder("datasets") / f"{version}{suffix}"
    if home.exists():
        return home
    with lock(home.with_suffix(".lock")):
        if not home.exists():
            fs, path = open_url(url)
            part = home.with_suffix(".part")
            require_free_space(home.parent, int(fs.size(path) or 0), url)
            with full_disk_is_an_error(str(home)):
                try:
                    fs.get_file(path, str(part))
                    os.replace(part, home)
                finally:
                    part.unlink(missing_ok=True)
    return home


def _files(dataset: str, manifest: TokenManifest) -> dict[str, int]:
    """Returns the files to copy with their bytes (0 if unknown). Names come from the manifest, because a listed name
    could lead out of the folder."""
    fs, path = open_url(dataset)
    beside = [name for name in (manifest.tokenizer, CONFIG) if fs.exists(join(path, name))]
    shards = {shard.file: shard.tokens * ITEM_BYTES[manifest.dtype] for shard in manifest.shards}
    return {MANIFEST: 0, **dict.fromkeys(beside, 0), **shards}


def _fetch(dataset: str, files: Mapping[str, int], home: Path, needed: int) -> None:
    part = home.with_suffix(".part")  # also removes what a killed process left: this process holds the lock
    fs, path = open_url(dataset)
    try:
        shutil.rmtree(part, ignore_errors=True)
        require_free_space(home.parent, needed, dataset)
        with full_disk_is_an_error(f"{dataset} to {home}: {needed / 1e9:.3f} GB are needed there"):
            for name in files:
                (part / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get([join(path, name) for name in files], [str(part / name) for name in files])
            part.rename(home)
    finally:
        shutil.rmtree(part, ignore_errors=True)
