"""The process of a node on one of the operator's own machines.

Run as `python -m raytide.autoscaler.providers.hosts.node FOLDER LOCK_FD`.

With `--dies-with-parent` the process ends its node, and itself, as soon as its parent process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from raytide.autoscaler.nodes.exporter.server import start_exporter
from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.autoscaler.providers.local.node import RAYLET_ENDED, run_node
from raytide.core.io.process import Process, die_with_parent


def how_it_ended(raylet: Process) -> str:
    """Returns why a raylet ended. A drained raylet ends by itself, without a signal and with exit code 0."""
    try:
        _, status = os.waitpid(raylet.pid, os.WNOHANG)
    except ChildProcessError:
        return RAYLET_ENDED  # the subprocess module collected it
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return RAYLET_ENDED
    return f"{RAYLET_ENDED} ({f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'})"


def start_meter(folder: NodeFolder, purchase: LocalMachine) -> str:
    """Starts the machine's metrics exporter in a thread. If a broken driver fails or hangs, the node still runs.

    Returns an empty string instead of an address, because the exporter registers itself in Ray's GCS.
    """
    arguments = (purchase.node_id, purchase.address, purchase.gcs_address)
    threading.Thread(target=start_exporter, args=arguments, name="exporter", daemon=True).start()
    return ""


if __name__ == "__main__":
    path, lock, *options = sys.argv[1:]
    if options:
        die_with_parent(signal.SIGTERM)
    sys.exit(run_node(path, lock, object_store_bytes=None, start_meter=start_meter, how_it_ended=how_it_ended))
