"""A named pipe in the run folder. It wakes an idle controller, which otherwise rests longer between ticks."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

REST_S = 2.0
"""The longest time between two ticks of an idle cluster."""
_NAME = "controller.wake"
_MOST_BYTES = 65_536


def wake_controller(run_dir: Path) -> None:
    """Ends the idle controller's wait for its next tick. If the controller does not wait now, its next wait of this
    kind ends at once.
    """
    with suppress(OSError):  # no controller runs, or it has wake-ups pending
        fd = os.open(run_dir / _NAME, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b".")
        finally:
            os.close(fd)


class WakePipe:
    """The controller's end of the pipe. On a file system without pipes, `rest` returns at once."""

    def __init__(self, run_dir: Path) -> None:
        self._fd = -1
        path = run_dir / _NAME
        with suppress(OSError):
            if not path.exists():
                os.mkfifo(path, 0o600)
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer too: it never reads end-of-file

    def rest(self, seconds: float) -> None:
        """Waits for `seconds`, or until something is written to the pipe. Returns at once if something was written
        since the last rest."""
        if self._fd < 0 or seconds <= 0:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(seconds * 1e3):
            with suppress(BlockingIOError):
                os.read(self._fd, _MOST_BYTES)

    def write(self) -> None:
        """Ends the controller's rest. Safe in any thread and in a signal handler."""
        if self._fd >= 0:
            with suppress(BlockingIOError):
                os.write(self._fd, b".")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
