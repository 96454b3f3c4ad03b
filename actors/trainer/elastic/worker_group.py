"""The workers of a gang: one process per rank slot, kept as long as its member, whether or not it has a rank."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raytide.actors.trainer.elastic.rank_assignment import Key, assign_ranks, most_ranks, slots_of, usable
from raytide.actors.trainer.elastic.ray_worker import RemoteWorker, StartWorker
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.core.errors import UsageError
from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

START_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 1800.0
"""The additional time of workers that install packages first."""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker process and its member."""

    key: Key
    member: Member
    remote: RemoteWorker
    ready: Future[int]
    """Process id, once the worker has its imports."""
    exited: Future[None]
    """Fails when the process ends."""
    started_s: float = field(default_factory=time.monotonic)
    pid: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.pid is not None

    @property
    def incarnation(self) -> tuple[int, int]:
        return self.key[:2]

    @property
    def host(self) -> str:
        return f"member {self.member.index} ({self.member.node_id or 'node'} {self.member.address})"

    def call(self, method: str, *args: object) -> Future[Any]:
        return self.remote.call(method, *args)


class WorkerGroup:
    def __init__(self, spec: TrainSpec, record: RunLog, start: StartWorker) -> None:
        self._spec, self._record, self._start = spec, record, start
        self._start_timeout_s = START_TIMEOUT_S + (INSTALL_TIMEOUT_S if spec.pip else 0.0)
        self._workers: dict[Key, WorkerHandle] = {}
        self.settled_version = ""
        """The last lease version whose leaving members have no training rank."""

    def reconcile(self, lease: Lease) -> list[WorkerHandle]:
        """Start workers for new member slots, and kill and return those of lost members."""
        slots = {key_of(member, slot): member for member in lease.usable for slot in range(slots_of(lease.shape))}
        lost = [worker for key, worker in self._workers.items() if key not in slots]
        for worker in lost:
            self.kill(worker)
        for key, member in slots.items():
            if key in self._workers:
                self._workers[key].member = member
            elif member.state is not MemberState.LEAVING:
                remote = self._start(self._spec, member, lease.shape)
                self._workers[key] = WorkerHandle(
                    key, member, remote, remote.call("ready"), remote.call("wait_for_exit")
                )
        return lost

    def settle(self, lease: Lease, workers: Collection[WorkerHandle]) -> None:
        """Record the lease's version unless one of these training workers is on a leaving member."""
        if not any(worker.member.state is MemberState.LEAVING for worker in workers):
            self.settled_version = lease.version

    def check(self) -> list[tuple[WorkerHandle, str, UsageError | None]]:
        """Update which workers are ready and which died. Returns those that never became ready, with the reason, and
        with the error if every other start would end with it too."""
        failed = []
        for worker in list(self._workers.values()):
            if worker.exited.done():
                why = f"its worker died: {failure_reason(worker.exited)}"
            elif not worker.is_ready and worker.ready.done() and worker.ready.exception() is None:
                worker.pid, start_s = worker.ready.result(), round(time.monotonic() - worker.started_s, 2)
                self._record.event("ready", host=worker.host, pid=worker.pid, start_s=start_s)
                continue
            elif not worker.is_ready and worker.ready.done():
                why = f"its worker died while it started: {failure_reason(worker.ready)}"
            elif not worker.is_ready and time.monotonic() - worker.started_s > self._start_timeout_s:
                why = f"its worker did not start within {self._start_timeout_s:.0f} s"
            else:
                continue
            self._record.event("lost", host=worker.host, why=why)
            self.kill(worker)
            if not worker.is_ready:
                broken = worker.exited if worker.exited.done() else worker.ready
                error = broken.exception() if broken.done() else None
                failed.append((worker, why, error if isinstance(error, UsageError) else None))
        return failed

    def assign(self, shape: Shape, current: Collection[WorkerHandle] = ()) -> list[WorkerHandle]:
        """Returns the workers of the next generation in rank order, among ready ones whose members are not leaving."""
        candidates = [
            worker for worker in self._workers.values() if worker.is_ready and worker.member.state is MemberState.READY
        ]
        most = most_ranks(self._spec, shape)
        return assign_ranks(
            candidates, shape, most=most, usable=lambda ranks: usable(self._spec, ranks), current=current
        )

    @property
    def starting(self) -> int:
        return sum(not worker.is_ready for worker in self._workers.values())

    @property
    def ready(self) -> int:
        return sum(worker.is_ready for worker in self._workers.values())

    def kill(self, worker: WorkerHandle) -> None:
        if self._workers.get(worker.key) is worker:
            del self._workers[worker.key]
            worker.remote.kill()

    def close(self) -> None:
        for worker in list(self._workers.values()):
            self.kill(worker)


def key_of(member: Member, slot: int) -> Key:
    return member.index, member.incarnation, slot, member.placement_group_id


def failure_reason(broken: Future[Any]) -> str:
    """Returns the first line of a future's error."""
    error = broken.exception()
    text = str(error).strip() if error is not None else ""
    return text.splitlines()[0] if text else type(error).__name__
