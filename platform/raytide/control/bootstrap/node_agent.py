"""Starts raytide's own processes on each cloud node: the watcher of the cloud's notices, and the metrics exporter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from raytide.autoscaler.providers.notices.watch import CLOUDS, board_at
from raytide.control.supervision.daemon import spawn
from raytide.core.config import home
from raytide.core.errors import ClusterError, UsageError
from raytide.core.io.process import Process
from raytide.core.ray_internals import gcs_address_here


class _Here(NamedTuple):
    node_id: str
    gcs_address: str


def watch_notices(cloud: str) -> Process:
    """Starts this node's watcher of the cloud's notices, or returns the running watcher. The watcher outlives the
    caller.

    A new watcher's connections to the cloud and the GCS are tested first. A failed test only prints a message,
    because the node has already joined Ray and the watcher retries.
    """
    if cloud not in CLOUDS:
        raise UsageError(f"cloud {cloud!r} is not supported.", hint=f"Supported clouds: {', '.join(CLOUDS)}.")
    here = _here()

    def check() -> None:
        try:
            CLOUDS[cloud]().pending_notice(0.0)
            board_at(here.gcs_address).notices()
        except ClusterError as error:
            sys.stderr.write(f"notices of {cloud} do not reach raytide yet: {error}\n")

    return _start("notices", ["raytide.autoscaler.providers.notices.watch", cloud, *here], here, check)


def export_metrics() -> Process:
    """Starts this node's metrics exporter, or returns the running exporter. The exporter outlives the caller. On a
    machine without anything to measure, the exporter ends at once.
    """
    here = _here()
    return _start("exporter", ["raytide.autoscaler.nodes.exporter.server", *here], here, lambda: None)


def _here() -> _Here:
    here = _Here(os.environ.get("RAY_CLOUD_INSTANCE_ID", ""), gcs_address_here())
    if not all(here):
        raise UsageError(
            "this machine is not a node of a raytide cluster.",
            hint="raytide runs this command itself, after `worker_start_ray_commands`, with RAY_CLOUD_INSTANCE_ID set.",
        )
    return here


def _start(what: str, module: list[str], here: _Here, check: Callable[[], None]) -> Process:
    """Starts the module as a process of this node, after calling `check`, and returns it. If it runs already, only
    returns it.
    """
    folder = home().resolve() / "nodes" / here.node_id
    running = Process.read(folder / "pids" / f"{what}.json")
    if running is not None and running.alive:
        return running
    check()
    for name in ("logs", "pids"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return spawn(what, [sys.executable, "-m", *module], run_dir=folder, environment=os.environ)
