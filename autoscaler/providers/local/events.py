"""Wakes a running provider when a node ends or gets a notice. A pidfd reports the end of a node, and a FIFO in the run
folder reports notices.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raytide.core.io.process import Process


def poke(run_dir: Path) -> None:
    """Wakes this cluster's watcher, if one runs."""
    try:
        fd = os.open(run_dir / "nodes" / "events", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # no watcher
    try:
        os.write(fd, b".")
    except (BlockingIOError, BrokenPipeError):
        pass  # the watcher has wake-ups pending, or has just ended
    finally:
        os.close(fd)


class Watcher:
    """A thread that calls a function whenever a watched node ends or gets a notice. It runs until it is closed."""

    def __init__(self, run_dir: Path, on_event: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._on_event = on_event
        self._closed = False
        path = run_dir / "nodes" / "events"
        if not path.exists():
            os.mkfifo(path, 0o600)
        self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer too: it never reads end-of-file
        self._stop = os.eventfd(0)  # not the FIFO, from which another process's watcher may read first
        self._epoll = select.epoll()
        self._epoll.register(self._fifo, select.EPOLLIN)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="local-node-watch", daemon=True)
        self._thread.start()

    def add(self, process: Process) -> None:
        """Watches a node's process. The end of the process is an event, even if it happened before this call."""
        fd = process.open()
        if fd is None:
            poke(self._run_dir)
        else:
            self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        while not self._closed:
            for fd, _ in self._epoll.poll():
                if fd == self._fifo:
                    with suppress(BlockingIOError):  # the watcher of a controller that is ending has read it
                        os.read(fd, 4096)
                elif fd != self._stop:
                    self._epoll.unregister(fd)
                    os.close(fd)
            if not self._closed:
                self._on_event()
        self._epoll.close()
        os.close(self._fifo)
