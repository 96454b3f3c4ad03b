"""Ends a cluster when the process that owns it is gone, however that ended: run with its run folder and its id.

`up` starts this watcher before anything else of an owned cluster; the supervisor starts it again when it was killed.
Until it has something to end it loads nothing of Ray.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytide.control.bootstrap.cluster_record import MARK
from raytide.control.supervision.daemon import spawn
from raytide.core.errors import ConflictError
from raytide.core.io.atomic_file import read_json
from raytide.core.io.process import Process, kill_marked, running
from raytide.core.logs import log_to, logger

__all__ = ["ensure_watched", "watch"]

log = logger(__name__)

_WHAT = "owner"
_LOCKED_S, _POLL_S = 60.0, 0.2
"""For how long an `up` or `down` that runs is waited for."""


@dataclass(frozen=True, slots=True)
class _Owned:
    name: str
    cluster_id: str
    owner: Process


def ensure_watched(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Start the watcher of this cluster, if somebody owns it and none runs."""
    owned = _owned(run_dir)
    if owned is None:
        return
    arguments = ["-m", "raytide.control.supervision.owner", str(run_dir), owned.cluster_id]
    if not running(arguments):
        spawn(_WHAT, [sys.executable, *arguments], run_dir=run_dir, environment=environment)


def watch(run_dir: Path, cluster_id: str) -> None:
    """Return once the cluster of this id is gone, which is at the latest a while after its owner is."""
    owned = _owned(run_dir, cluster_id)
    if owned is None:
        return
    owned.owner.wait(None)
    log.warning("the owner is gone; the cluster is ended", extra={"owner": owned.owner.pid, "cluster": cluster_id})
    deadline_s = time.monotonic() + _LOCKED_S
    try:
        while _owned(run_dir, cluster_id) is not None and time.monotonic() < deadline_s:
            if _down(owned.name):
                break
            time.sleep(_POLL_S)
    finally:
        kill_marked(MARK, cluster_id)


def _down(name: str) -> bool:
    """Whether it is down; not while another `up` or `down` of it runs."""
    from raytide.control.bootstrap.local import down

    try:
        down(name)
    except ConflictError:
        return False
    return True


def _owned(run_dir: Path, cluster_id: str | None = None) -> _Owned | None:
    """None where nobody owns the cluster, and where another one has taken the place of that id."""
    record = read_json(run_dir / "cluster.json") or {}
    if not record.get("owner_pid") or cluster_id not in (None, record["cluster_id"]):
        return None
    owner = Process(record["owner_pid"], record["owner_start_time"], _WHAT)
    return _Owned(record["name"], record["cluster_id"], owner)


def main(run_dir: str, cluster_id: str) -> None:
    log_to()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(Path(run_dir), cluster_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
