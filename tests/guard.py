"""Ends what a test session started once the session itself is gone, however that ended: `guard.py PID NAME VALUE`.

It runs in a session of its own and without the mark NAME=VALUE, by which it finds the session's processes.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress

from raytide.core.io.process import kill_marked, marked

BY_THEMSELVES_S = 30.0
"""Clusters end with their owner, in order: they are given the time."""


def main(pid: str, name: str, value: str) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(pid))], [], [])
    deadline_s = time.monotonic() + BY_THEMSELVES_S
    while marked(name, value) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    kill_marked(name, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
