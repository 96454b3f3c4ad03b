"""A member that its lease reports as lost is among the dead of the generation, however its rank ended."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.trainer.elastic.generation import GenerationRunner
from raytide.actors.trainer.elastic.worker_group import WorkerGroup
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import WorkerExit
from raytide.core.clock import VirtualClock
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec


class Worker:
    """A worker that is ready at once and never ends by itself."""

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "ready":
            answer.set_result(1)
        return answer

    def kill(self) -> None: ...


class Watch:
    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def latest(self) -> Lease:
        return self.lease


@pytest.mark.parametrize("ended", [None, "broken"])
def test_a_lost_member_is_dead_also_if_its_rank_had_ended_or_its_call_never_does(tmp_path: Path, ended: Any) -> None:
    spec = TrainSpec(name="small", dataset="none", out=str(tmp_path / "run"), steps=3)
    record = RunLog(spec, VirtualClock(1000.0))
    shape = Shape(members=2, min_members=1, resources={"CPU": 1.0})
    members = tuple(Member(index, MemberState.READY, f"node-{index}") for index in range(2))
    watch: Any = Watch(Lease("lease-1", "job-1", shape, LeaseState.ACTIVE, members))
    group = WorkerGroup(spec, record, lambda spec, member, shape: Worker())
    group.reconcile(watch.lease)
    group.check()
    rest: Any = {"micro_batch": 1, "on_steps": None}
    workers = group.assign(shape)
    generation = GenerationRunner(1, spec, workers, group, watch, record, **rest)
    if ended is not None:
        generation._exits[1] = WorkerExit(ended, "its peer is gone")
    gone = replace(members[1], state=MemberState.WAITING, incarnation=1)
    watch.lease = replace(watch.lease, members=(members[0], gone), epoch=1)
    generation._follow_lease()
    assert generation._result().dead == (workers[1],)
