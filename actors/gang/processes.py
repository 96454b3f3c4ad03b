"""The processes of a script on one member of a gang: started, listened to, and ended. In an actor of that member.

Each runs under a warden, so that it ends with this process, however this one ends.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.gang import warden
from raytide.core.package import unpack

_WARDEN = str(Path(warden.__file__).resolve())
MOST_LINES = 2000
"""That wait to be fetched: a script that prints faster than its driver reads waits for it."""
TAIL_LINES = 10


@dataclass(frozen=True, slots=True)
class Launch:
    """One process: what to run, with what besides the environment of its node."""

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exit:
    rank: int
    code: int
    """As of a shell: 128 and its number for a signal."""
    tail: str
    """The last lines that it printed."""
    at_s: float
    """By the clock of its node."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last one."""

    lines: tuple[tuple[int, str], ...]
    """With the rank that printed each."""
    exits: tuple[Exit, ...]


class MemberProcesses:
    """Each method but `report` and `stop` answers at once."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="raytide-run-"))
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._said: queue.Queue[tuple[int, str] | Exit] = queue.Queue(MOST_LINES)

    def free_port(self, address: str) -> int:
        """Of this host; rank 0 opens it a moment later."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def start(self, package: bytes | None, launches: Sequence[Launch]) -> None:
        """They share the member's folder, and the environment of this process."""
        if package is not None:
            unpack(package, self._folder)
        for launch in launches:
            process = subprocess.Popen(
                [sys.executable, _WARDEN, str(self._folder), *_resolved(launch.command)],
                env={**os.environ, **launch.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._running[launch.rank] = process
            threading.Thread(target=self._listen, args=(launch.rank, process), daemon=True).start()

    def report(self, timeout_s: float) -> Report:
        """What was printed and who ended; waits so long for the first of it."""
        lines: list[tuple[int, str]] = []
        exits: list[Exit] = []
        found = self._take(timeout_s)
        while found is not None:
            if isinstance(found, Exit):
                exits.append(found)
            else:
                lines.append(found)
            found = self._take(0.0) if len(lines) < MOST_LINES else None
        return Report(tuple(lines), tuple(exits))

    def _take(self, timeout_s: float) -> tuple[int, str] | Exit | None:
        try:
            return self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def ping(self) -> None:
        """Answers, if this process and its node are there."""

    def stop(self, grace_s: float) -> None:
        """SIGTERM to all, SIGKILL to those that are there after the grace."""
        deadline = time.monotonic() + grace_s
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                assert process.stdin is not None
                process.stdin.close()  # the warden kills
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        for line in process.stdout:
            tail.append(line.rstrip("\n"))
            self._said.put((rank, tail[-1]))
        self._said.put(Exit(rank, process.wait(), "\n".join(tail), time.time()))


def _resolved(command: tuple[str, ...]) -> tuple[str, ...]:
    first = sys.executable if command[0] in ("python", "python3") else command[0]
    return first, *command[1:]
