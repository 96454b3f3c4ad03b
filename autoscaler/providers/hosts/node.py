"""The process of one own machine's node: `python -m raytide.autoscaler.providers.hosts.node FOLDER LOCK_FD`."""

from __future__ import annotations

import os
import signal
import sys

from raytide.autoscaler.providers.local.node import RAYLET_ENDED, run_node
from raytide.core.io.process import Process


def how_it_ended(raylet: Process) -> str:
    """Returns the reason of a raylet's end. A drained raylet ends by itself, without a signal or an exit code."""
    try:
        _, status = os.waitpid(raylet.pid, os.WNOHANG)
    except ChildProcessError:
        return RAYLET_ENDED  # the subprocess module collected it
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return RAYLET_ENDED
    return f"{RAYLET_ENDED} ({f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'})"


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1], sys.argv[2], object_store_bytes=None, how_it_ended=how_it_ended))
