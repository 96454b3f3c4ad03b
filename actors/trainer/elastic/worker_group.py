"""The workers of a gang, one process per rank slot. A worker lives as long as its member, even while the worker has no
rank.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raytide.actors.gang.images import PREPARE_TIMEOUT_S
from raytide.actors.gang.member_actor import first_line
from raytide.actors.trainer.elastic.rank_assignment import Key, assign_ranks, most_ranks, slots_of, usable
from raytide.actors.trainer.elastic.ray_worker import RemoteWorker, StartWorker
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.core.errors import UsageError
from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

START_TIMEOUT_S = 120.0
FIRST_REST_S, LONGEST_REST_S = 1.0, 300.0
"""The time until a worker that failed to join is started again, which doubles from failure to failure."""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker process and the member on which it runs."""

    key: Key
    member: Member
    remote: RemoteWorker
    ready: Future[int]
    """A future of the process id, which is set once the worker has its imports."""
    exited: Future[None]
    """A future that fails when the process ends."""
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
        self._start_timeout_s = START_TIMEOUT_S + (PREPARE_TIMEOUT_S if spec.pip or spec.image else 0.0)
        self._workers: dict[Key, WorkerHandle] = {}
        self._rests: dict[Key, tuple[float, float]] = {}
        """For each worker that failed to join, the wait until its next start: its duration, and its end in monotonic
        time.
        """
        self._refused: dict[Key, tuple[WorkerHandle, str, UsageError]] = {}
        """The workers that are not started again: every other start would end with the same error."""
        self.has_refused = False
        """True once a worker was refused."""
        self.settled_version = ""
        """The last lease version whose leaving members have no training rank."""

    def reconcile(self, lease: Lease) -> list[WorkerHandle]:
        """Starts workers for new member slots, and kills the workers of lost members. Returns the killed workers."""
        slots = {key_of(member, slot): member for member in lease.usable for slot in range(slots_of(lease.shape))}
        lost = [worker for key, worker in self._workers.items() if key not in slots]
        for worker in lost:
            self.kill(worker)
        self._rests = {key: rest for key, rest in self._rests.items() if key in slots}
        self._refused = {key: refused for key, refused in self._refused.items() if key in slots}
        for key, member in slots.items():
            if key in self._workers:
                self._workers[key].member = member
            elif member.state is not MemberState.LEAVING and self._may_start(key):
                remote = self._start(self._spec, member, lease.shape)
                self._workers[key] = WorkerHandle(
                    key, member, remote, remote.call("ready"), remote.call("wait_for_exit")
                )
        return lost

    def _may_start(self, key: Key) -> bool:
        return key not in self._refused and self._rests.get(key, (0.0, 0.0))[1] <= time.monotonic()

    def rest(self, worker: WorkerHandle) -> None:
        """Delays the restart of a worker that failed to join a running generation. The delay doubles with each
        failure.
        """
        last_s = self._rests.get(worker.key, (0.0, 0.0))[0]
        duration_s = min(max(FIRST_REST_S, 2 * last_s), LONGEST_REST_S)
        self._rests[worker.key] = duration_s, time.monotonic() + duration_s

    def settle(self, lease: Lease, workers: Collection[WorkerHandle]) -> None:
        """Records the lease's version as settled. `workers` are the workers that train now. If one of these workers is
        on a leaving member, nothing is recorded.
        """
        if not any(worker.member.state is MemberState.LEAVING for worker in workers):
            self.settled_version = lease.version

    def check(self) -> list[tuple[WorkerHandle, str, UsageError | None]]:
        """Updates which workers are ready and which have died. Kills the workers that did not start in time. Returns
        the workers that died or were killed before they were ready, each with the reason and an optional error.

        The error is set if a new start of the worker would end with the same error. Such a worker is not started again.
        """
        failed = []
        for worker in list(self._workers.values()):
            if worker.exited.done():
                why = f"its worker died: {first_line(worker.exited.exception())}"
            elif not worker.is_ready and worker.ready.done() and worker.ready.exception() is None:
                worker.pid, start_s = worker.ready.result(), round(time.monotonic() - worker.started_s, 2)
                image = {"image": worker.remote.image} if worker.remote.image else {}
                self._record.event("ready", host=worker.host, pid=worker.pid, start_s=start_s, **image)
                self._rests.pop(worker.key, None)
                continue
            elif not worker.is_ready and worker.ready.done():
                why = f"its worker died while it started: {first_line(worker.ready.exception())}"
            elif not worker.is_ready and time.monotonic() - worker.started_s > self._start_timeout_s:
                why = f"its worker did not start within {self._start_timeout_s:.0f} s"
            else:
                continue
            self.kill(worker)
            final = None if worker.is_ready else _final_error(worker)
            self._record.event("lost" if final is None else "refused", host=worker.host, why=why)
            if final is not None:
                self._refused[worker.key], self.has_refused = (worker, why, final), True
            if not worker.is_ready:
                failed.append((worker, why, final))
        return failed

    def assign(self, shape: Shape, current: Collection[WorkerHandle] = ()) -> list[WorkerHandle]:
        """Returns the workers of the next generation in rank order. Only ready workers are chosen, and only on members
        that are not leaving.
        """
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
    def refusal(self) -> UsageError | None:
        """The error of one of the workers that are not started again. None if there is no such worker."""
        return next((error for _, _, error in self._refused.values()), None)

    @property
    def refused(self) -> str:
        """The hosts whose workers are not started again, each with the reason, as one text. Empty if there are none."""
        return "; ".join(dict.fromkeys(f"{worker.host}: {why}" for worker, why, _ in self._refused.values()))

    @property
    def images(self) -> str:
        """The digests of the images in which ready workers run, as one text. There are several digests only if a tag
        named different images on different members.
        """
        return ", ".join(sorted({worker.remote.image for worker in self._workers.values() if worker.is_ready} - {""}))

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


def _final_error(worker: WorkerHandle) -> UsageError | None:
    """Returns the error of a failed start if every other start would end with it too, else None."""
    broken = worker.exited if worker.exited.done() else worker.ready
    error = broken.exception() if broken.done() else None
    return error if isinstance(error, UsageError) else None
