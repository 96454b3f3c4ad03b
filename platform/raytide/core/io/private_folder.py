"""This user's private cache folder on a machine, and locks between processes.

The private folder has a fixed name. It lies in the system's temporary folder, or in TMPDIR if that variable is set.
Any user may create files in a temporary folder. Therefore the private folder is used only if this user owns it and
no other user may write to it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raytide.core.errors import StorageError, WaitTimeoutError
from raytide.core.io.storage import full_disk_is_an_error

LOCK_TIMEOUT_S = 6 * 3600.0
"""The timeout in seconds of waiting for another process's copy. That process's end releases the lock."""
MARGIN_BYTES = 16 << 20
"""The disk space in bytes that must stay free beside a copy."""
_POLL_S = 0.05


def private_folder(*names: str) -> Path:
    """Returns a folder that only this user can write to. Raises StorageError if another user owns the folder of that
    name."""
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


_held: dict[Path, int] = {}
"""The locked handles of this process's temporary folders. Those of removed folders are closed when the next is made."""


def temporary_folder(*names: str) -> Path:
    """Removes the folders of ended processes from a private folder, and then creates a folder of this process in it. A
    process holds a lock on its folder until the process ends, so a folder without a lock can be removed.
    """
    home = private_folder(*names)
    with lock(home.with_suffix(".lock")):
        for gone in [each for each in _held if each.parent == home and not each.exists()]:
            os.close(_held.pop(gone))
        for left in home.iterdir():
            with suppress(FileNotFoundError):  # its process removes it
                handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if take(handle, fcntl.LOCK_EX):
                    shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
        folder = Path(tempfile.mkdtemp(dir=home))
        _held[folder] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        take(_held[folder], fcntl.LOCK_EX)
    return folder


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Tries to take the lock without waiting, and yields whether this succeeded. The lock is released when the block or
    the process ends."""
    handle = lock_file(path)
    try:
        yield take(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


@contextmanager
def lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Waits for the lock and holds it inside the block. Raises WaitTimeoutError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with try_lock(path) as held:
            if held:
                yield
                return
        if time.monotonic() > deadline_s:
            raise held_too_long(path, timeout_s)
        time.sleep(_POLL_S)


def lock_file(path: Path) -> int:
    """Opens the file of a lock, creating it if needed, and returns its file descriptor. The caller closes the
    descriptor, which releases the lock."""
    with full_disk_is_an_error(str(path)):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take(handle: int, kind: int) -> bool:
    """Tries to take a lock of this kind (LOCK_EX or LOCK_SH) without waiting, and returns whether this succeeded. A
    lock that is already held through `handle` is converted to this kind."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def held_too_long(path: Path, timeout_s: float) -> WaitTimeoutError:
    return WaitTimeoutError(
        f"another process has held {path} for {timeout_s:g} s.", hint="Check what that process is waiting for."
    )


def require_free_space(folder: Path, needed: int, what: str) -> None:
    """Raises StorageError if the folder's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN_BYTES:
        raise StorageError(
            f"{what} needs {needed / 1e9:.3f} GB in {folder}, which has {free / 1e9:.3f} GB left.",
            hint="Free space there, or set TMPDIR to a larger disk.",
        )
