"""Runs one command, and ends all of its processes when the shim's owner ends: `python -I process_shim.py FOLDER ORDER
COMMAND...`.

ORDER is a file descriptor with a JSON object of two fields, `environment` and `user`. The command gets this
environment, but the shim does not. If there is a user, the shim runs as root, and the command runs as that user and
cannot change to another user.

The owner is the process that holds the other end of the shim's stdin. Stdin closes when the owner closes it or dies.
The command's processes then get SIGTERM, and a few seconds later SIGKILL. FOLDER, their working directory, is
removed. A SIGTERM to the shim is passed on to the command's process group. The shim then waits for the whole group: a
shell ends at once, while what it started still saves its state. If stdin closes after such a SIGTERM, SIGKILL follows
at once. The shim exits as the command did: with its exit code, or with 128 plus the signal's number.

The shim imports nothing of raytide, since it is run as a file and must start quickly. It consists of two processes.
The owner starts the first process, and Ray kills the first process together with the owner. The second process is
the guard. It is a child of the first process, in a new session, and starts the command. If one of the two processes
is killed, the other ends the command's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ORPHAN_GRACE_S = 5.0
"""The seconds from SIGTERM to SIGKILL once the owner has ended: its resources may be leased again soon."""
REMOVAL_S = 300.0
_LOOK_S = 0.1
NOT_STARTED = 127
OOM_SCORE = 1000
"""The `oom_score_adj` of the command: when memory runs out, the kernel ends it before raytide's and Ray's processes."""
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38


def main(folder: str, order: str, command: list[str]) -> int:
    with os.fdopen(int(order)) as file:
        ordered = json.load(file)
    _adopt()
    parent, held = os.pipe()  # closes when this process ends
    guard = os.fork()
    if guard == 0:
        os.close(held)
        os.setsid()
        _adopt()
        return _guard(folder, command, parent, ordered)
    signal.signal(signal.SIGTERM, lambda *_: _kill(guard, signal.SIGTERM))
    code = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    _end_children()
    return _as_shell(code)


def _guard(folder: str, command: list[str], parent: int, ordered: dict[str, Any]) -> int:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in all of its processes
    with contextlib.suppress(OSError):  # a system without this file, or which does not let it be written
        Path("/proc/self/oom_score_adj").write_text(f"{OOM_SCORE}\n")
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=ordered["environment"],
            start_new_session=True,
            **_as_user(ordered["user"]),
        )
    except (OSError, ValueError, KeyError) as error:  # a ValueError is a null byte
        as_user = f" as {ordered['user']}" if ordered["user"] else ""
        sys.stderr.write(f"cannot start {command[0]}{as_user}: {getattr(error, 'strerror', None) or error}\n")
        return NOT_STARTED
    ended, is_asked, is_orphan = os.pidfd_open(child.pid), False, False
    while not is_orphan:
        ready, _, _ = select.select([0, parent, ended, wake_read], [], [])
        if ended in ready:
            break
        if wake_read in ready:
            if signal.SIGTERM in os.read(wake_read, 100):
                _kill(-child.pid, signal.SIGTERM)
                is_asked = True
            _reap(child.pid)
        elif parent in ready or not os.read(0, 100):
            is_orphan = True
    if is_asked and not is_orphan:
        is_orphan = _wait_for_group(child.pid, (0, parent))
    elif is_orphan and not is_asked:
        _kill(-child.pid, signal.SIGTERM)
        _wait_for_group(child.pid, (), ORPHAN_GRACE_S)
    _kill(-child.pid, signal.SIGKILL)
    code = child.wait()
    _end_children()  # what the command started and left behind
    if is_orphan:
        remove(folder)
    return _as_shell(code)


def remove(folder: str) -> None:
    """Removes a folder of any depth. It uses `rm`, because shutil.rmtree recurses once for each level."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["/bin/rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, timeout=REMOVAL_S, check=False)


def _as_user(user: str) -> dict[str, Any]:
    """Returns Popen's arguments for a command that runs as this user, with the user's groups. Also forbids this process
    and its children to gain rights, by setuid programs for example.
    """
    if not user:
        return {}
    account = pwd.getpwnam(user)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel does not let it give up rights")
    groups = os.getgrouplist(user, account.pw_gid)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}


def _adopt() -> None:
    """Makes this process the subreaper: orphaned descendants become its children, whatever their session."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(but: int) -> None:
    """Reaps adopted children that have ended, except `but`."""
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != but:
        os.waitpid(found.si_pid, 0)


def _end_children() -> None:
    """Kills all children until none remains: orphans of a killed child become children. A child that may not be killed,
    as under sudo, remains.
    """
    while killed := [pid for pid in _children() if _kill(pid, signal.SIGKILL)]:
        for pid in killed:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    return [pid for pid, _, parent, _ in _processes() if parent == os.getpid()]


def _wait_for_group(group: int, signs: Sequence[int], timeout_s: float = math.inf) -> bool:
    """Waits until no process of the group runs, for at most `timeout_s` seconds. Returns True at once if one of the
    file descriptors `signs` becomes readable.
    """
    deadline = time.monotonic() + timeout_s
    while any(each == group and state not in "ZX" for _, state, _, each in _processes()):
        if select.select(signs, [], [], _LOOK_S)[0]:
            return True
        if time.monotonic() > deadline:
            break
    return False


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """Yields the pid, the state, the parent and the group of each process."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        state, parent, group = stat.rpartition(")")[2].split()[:3]
        yield int(pid), state, int(parent), int(group)


def _kill(pid: int, signum: signal.Signals) -> bool:
    """Sends a signal; a negative pid is a process group. Returns whether a process got it."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _as_shell(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
