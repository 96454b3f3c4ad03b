"""The workers of a gang: one actor per rank, in its member's placement group, kept for as long as the member is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from raytide.actors.gang.groups import bundle
from raytide.actors.trainer.record import Record
from raytide.actors.trainer.worker import TrainWorker
from raytide.core.gang import Lease, Member, MemberState, Shape
from raytide.core.train_spec import TrainSpec

START_TIMEOUT_S = 120.0

Key = tuple[int, int, int, str]
"""Member index, its incarnation, the rank's slot inside the member, and the member's placement group."""


@dataclass(slots=True, eq=False)
class Hand:
    """One worker actor."""

    key: Key
    member: Member
    actor: Any
    ready_ref: Any
    started_s: float = field(default_factory=time.monotonic)
    pid: int | None = None
    """Known once it is ready."""

    @property
    def is_ready(self) -> bool:
        return self.pid is not None

    @property
    def host(self) -> str:
        return f"member {self.member.index} ({self.member.node_id or 'node'} {self.member.address})"


class Crew:
    def __init__(self, spec: TrainSpec, record: Record) -> None:
        self._spec, self._record = spec, record
        self._hands: dict[Key, Hand] = {}

    def staff(self, lease: Lease) -> list[Hand]:
        """Start a worker for every usable seat that has none, and let go of those whose member is lost: returned."""
        seats = {key_of(member, slot): member for member in lease.usable for slot in range(slots_of(lease.shape))}
        lost = [hand for key, hand in self._hands.items() if key not in seats]
        for hand in lost:
            self.dismiss(hand)
        for key, member in seats.items():
            if key in self._hands:
                self._hands[key].member = member
            elif member.state is not MemberState.LEAVING:
                self._hands[key] = self._start(key, member, lease.shape)
        return lost

    def check(self) -> list[tuple[Hand, str]]:
        """See which starting workers are ready; those that died or never came are let go, and returned with why."""
        import ray

        failed = []
        for hand in [hand for hand in self._hands.values() if not hand.is_ready]:
            if ray.wait([hand.ready_ref], timeout=0)[0]:
                try:
                    hand.pid = ray.get(hand.ready_ref, timeout=1)
                    start_s = round(time.monotonic() - hand.started_s, 2)
                    self._record.event("ready", host=hand.host, pid=hand.pid, start_s=start_s)
                except ray.exceptions.RayError as error:
                    failed.append((hand, f"its worker died while it started: {first_line(error)}"))
            elif time.monotonic() - hand.started_s > START_TIMEOUT_S:
                failed.append((hand, f"its worker did not start within {START_TIMEOUT_S:.0f} s"))
        for hand, why in failed:
            self._record.event("lost", host=hand.host, why=why)
            self.dismiss(hand)
        return failed

    def able(self, shape: Shape) -> list[Hand]:
        """Workers that can take a seat now, in rank order: whole members that are not about to leave."""
        ready = [hand for hand in self._hands.values() if hand.is_ready and hand.member.state is MemberState.READY]
        count: dict[int, int] = {}
        for hand in ready:
            count[hand.member.index] = count.get(hand.member.index, 0) + 1
        return sorted((h for h in ready if count[h.member.index] == slots_of(shape)), key=lambda hand: hand.key)

    @property
    def starting(self) -> int:
        return sum(not hand.is_ready for hand in self._hands.values())

    def dismiss(self, hand: Hand) -> None:
        import ray

        if self._hands.get(hand.key) is hand:
            del self._hands[hand.key]
        ray.kill(hand.actor)

    def close(self) -> None:
        for hand in list(self._hands.values()):
            self.dismiss(hand)

    def _start(self, key: Key, member: Member, shape: Shape) -> Hand:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = {name: amount / slots_of(shape) for name, amount in shape.resources.items()}
        cpus, gpus, memory = need.pop("CPU", 0.0), need.pop("GPU", 0.0), need.pop("memory", 0.0)
        actor_class: Any = ray.remote(TrainWorker)
        placed = actor_class.options(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory or None,
            resources=need,
            max_restarts=0,
            max_concurrency=8,  # `train` holds one for the whole generation
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundle(member), placement_group_bundle_index=0),
        )
        actor = placed.remote(self._spec, max(1, int(cpus)))
        return Hand(key, member, actor, actor.ready.remote())


def key_of(member: Member, slot: int) -> Key:
    return member.index, member.incarnation, slot, member.placement_group_id


def slots_of(shape: Shape) -> int:
    """Ranks in a member: one for each GPU, or one."""
    return max(1, int(shape.resources.get("GPU", 0)))


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
