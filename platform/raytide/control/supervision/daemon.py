"""Starts the long-lived processes of a cluster. Each of these processes holds a lock, so that it runs only once."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from raytide.core.errors import ConflictError
from raytide.core.io.process import Process, terminate_all
from raytide.core.io.storage import full_disk_is_an_error

_UNRECORDED_GRACE_S = 5.0


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on this machine until the block ends. The lock is also released if the process ends.
    Raises ConflictError if another process holds the lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(f"another process holds {path}.", hint="Wait until it has ended.") from None
        yield


def spawn(
    what: str,
    argv: Sequence[str],
    *,
    run_dir: Path,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Process:
    """Starts a process in its own session. Its output goes to `logs/<what>.log`, and its pid is recorded in
    `pids/<what>.json`.

    If the pid cannot be recorded, ends the process and raises StorageError.
    """
    process = start(what, argv, run_dir=run_dir, environment=environment, pass_fds=pass_fds)
    try:
        with full_disk_is_an_error(str(record_of(run_dir, what))):
            process.write(record_of(run_dir, what))
    except BaseException:
        terminate_all([process], grace_s=_UNRECORDED_GRACE_S)
        raise
    return process


def start(
    what: str,
    argv: Sequence[str],
    *,
    run_dir: Path,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Process:
    """Starts a process and returns it without recording its pid. Supervisors use this, because they record their
    children later."""
    log = _open_log(run_dir / "logs" / f"{what}.log")
    try:
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            cwd=run_dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    finally:
        os.close(log)
    threading.Thread(target=child.wait, name=f"reap-{what}", daemon=True).start()
    return Process.of(child.pid, what) or Process(child.pid, 0, what)


def record_of(run_dir: Path, what: str) -> Path:
    return run_dir / "pids" / f"{what}.json"


def _open_log(path: Path) -> int:
    """Opens a log for appending, so that it can be truncated while the process runs. Returns the descriptor: of
    /dev/null if the disk is full."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return os.open(os.devnull, os.O_WRONLY)
