"""The workers of a gang: one process per rank, kept for as long as its member is, seated or not."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raytide.actors.trainer.elastic.rank_assignment import Key, assign_ranks, most_ranks, slots_of, usable
from raytide.actors.trainer.elastic.ray_worker import Remote, Start
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

START_TIMEOUT_S = 120.0


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker."""

    key: Key
    member: Member
    worker: Remote
    ready: Future[int]
    """Its process id, once it has its imports."""
    stay: Future[None]
    """Fails when the process ends, whatever it was doing."""
    started_s: float = field(default_factory=time.monotonic)
    pid: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.pid is not None

    @property
    def filling(self) -> tuple[int, int]:
        return self.key[:2]

    @property
    def host(self) -> str:
        return f"member {self.member.index} ({self.member.node_id or 'node'} {self.member.address})"

    def call(self, method: str, *args: object) -> Future[Any]:
        return self.worker.call(method, *args)


class WorkerGroup:
    def __init__(self, spec: TrainSpec, record: RunLog, start: Start) -> None:
        self._spec, self._record, self._start = spec, record, start
        self._hands: dict[Key, WorkerHandle] = {}
        self.settled = ""
        """The version of the lease on which nobody trained any more on seats that it takes away."""

    def reconcile(self, lease: Lease) -> list[WorkerHandle]:
        """Start a worker for every usable seat that has none, and let go of those whose member is lost: returned."""
        seats = {key_of(member, slot): member for member in lease.usable for slot in range(slots_of(lease.shape))}
        lost = [hand for key, hand in self._hands.items() if key not in seats]
        for hand in lost:
            self.kill(hand)
        for key, member in seats.items():
            if key in self._hands:
                self._hands[key].member = member
            elif member.state is not MemberState.LEAVING:
                worker = self._start(self._spec, member, lease.shape)
                self._hands[key] = WorkerHandle(key, member, worker, worker.call("ready"), worker.call("wait_for_exit"))
        return lost

    def settle(self, lease: Lease, hands: Collection[WorkerHandle]) -> None:
        """These train, on the seats of this lease; whoever else is on a seat that is being left does nothing there."""
        if not any(hand.member.state is MemberState.LEAVING for hand in hands):
            self.settled = lease.version

    def check(self) -> list[tuple[WorkerHandle, str]]:
        """See who is ready now and who died. Those that never came to be ready are returned, with why."""
        failed = []
        for hand in list(self._hands.values()):
            if hand.stay.done():
                why = f"its worker died: {reason(hand.stay)}"
            elif not hand.is_ready and hand.ready.done() and hand.ready.exception() is None:
                hand.pid, start_s = hand.ready.result(), round(time.monotonic() - hand.started_s, 2)
                self._record.event("ready", host=hand.host, pid=hand.pid, start_s=start_s)
                continue
            elif not hand.is_ready and hand.ready.done():
                why = f"its worker died while it started: {reason(hand.ready)}"
            elif not hand.is_ready and time.monotonic() - hand.started_s > START_TIMEOUT_S:
                why = f"its worker did not start within {START_TIMEOUT_S:.0f} s"
            else:
                continue
            self._record.event("lost", host=hand.host, why=why)
            self.kill(hand)
            if not hand.is_ready:
                failed.append((hand, why))
        return failed

    def seats(self, shape: Shape, held: Collection[WorkerHandle] = ()) -> list[WorkerHandle]:
        """Who can form a generation now, in rank order: ready, and on a member that is not about to leave."""
        able = [hand for hand in self._hands.values() if hand.is_ready and hand.member.state is MemberState.READY]
        most = most_ranks(self._spec, shape)
        return assign_ranks(able, shape, most=most, usable=lambda ranks: usable(self._spec, ranks), held=held)

    @property
    def starting(self) -> int:
        return sum(not hand.is_ready for hand in self._hands.values())

    @property
    def ready(self) -> int:
        return sum(hand.is_ready for hand in self._hands.values())

    def kill(self, hand: WorkerHandle) -> None:
        if self._hands.get(hand.key) is hand:
            del self._hands[hand.key]
            hand.worker.kill()

    def close(self) -> None:
        for hand in list(self._hands.values()):
            self.kill(hand)


def key_of(member: Member, slot: int) -> Key:
    return member.index, member.incarnation, slot, member.placement_group_id


def reason(broken: Future[Any]) -> str:
    """The first line of what went wrong."""
    error = broken.exception()
    text = str(error).strip() if error is not None else ""
    return text.splitlines()[0] if text else type(error).__name__
