"""Ends the processes on one machine of a cluster with several heads, or ends the whole cluster."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.bootstrap.head.ray_start import HEAD_MARK, forget_ray
from raytide.control.supervision.daemon import record_of
from raytide.core.errors import ConflictError
from raytide.core.io.process import Process, kill_marked, terminate_all
from raytide.core.state import Store

GUARD = "guard"
DISMISSAL = signal.SIGUSR1
"""The signal on which a guard ends at once, without resigning and without an error."""
_DISMISSAL_S = 5.0
_GRACE_S = 30.0


def end_processes(run_dir: Path) -> None:
    """Kills the head's processes on this machine: Ray, the supervisor and its children. The calling process is
    spared."""
    kill_marked(HEAD_MARK, str(run_dir))
    with suppress(OSError):
        forget_ray(run_dir)


def end_guard(run_dir: Path) -> bool:
    """Ends the guard of this machine, so that another machine may take over. Returns whether a guard was running."""
    guard = Process.read(record_of(run_dir, GUARD))
    if guard is None or not guard.alive:
        return False
    terminate_all([guard], grace_s=_GRACE_S)
    return True


def dismiss(guard: Process) -> None:
    """Ends the guard at once. The guard does not resign. It ends without an error, so that systemd does not start it
    again."""
    guard.send(DISMISSAL)
    if not guard.wait(_DISMISSAL_S):
        terminate_all([guard], grace_s=0.0)


@contextmanager
def leading_to_the_end(cluster: HeadCluster) -> Iterator[None]:
    """Marks the cluster as ended, so that no other machine becomes the head. Then runs the block, and ends this
    machine's processes. If another machine leads, ends this machine's processes at once and raises ConflictError. If
    the cluster has no standby heads, runs the block and does nothing else.
    """
    if not cluster.head_epoch:
        yield
        return
    guard = Process.read(record_of(cluster.run_dir, GUARD))
    if guard is not None:
        dismiss(guard)
    with closing(Store.open(cluster.state_url)) as store:
        lease = store.head_lease(cluster.holder, 0.0)
        lease.epoch = cluster.head_epoch
        heads = store.heads()
        if heads is None or heads.epoch != cluster.head_epoch:
            end_processes(cluster.run_dir)
            raise ConflictError(
                f"the head of cluster {cluster.name} is {heads.leader if heads else 'another machine'}: only what ran "
                "here was ended.",
                hint=f"Run `raytide down --name {cluster.name}` there to end the nodes.",
            )
        lease.resign(ends=True)
        yield
        end_processes(cluster.run_dir)
