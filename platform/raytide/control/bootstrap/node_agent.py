"""Starts raytide's own process on each cloud node: the watcher of the cloud's notices."""

from __future__ import annotations

import os
import sys

from raytide.autoscaler.providers.notices.watch import CLOUDS, board_at
from raytide.control.supervision.daemon import spawn
from raytide.core.config import home
from raytide.core.errors import ClusterError, UsageError
from raytide.core.io.process import Process
from raytide.core.ray_internals import gcs_address_here

_WHAT = "notices"


def watch_notices(cloud: str) -> Process:
    """Starts this node's watcher, which outlives the caller, or returns the running one.

    It first queries the cloud and the GCS once, and only prints a failure: the node has joined Ray, and the watcher
    retries.
    """
    if cloud not in CLOUDS:
        raise UsageError(f"cloud {cloud!r} is not supported.", hint=f"Supported clouds: {', '.join(CLOUDS)}.")
    node_id, gcs_address = os.environ.get("RAY_CLOUD_INSTANCE_ID", ""), gcs_address_here()
    if not node_id or not gcs_address:
        raise UsageError(
            "this machine is not a node of a raytide cluster.",
            hint="raytide runs this command itself, after `worker_start_ray_commands`, with RAY_CLOUD_INSTANCE_ID set.",
        )
    folder = home().resolve() / "nodes" / node_id
    running = Process.read(folder / "pids" / f"{_WHAT}.json")
    if running is not None and running.alive:
        return running
    try:
        CLOUDS[cloud]().pending_notice(0.0)
        board_at(gcs_address).notices()
    except ClusterError as error:
        sys.stderr.write(f"notices of {cloud} do not reach raytide yet: {error}\n")
    for name in ("logs", "pids"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "raytide.autoscaler.providers.notices.watch", cloud, node_id, gcs_address]
    return spawn(_WHAT, argv, run_dir=folder, environment=os.environ)
