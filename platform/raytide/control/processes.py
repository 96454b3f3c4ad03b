"""Starting the long-lived processes of a cluster, and locks that make sure each runs once."""

from __future__ import annotations

import fcntl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from raytide.core.errors import ConflictError
from raytide.core.processes import Process


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Be the only holder on this machine until the block or the process ends. ConflictError when another holds it."""
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
    """Start a process in a session of its own, log to `logs/<what>.log` and record it in `pids/<what>.json`."""
    with (run_dir / "logs" / f"{what}.log").open("ab") as log:
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
    process = Process.of(child.pid, what) or Process(child.pid, 0, what)
    process.write(run_dir / "pids" / f"{what}.json")
    threading.Thread(target=child.wait, name=f"reap-{what}", daemon=True).start()
    return process
