"""Processes, identified by pid and start time, so that a reused pid is never mistaken for an earlier process. Linux
only.

Every process of a cluster has a mark in its environment (`NAME=value`), which its children inherit. `marked` finds such
processes even if no record lists them.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raytide.core.errors import ClusterError
from raytide.core.io.atomic_file import read_json, write_json

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_EPHEMERAL_PORTS = _PROC / "sys/net/ipv4/ip_local_port_range"
_FIRST_PORT = 20_000
"""Ray gives the ports below, from 10002 on, to its workers."""
_LEAST_PORTS = 1000
_MOST_TRIES = 100
_EXEC_S, _EXEC_LOOKS = 0.05, 5
"""The longest time in which an exec sets up a process's environment and arguments, and the looks at them meanwhile."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    start_time: int
    """The start in clock ticks after boot, from /proc/PID/stat."""
    what: str = ""

    @classmethod
    def of(cls, pid: int, what: str = "") -> Process | None:
        """Returns the process that has this pid now. Returns None if there is no such process, or only a zombie."""
        ticks = _start_time(pid)
        return None if ticks is None else cls(pid, ticks, what)

    @classmethod
    def read(cls, path: Path) -> Process | None:
        record = read_json(path)
        return None if record is None else cls(record["pid"], record["start_time"], record["what"])

    def write(self, path: Path) -> None:
        write_json(path, {"pid": self.pid, "start_time": self.start_time, "what": self.what})

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.start_time

    def open(self) -> int | None:
        """Returns a pidfd of the process. The pidfd becomes readable when the process ends. Returns None if the process
        has already ended. The caller closes the pidfd.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive:
            return fd
        os.close(fd)
        return None

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        fd = self.open()
        if fd is None:
            return
        try:
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            pass  # it ended between the two calls
        finally:
            os.close(fd)

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the process to end. Returns False if it still runs after the timeout. A timeout of None means no
        limit."""
        fd = self.open()
        if fd is None:
            return True
        try:
            return bool(select.select([fd], [], [], None if timeout_s is None else max(0.0, timeout_s))[0])
        finally:
            os.close(fd)


def terminate_all(processes: Iterable[Process], *, grace_s: float) -> None:
    """Sends SIGTERM to all these processes, and SIGKILL to those that still run after the grace period."""
    alive = [process for process in processes if process.alive]
    for process in alive:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    stubborn = [process for process in alive if not process.wait(deadline - time.monotonic())]
    for process in stubborn:
        process.send(signal.SIGKILL)
    for process in stubborn:
        process.wait(2.0)


def running(arguments: Sequence[str]) -> list[Process]:
    """Returns this user's processes whose command line ends with these arguments, oldest first."""
    wanted = b"".join(b"\0" + os.fsencode(argument) for argument in arguments) + b"\0"

    def is_it(entry: Path) -> bool:
        return entry.stat().st_uid == os.geteuid() and _content(entry / "cmdline").endswith(wanted)

    return sorted(_processes(is_it, arguments[0]), key=lambda process: process.start_time)


def marked(name: str, value: str) -> list[Process]:
    """Returns this user's processes whose environment contains `name=value`. The calling process is left out."""
    wanted = f"{name}={value}".encode()
    return _processes(lambda entry: wanted in _content(entry / "environ").split(b"\0"), name)


def _content(file: Path) -> bytes:
    """Returns the content of `environ` or `cmdline` in /proc/PID, which is empty for a moment after an exec. Raises
    OSError for a zombie and a kernel thread.
    """
    for _ in range(_EXEC_LOOKS):
        if content := file.read_bytes():
            return content
        file.with_name("exe").readlink()
        time.sleep(_EXEC_S / _EXEC_LOOKS)
    return file.read_bytes()


def _processes(is_wanted: Callable[[Path], bool], what: str) -> list[Process]:
    """Returns the other processes whose folder in /proc satisfies `is_wanted`."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended meanwhile, is a zombie, or another user's
                if is_wanted(entry) and (process := Process.of(int(entry.name), what)) is not None:
                    found.append(process)
    return found


def kill_marked(name: str, value: str, *, timeout_s: float = 10.0) -> int:
    """Sends SIGKILL to the processes that `marked` returns. Repeats this until `marked` returns no more processes.
    Returns the number of killed processes. Raises ClusterError if processes are left after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    killed: set[Process] = set()
    while left := marked(name, value):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise ClusterError(
                f"processes {pids} of {value} did not end.", hint="They are blocked in the kernel; try again later."
            )
        for process in left:
            process.send(signal.SIGKILL)
        for process in left:
            process.wait(0.5)
        killed.update(left)
    return len(killed)


def _start_time(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the command name may hold spaces and parentheses
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def free_port() -> int:
    """Returns a random port on which nothing on this host listens. The caller then starts a process that opens the
    port.

    If there is room, the port is outside the kernel's ephemeral range, so that no outgoing connection gets it
    meanwhile. Another process may still open it. If opening it fails with EADDRINUSE, the caller must try again.
    """
    first, last = map(int, _EPHEMERAL_PORTS.read_text().split())
    spans = (range(_FIRST_PORT, first), range(last + 1, 1 << 16))
    ports = next((span for span in spans if len(span) >= _LEAST_PORTS), range(1))  # 0: the kernel chooses
    for _ in range(_MOST_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", random.choice(ports)))  # nosec B311
            return int(probe.getsockname()[1])
    raise ClusterError("this host has no free port.", hint="End the processes that listen; `ss -tln` lists them.")


def die_with_parent(signum: signal.Signals) -> None:
    """Makes the kernel send this signal to the calling process as soon as the thread that started the process has
    ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
