"""The process of the node on one of the operator's own machines.

Run as `python -m raytide.autoscaler.providers.hosts.node FOLDER LOCK_FD`.

With `--dies-with-parent` it ends, and with it the node, as soon as the process that started it has ended.
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
    """Returns the reason of a raylet's end. A drained raylet ends by itself, without a signal and with exit code 0."""
    try:
        _, status = os.waitpid(raylet.pid, os.WNOHANG)
    except ChildProcessError:
        return RAYLET_ENDED  # the subprocess module collected it
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return RAYLET_ENDED
    return f"{RAYLET_ENDED} ({f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'})"


def start_meter(folder: NodeFolder, purchase: LocalMachine) -> str:
    """Starts the machine's exporter in a thread, so that the node goes on if a broken driver fails or hangs. Returns ""
    instead of an address: the exporter announces itself in Ray's GCS.
    """
    arguments = (purchase.node_id, purchase.address, purchase.gcs_address)
    threading.Thread(target=start_exporter, args=arguments, name="exporter", daemon=True).start()
    return ""


if __name__ == "__main__":
    path, lock, *options = sys.argv[1:]
    if options:
        die_with_parent(signal.SIGTERM)
    sys.exit(run_node(path, lock, object_store_bytes=None, start_meter=start_meter, how_it_ended=how_it_ended))
