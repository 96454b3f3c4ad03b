"""The processes of a script on one member of a gang. An actor on the member starts them, reads their output and ends
them.

Each process runs under a shim, which ends the process when the actor's process ends for any reason.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import os
import pwd
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from raytide.actors.gang import images, process_shim
from raytide.core.errors import ConfigError
from raytide.core.io.environment import MARKS, WITH_COMMANDS, passed
from raytide.core.io.private_folder import take
from raytide.core.io.process import free_port
from raytide.core.io.working_dir import unpack

_SHIM = str(Path(process_shim.__file__).resolve())
MOST_LINES = 2000
"""The most lines of output that are queued. A script that prints faster than its driver reads is blocked once the queue
is full.
"""
LINE_CHARS = 8192
"""The most characters of a line; longer lines are split."""
TAIL_LINES = 10
TAIL_CHARS = 3000
"""The most characters of the last lines: more would not fit into a job's reason, which is cut at its end."""
_ALL = 2**20
"""A number of bytes that no pipe's buffer exceeds."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of a script's processes that do not come from the script's spec: the user, the node's variables, and
    access to the API.
    """

    user: str = ""
    """The operating system user that the processes run as; raytide's own if it is empty."""
    named: tuple[str, ...] = ()
    """The variables of the node that the operator passes on to the processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The API's address and the token of the processes' job."""


NO_RIGHTS = Rights()


@dataclass(frozen=True, slots=True)
class ProcessLaunch:
    """A process to start: its rank, its command and its environment variables. The process also gets the variables that
    every command on the node gets.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    rights: Rights = NO_RIGHTS


@dataclass(frozen=True, slots=True)
class ProcessExit:
    rank: int
    code: int
    """The exit code as in a shell: 128 plus the signal's number for a signal."""
    tail: str
    """The last lines of the process's output."""
    at_s: float
    """The time of the exit, on the clock of the process's node."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The output and the exits of a member's processes since the last report."""

    lines: tuple[tuple[int, str], ...]
    """Pairs of the rank that printed a line, and the line."""
    exits: tuple[ProcessExit, ...]


class MemberProcesses:
    """Runs a script's processes on one member. Reports the output of the processes, and the processes that have exited.

    All methods return at once, except `report` and `stop`.
    """

    def __init__(self) -> None:
        self._folder, self._held = _new_folder()
        threading.Thread(target=_remove_left, name="left folders", daemon=True).start()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._events: queue.Queue[tuple[int, str] | ProcessExit] = queue.Queue(MOST_LINES)

    def free_port(self) -> int:
        """Returns a port of this host that is free now. The process of rank 0 opens it a moment later."""
        return free_port()

    def start(self, package: bytes | None, launches: Sequence[ProcessLaunch]) -> None:
        """Unpacks the working directory into the member's folder and starts the processes there. The user that the
        processes run as becomes the folder's owner.
        """
        if package is not None:
            unpack(package, self._folder)
        for user in {launch.rights.user for launch in launches} - {""}:
            _chown(self._folder, account_of(user))
        for launch in launches:
            with launch_order(_environment(launch, self._folder), launch.rights.user) as fd:
                process = subprocess.Popen(
                    [sys.executable, "-I", _SHIM, str(self._folder), str(fd), *_resolved(launch.command)],
                    env=passed(os.environ, WITH_COMMANDS),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=(fd, self._held),
                )
            self._running[launch.rank] = process
            listener = (launch.rank, process, os.pidfd_open(process.pid))
            threading.Thread(target=self._listen, args=listener, daemon=True).start()

    def report(self, timeout_s: float) -> ProcessReport:
        """Returns the new lines of output and the processes that have exited since the last report. If there is nothing
        to report, waits up to `timeout_s` seconds for the first line or exit.
        """
        lines: list[tuple[int, str]] = []
        exits: list[ProcessExit] = []
        found = self._next_event(timeout_s)
        while found is not None:
            if isinstance(found, ProcessExit):
                exits.append(found)
            else:
                lines.append(found)
            found = self._next_event(0.0) if len(lines) < MOST_LINES else None
        return ProcessReport(tuple(lines), tuple(exits))

    def _next_event(self, timeout_s: float) -> tuple[int, str] | ProcessExit | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def ping(self) -> None:
        """Does nothing. A reply shows that this process and its node are alive."""

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM to all processes, and SIGKILL to those that still run after `grace_s` seconds. Then removes the
        folder.
        """
        deadline = time.monotonic() + grace_s
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                assert process.stdin is not None
                process.stdin.close()  # the shim kills
                process.wait()
        process_shim.remove(str(self._folder))

    def _listen(self, rank: int, process: subprocess.Popen[bytes], ended: int) -> None:
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        for line in _lines(process, ended):
            tail.append(line)
            self._events.put((rank, line))
        code = process.wait()
        os.close(ended)
        assert process.stdin is not None
        process.stdin.close()
        self._events.put(ProcessExit(rank, code, "\n".join(tail)[-TAIL_CHARS:], time.time()))


def _prefix() -> str:
    return f"raytide-run-{os.geteuid()}-"


def _new_folder() -> tuple[Path, int]:
    """Makes a folder, and returns it with the descriptor of a lock on it. The lock is held by this process and by the
    shims, which inherit it. The folder gets its final name last, so no folder with such a name ever lacks its lock.
    """
    made = Path(tempfile.mkdtemp(prefix="raytide-run-"))
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # folders that cannot be locked, as on NFS, are kept by `_remove_left`
        take(held, fcntl.LOCK_EX)
    return made.rename(made.with_name(_prefix() + made.name.removeprefix("raytide-run-"))), held


def _remove_left() -> None:
    """Removes folders that no process locks: their actors and shims were killed together, as by `raytide down`."""
    for left in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with suppress(OSError):  # another process removes it, or it is no folder
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if take(handle, fcntl.LOCK_EX):
                process_shim.remove(str(left))
            os.close(handle)


@contextmanager
def launch_order(environment: Mapping[str, str], user: str = "") -> Iterator[int]:
    """Yields a file descriptor from which a shim reads the command's environment and user.

    The shim's own environment must not contain the command's variables. The shim may be root, and variables that a job
    sets (LD_PRELOAD, PYTHONPATH) would affect the shim.
    """
    fd = os.memfd_create("order")
    try:
        with os.fdopen(os.dup(fd), "w") as file:
            json.dump({"environment": dict(environment), "user": user}, file)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _environment(launch: ProcessLaunch, folder: Path) -> dict[str, str]:
    """Returns a command's environment. A job cannot change the marks by which raytide finds its processes. In a
    container, the environment includes the image's own variables.
    """
    rights, own = launch.rights, {}
    if rights.user:
        account = account_of(rights.user)
        home = account.pw_dir if os.path.isdir(account.pw_dir) else str(folder)
        own = {"HOME": home, "USER": rights.user, "LOGNAME": rights.user, "SHELL": account.pw_shell}
    inherited = passed(os.environ, WITH_COMMANDS, rights.named)
    if image := os.environ.get(images.VARIABLE):
        of_image = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYTIDE_"))}
        inherited |= {**of_image, images.VARIABLE: image}
    marks = passed(os.environ, MARKS)
    return {**inherited, **own, **rights.environment, **launch.environment, **marks}


def account_of(user: str) -> pwd.struct_passwd:
    """Returns the account of a `run_as` user. Raises ConfigError if commands cannot run as that user on this node."""
    hint = "Correct metadata.raytide.run_as of cluster.yaml, which the operator set."
    if os.geteuid() != 0:
        raise ConfigError(f"run_as {user} needs raytide to run as root on this node, and it does not.", hint=hint)
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"run_as {user}: there is no such user on this node.", hint=hint) from None
    if account.pw_uid == 0:
        raise ConfigError(f"run_as {user} is root, which can read everything.", hint=hint)
    return account


def _chown(folder: Path, account: pwd.struct_passwd) -> None:
    """Gives a folder to a user, its content first, so that until the end only this process can enter the folder."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), account.pw_uid, account.pw_gid)
    os.chown(folder, account.pw_uid, account.pw_gid)


def _lines(process: subprocess.Popen[bytes], ended: int) -> Iterator[str]:
    """Yields the lines printed until the process ends (`ended` is its pidfd). The end of the pipe may never come: a
    process that left its shim, as under sudo, can hold the pipe open.
    """
    assert process.stdout is not None
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    poll, rest, is_over = select.poll(), "", False
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        poll.register(pipe, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while not is_over:
            has_ended = ended in (number for number, _ in poll.poll())
            printed = pipe.read(_ALL)  # None when there is nothing, nothing when all have closed it
            is_over = has_ended or printed == b""
            *lines, rest = (rest + decoder.decode(printed or b"", final=is_over)).split("\n")
            if rest and (is_over or len(rest) > LINE_CHARS):
                lines, rest = [*lines, rest], ""
            for line in lines:
                yield from (line[at : at + LINE_CHARS] for at in range(0, len(line) or 1, LINE_CHARS))


def _resolved(command: tuple[str, ...]) -> tuple[str, ...]:
    first = sys.executable if command[0] in ("python", "python3") else command[0]
    return first, *command[1:]
