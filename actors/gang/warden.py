"""Runs one command, and sees to it that nothing of it outlives its owner: `python warden.py FOLDER COMMAND...`.

The owner holds the other end of stdin. When that closes, because the owner let go or is dead, the command's processes
get SIGTERM, and SIGKILL a few seconds later, and FOLDER, in which they ran, is removed; SIGTERM to the warden is passed
on to them. It ends as the command did: with its exit code, or with 128 and the signal's number. It imports nothing of
raytide: it starts quickly, and is run as a file.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

ORPHAN_GRACE_S = 5.0
"""The owner is gone, and what it had leased may be somebody else's soon."""
NOT_STARTED = 127


def main(folder: str, command: list[str]) -> int:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return NOT_STARTED
    ended, is_asked, is_orphan = os.pidfd_open(child.pid), False, False
    while not is_orphan:
        ready, _, _ = select.select([0, ended, wake_read], [], [])
        if ended in ready:
            break
        if wake_read in ready:
            os.read(wake_read, 100)
            _signal(child.pid, signal.SIGTERM)
            is_asked = True
        elif not os.read(0, 100):
            is_orphan = True
    if is_orphan and not is_asked:
        _signal(child.pid, signal.SIGTERM)
        select.select([ended], [], [], ORPHAN_GRACE_S)
    _signal(child.pid, signal.SIGKILL)  # also what the command started and left behind
    code = child.wait()
    if is_orphan:
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _signal(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return  # all of it has ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
