"""Keeps the children of a cluster's control plane alive: the controller, the API, the gateways, the monitor and others.

Run as `python -m raytide.control.supervision.supervisor RUN_DIR [NAME=MODULE ...]`.

A killed supervisor leaves its children running, and the next supervisor adopts them. It finds a child by the recorded
pid and start time. If a full disk kept the child from being recorded, it finds the child by its command line.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytide.control.supervision.daemon import hold_lock, record_of, spawn, start
from raytide.control.supervision.log_rotation import rotate
from raytide.core.errors import RaytideError
from raytide.core.io.atomic_file import read_json, sweep
from raytide.core.io.environment import ON_NODES, all_passed, passed
from raytide.core.io.process import Process, running, terminate_all
from raytide.core.objects.cluster_config import load_cluster

CHILDREN = {
    "controller": "raytide.control.controller",
    "api": "raytide.control.api",
    "gateway-0": "raytide.gateway 0",
    "gateway-1": "raytide.gateway 1",
    "monitor": "raytide.dashboards.monitor",
}
"""The module of each child, which runs as `python -m MODULE RUN_DIR`, and its further arguments. Two gateways share a
port: while one is restarted the other answers."""
MONITORING = {
    "prometheus": "raytide.dashboards.prometheus prometheus",
    "alertmanager": "raytide.dashboards.prometheus alertmanager",
}
"""The further children of a cluster that was started with `--monitoring`."""
BACKUP = {"backup": "raytide.control.backup"}
"""The further child of a cluster whose cluster.yaml asks for backups."""

_log = logging.getLogger(__name__)

_MARKS = ("RAYTIDE_CLUSTER", "RAYTIDE_HEAD")
"""The variables by which the processes of a cluster, and of one of its heads, are found."""
_FIRST_DELAY_S, _LAST_DELAY_S = 0.2, 10.0
_HEALTHY_S = 30.0
"""The seconds after which a child counts as healthy: when it ends later, it is restarted with the first delay."""
_STOP_GRACE_S = 8.0
_CHORES_S = 5.0
"""The interval in seconds of checking conditions that send no events."""


@dataclass(slots=True)
class Child:
    """A supervised process, and the time of its next restart."""

    what: str
    argv: Sequence[str]
    process: Process | None = None
    started_s: float = 0.0
    delay_s: float = _FIRST_DELAY_S
    restart_at_s: float = 0.0
    is_recorded: bool = True

    def on_end(self, now_s: float) -> None:
        """Schedules the restart of a child that has ended. If the child ran for at least `_HEALTHY_S` seconds, the
        delay before the restart is `_FIRST_DELAY_S`. Otherwise it is twice the previous delay, at most `_LAST_DELAY_S`.
        """
        if now_s - self.started_s >= _HEALTHY_S:
            self.delay_s = _FIRST_DELAY_S
        self.process = None
        self.restart_at_s = now_s + self.delay_s
        self.delay_s = min(2 * self.delay_s, _LAST_DELAY_S)


@dataclass(frozen=True, slots=True)
class OwnedCluster:
    """A cluster that is ended when its owner process ends."""

    name: str
    cluster_id: str
    owner: Process


def owner_of(run_dir: Path, cluster_id: str | None = None) -> OwnedCluster | None:
    """Returns the cluster of this run folder, together with the owner process. Returns None if the cluster has no
    owner, or if the cluster's id is not `cluster_id`."""
    record = read_json(run_dir / "cluster.json") or {}
    if not record.get("owner_pid") or cluster_id not in (None, record["cluster_id"]):
        return None
    owner = Process(record["owner_pid"], record["owner_start_time"], "owner")
    return OwnedCluster(record["name"], record["cluster_id"], owner)


def ensure_owner_watched(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Starts a process that ends the cluster once the cluster's owner is gone. Does nothing if the cluster has no
    owner, or if such a process already runs.
    """
    if (owned := owner_of(run_dir)) is None:
        return
    arguments = ["-m", "raytide.control.bootstrap.owner_watch", str(run_dir), owned.cluster_id]
    if not running(arguments):
        spawn("owner", [sys.executable, *arguments], run_dir=run_dir, environment=environment)


def supervise(run_dir: Path, children: Mapping[str, Sequence[str]]) -> None:
    """Starts the children, and restarts each child that ends. On SIGTERM, it ends the children and returns."""
    sweep([run_dir, run_dir / "pids"])
    watched = [_found(run_dir, what, argv) for what, argv in children.items()]
    # SIGTERM arrives as a byte, not an exception, which could lose a child in the middle of its start
    stop, stopped = socket.socketpair()
    stopped.setblocking(False)
    signal.set_wakeup_fd(stopped.fileno())
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        while not _wait(watched, stop):
            for child in watched:
                _step(child, run_dir)
            _do_chores(run_dir)
    finally:
        terminate_all([child.process for child in watched if child.process is not None], grace_s=_STOP_GRACE_S)


def _do_chores(run_dir: Path) -> None:
    rotate([*(run_dir / "logs").glob("*.log"), *(run_dir / "nodes").glob("*/log")])
    try:
        ensure_owner_watched(run_dir, os.environ)
    except (OSError, ValueError, RaytideError) as error:  # a full disk: retried later
        _log.warning("cannot watch the cluster's owner: %s", error)


def _step(child: Child, run_dir: Path) -> None:
    now_s = time.monotonic()
    if child.process is not None and not child.process.alive:
        child.on_end(now_s)
        _log.warning("%s ended; it starts again in %g s", child.what, child.restart_at_s - now_s)
    if child.process is None and now_s >= child.restart_at_s:
        child.started_s, child.is_recorded = now_s, False
        try:
            child.process = start(child.what, child.argv, run_dir=run_dir, environment=_environment(child, run_dir))
        except OSError as error:  # out of processes or memory: keep supervising the others
            child.on_end(now_s)
            _log.warning("%s cannot be started: %s", child.what, error)
    if child.process is not None and not child.is_recorded:
        _record(child, run_dir)


def _environment(child: Child, run_dir: Path) -> Mapping[str, str]:
    """Returns the environment of a child. A gateway, which strangers can reach, gets no secrets of the operator except
    the keys of hosted APIs; Prometheus and Alertmanager get none.
    """
    if child.what in MONITORING:
        return passed(os.environ, ON_NODES, (*_MARKS, *all_passed(())))
    if not child.what.startswith("gateway"):
        return os.environ
    named = (*_MARKS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", *_keys_of_hosted_apis(run_dir))
    return passed(os.environ, (*ON_NODES, "RAY_*"), (*named, *all_passed(())))


def _keys_of_hosted_apis(run_dir: Path) -> list[str]:
    try:
        hosted = load_cluster(run_dir / "cluster.yaml").settings.gateway.hosted
    except RaytideError:  # the gateway says why
        return []
    return [api.api_key_env for api in hosted]


def _record(child: Child, run_dir: Path) -> None:
    """Records a child. If a full disk prevents it, the child runs anyway and is recorded later."""
    assert child.process is not None
    try:
        child.process.write(record_of(run_dir, child.what))
        child.is_recorded = True
    except OSError as error:
        _log.warning("%s runs as %d and cannot be recorded: %s", child.what, child.process.pid, error)


def _wait(children: Sequence[Child], stop: socket.socket) -> bool:
    """Waits until a child ends or is due to start, chores are due, or a stop is requested. Returns whether a stop is
    requested."""
    fds = [fd for child in children if child.process is not None and (fd := child.process.open()) is not None]
    due = [child.restart_at_s for child in children if child.process is None]
    has_ended = len(fds) + len(due) < len(children)
    timeout_s = 0.0 if has_ended else min([_CHORES_S, *(max(0.0, at_s - time.monotonic()) for at_s in due)])
    ready, _, _ = select.select([stop.fileno(), *fds], [], [], timeout_s)
    for fd in fds:
        os.close(fd)
    return stop.fileno() in ready


def _found(run_dir: Path, what: str, argv: Sequence[str]) -> Child:
    """Returns the child with the process that an earlier supervisor started, dead or alive; without a process if there
    was none.
    """
    child = Child(what, argv, started_s=time.monotonic())
    recorded = _recorded(run_dir, what)
    child.process = recorded or next(iter(running(argv[1:])), None)
    child.is_recorded = child.process == recorded
    return child


def _recorded(run_dir: Path, what: str) -> Process | None:
    try:
        process = Process.read(record_of(run_dir, what))
    except (OSError, ValueError, KeyError):
        return None
    return process if process is not None and process.alive else None


def arguments(child: str, run_dir: str) -> list[str]:
    """Returns Python's command-line arguments for a child. `child` is a module name and further arguments, as in
    CHILDREN."""
    module, *more = child.split()
    return ["-m", module, run_dir, *more]


def main(run_dir: str, *children: str) -> None:
    modules = dict(child.split("=", 1) for child in children) or CHILDREN
    folder = Path(run_dir)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with hold_lock(folder / "supervisor.lock"):
        supervise(folder, {what: [sys.executable, *arguments(child, run_dir)] for what, child in modules.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
