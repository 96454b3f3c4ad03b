"""Limits the size of the logs of a cluster's processes and of jobs' drivers.

These logs are opened for appending. If a log is truncated, its writer thus continues at the new end.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from raytide.core.logs import logger

log = logger(__name__)

MOST_BYTES, KEPT_FILES = 16 << 20, 3
"""The size at which a log is moved to `.1`, `.1` to `.2` and so on: at most 64 MiB for each process."""

DRIVER_MOST_BYTES, DRIVER_KEPT_BYTES = 64 << 20, 32 << 20
"""A driver's log that exceeds the first size is cut to its last lines, of the second size."""
DRIVERS_BYTES = 2 << 30
"""The total of all drivers' logs in one folder; the oldest logs of ended drivers are deleted first."""
_LEAST_BYTES = 64 << 10
_EVERY_S = 1.0
_LAST_CUT_S = 10.0
"""The most seconds for which an ending driver waits for the last cut."""
_COPY_BYTES = 1 << 20
_IN_FLIGHT_S, _LOOKS = 0.5, 25
"""The seconds that a write to the old file may last after the new one replaced it, and the number of times that it is
looked for. On a busy machine the writer's thread may wait for a CPU in the middle of its write."""
_DRIVER_LOGS = "job-driver-raytide-*.log"

_HEADER = "raytide dropped the first {:020d} bytes of this log, which were the oldest.\n"
HEADER_BYTES = len(_HEADER.format(0))
_DROPPED = re.compile(rb"raytide dropped the first (\d{20}) bytes of this log, which were the oldest\.\n")


def rotate(paths: Iterable[Path], *, most: int = MOST_BYTES) -> None:
    """Rotates each log that is larger than `most` bytes: moves the log's content to a numbered file. If the disk is
    full, drops the content instead.
    """
    for path in paths:
        try:
            if path.stat().st_size > most:
                _rotate(path)
        except OSError as error:
            log.warning("cannot rotate a log", extra={"path": str(path), "error": str(error)})


def _rotate(path: Path) -> None:
    numbered = [path.with_name(f"{path.name}.{number}") for number in range(1, KEPT_FILES + 1)]
    for younger, older in zip(numbered[-2::-1], numbered[:0:-1], strict=True):
        with suppress(FileNotFoundError):
            younger.replace(older)
    try:
        with path.open("rb") as source, numbered[0].open("wb") as target:
            while block := source.read(_COPY_BYTES):
                target.write(block)
    except OSError as error:
        numbered[0].unlink(missing_ok=True)
        log.warning("a log was dropped", extra={"path": str(path), "error": str(error)})
    os.truncate(path, 0)  # loses what was written since the last read: a few lines at most


def bound_driver_log(fd: int = 1) -> None:
    """Limits the size of this process's log while the process runs, and once more when it ends. The process is the
    driver of a job. Also deletes the oldest logs of ended drivers.

    Does nothing unless the process's output is a file opened for appending.
    """
    if not _is_appended(fd):
        return
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)  # marks this log as in use
        forget_oldest(Path(os.readlink(f"/proc/self/fd/{fd}")).parent)
    ended = threading.Event()
    thread = threading.Thread(target=_bound, args=(fd, ended), name="log-limit", daemon=True)
    thread.start()
    atexit.register(_bound_at_exit, thread, ended)


def _bound(fd: int, ended: threading.Event) -> None:
    """Cuts the log every second until the process ends, and then once more."""
    is_last = False
    while not is_last:
        is_last = ended.wait(_EVERY_S)
        with suppress(OSError):  # a full disk: retried later
            cut(fd)


def _bound_at_exit(thread: threading.Thread, ended: threading.Event) -> None:
    """Lets the thread make its last cut and waits for it, because an interrupted cut loses lines."""
    sys.stdout.flush()
    ended.set()
    thread.join(_LAST_CUT_S)


def cut(fd: int, *, most: int = DRIVER_MOST_BYTES, kept: int = DRIVER_KEPT_BYTES) -> bool:
    """Cuts a log of more than `most` bytes down to its last lines, at most `kept` bytes. Returns whether the log was
    cut.

    A header with the number of dropped bytes keeps positions in the log valid. The cut log is a new file, which also
    becomes this process's output. So no line that is written meanwhile is lost.
    """
    if os.fstat(fd).st_size <= most:
        return False
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    with open(f"/proc/self/fd/{fd}", "rb") as old:
        for tail_bytes in (kept, _LEAST_BYTES):
            try:
                _replace(fd, path, old, tail_bytes)
                return True
            except OSError as error:
                why = error
        os.ftruncate(fd, 0)  # disk space matters more than the log
        raise why


def _replace(fd: int, path: Path, old: BinaryIO, tail_bytes: int) -> None:
    size = os.fstat(fd).st_size
    old.seek(0)
    before = dropped_before(old.read(HEADER_BYTES))
    old.seek(max(0, size - tail_bytes))
    tail = old.read(size - old.tell())
    tail = tail[tail.find(b"\n") + 1 :]
    written = size if before is None else before + size - HEADER_BYTES
    staged = path.with_name(f".{path.name}.part")
    new = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, os.fstat(fd).st_mode & 0o777)
    try:
        _write(new, _HEADER.format(written - len(tail)).encode() + tail)
        fcntl.flock(new, fcntl.LOCK_SH)
        os.replace(staged, path)
        for each in _same_file(fd):
            os.dup2(new, each)
        _write(new, old.read())
        for _ in range(_LOOKS):
            time.sleep(_IN_FLIGHT_S / _LOOKS)
            _write(new, old.read())
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    finally:
        os.close(new)


def _same_file(fd: int) -> set[int]:
    """Returns this descriptor, and those of stdout and stderr if they write to the same open file."""
    return {fd, *(each for each in (1, 2) if os.path.sameopenfile(each, fd))}


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def dropped_before(head: bytes) -> int | None:
    """Reads the number of dropped bytes from the header of a driver's log. Returns None if no bytes were dropped."""
    found = _DROPPED.match(head)
    return None if found is None else int(found[1])


def forget_oldest(folder: Path, most: int = DRIVERS_BYTES) -> None:
    """Deletes the oldest logs of ended drivers until the total is at most `most` bytes."""
    logs = [(entry.stat(), entry) for entry in folder.glob(_DRIVER_LOGS)]
    total = sum(found.st_size for found, _ in logs)
    for found, path in sorted(logs, key=lambda each: each[0].st_mtime):
        if total <= most:
            return
        if not _is_in_use(path):
            path.unlink(missing_ok=True)
            total -= found.st_size


def _is_in_use(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_appended(fd: int) -> bool:
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return is_file and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)
    except OSError:
        return False
