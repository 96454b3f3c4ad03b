"""Ends a cluster when the process that owns it is gone. The arguments are the cluster's run folder and id.

In an owned cluster, `up` starts this process before any other process. If this process ends, the supervisor starts it
again. The process imports Ray only to end a cluster.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from raytide.control.bootstrap.cluster_record import MARK
from raytide.control.supervision.supervisor import owner_of
from raytide.core.errors import ConflictError
from raytide.core.io.process import kill_marked
from raytide.core.logs import log_to, logger

log = logger(__name__)

_LOCKED_S, _POLL_S = 60.0, 0.2
"""The longest wait for another `up` or `down` of the cluster, and the time between attempts."""


def watch(run_dir: Path, cluster_id: str) -> None:
    """Waits until the owner of the cluster with this id is gone, ends the cluster and returns."""
    owned = owner_of(run_dir, cluster_id)
    if owned is None:
        return
    owned.owner.wait(None)
    log.warning("the owner is gone; the cluster is ended", extra={"owner": owned.owner.pid, "cluster": cluster_id})
    deadline_s = time.monotonic() + _LOCKED_S
    try:
        while owner_of(run_dir, cluster_id) is not None and time.monotonic() < deadline_s:
            if _down(owned.name):
                break
            time.sleep(_POLL_S)
    finally:
        kill_marked(MARK, cluster_id)


def _down(name: str) -> bool:
    """Ends the cluster; returns False while another `up` or `down` of it runs."""
    from raytide.control.bootstrap.local import down

    try:
        down(name)
    except ConflictError:
        return False
    return True


def main(run_dir: str, cluster_id: str) -> None:
    log_to()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(Path(run_dir), cluster_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
