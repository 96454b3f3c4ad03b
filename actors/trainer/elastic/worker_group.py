"""The workers of a gang: one process per rank, kept for as long as its member is, seated or not."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raytide.actors.trainer.elastic.rank_assignment import Key, assign_ranks, most_ranks, slots_of, usable
from raytide.actors.trainer.elastic.ray_worker import RemoteWorker, StartWorker
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

START_TIMEOUT_S = 120.0


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker."""

    key: Key
    member: Member
    remote: RemoteWorker
    ready: Future[int]
    """Its process id, once it has its imports."""
    exited: Future[None]
    """Fails when the process ends, whatever it was doing."""
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
        self._workers: dict[Key, WorkerHandle] = {}
        self.settled_version = ""
        """The version of the lease on which nobody trained any more on seats that it takes away."""

    def reconcile(self, lease: Lease) -> list[WorkerHandle]:
        """Start a worker for every usable seat that has none, and let go of those whose member is lost: returned."""
        seats = {key_of(member, slot): member for member in lease.usable for slot in range(slots_of(lease.shape))}
        lost = [worker for key, worker in self._workers.items() if key not in seats]
        for worker in lost:
            self.kill(worker)
        for key, member in seats.items():
            if key in self._workers:
                self._workers[key].member = member
            elif member.state is not MemberState.LEAVING:
                remote = self._start(self._spec, member, lease.shape)
                self._workers[key] = WorkerHandle(
                    key, member, remote, remote.call("ready"), remote.call("wait_for_exit")
                )
        return lost

    def settle(self, lease: Lease, workers: Collection[WorkerHandle]) -> None:
        """These train, on the seats of this lease; whoever else is on a seat that is being left does nothing there."""
        if not any(worker.member.state is MemberState.LEAVING for worker in workers):
            self.settled_version = lease.version

    def check(self) -> list[tuple[WorkerHandle, str]]:
        """See who is ready now and who died. Those that never came to be ready are returned, with why."""
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
            elif not worker.is_ready and time.monotonic() - worker.started_s > START_TIMEOUT_S:
                why = f"its worker did not start within {START_TIMEOUT_S:.0f} s"
            else:
                continue
            self._record.event("lost", host=worker.host, why=why)
            self.kill(worker)
            if not worker.is_ready:
                failed.append((worker, why))
        return failed

    def assign(self, shape: Shape, held: Collection[WorkerHandle] = ()) -> list[WorkerHandle]:
        """Who can form a generation now, in rank order: ready, and on a member that is not about to leave."""
        able = [
            worker for worker in self._workers.values() if worker.is_ready and worker.member.state is MemberState.READY
        ]
        most = most_ranks(self._spec, shape)
        return assign_ranks(able, shape, most=most, usable=lambda ranks: usable(self._spec, ranks), held=held)

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
    """The first line of what went wrong."""
    error = broken.exception()
    text = str(error).strip() if error is not None else ""
    return text.splitlines()[0] if text else type(error).__name__
