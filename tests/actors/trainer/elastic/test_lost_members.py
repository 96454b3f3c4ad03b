"""Members that a generation loses are among its dead, however their ranks ended; those that cannot join stay out."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.actors.trainer.elastic.ready_worker import Worker

from raytide.actors.trainer.elastic import worker_group as module
from raytide.actors.trainer.elastic.generation import GenerationRunner
from raytide.actors.trainer.elastic.worker_group import WorkerGroup
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import WorkerExit
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec


class Watch:
    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def latest(self) -> Lease:
        return self.lease


def test_the_record_of_a_training_has_the_digest_of_its_image(tmp_path: Path) -> None:
    spec = TrainSpec(name="small", dataset="none", out=str(tmp_path / "run"), steps=3, image="a.b/c:1")
    record = RunLog(spec, VirtualClock(1000.0))
    group = WorkerGroup(spec, record, lambda spec, member, shape: Worker())
    assert group._start_timeout_s > module.START_TIMEOUT_S, "a pull takes its time"
    shape = Shape(members=1, resources={"CPU": 1.0})
    member = Member(0, MemberState.READY, "node-0")
    group.reconcile(Lease("lease-1", "job-1", shape, LeaseState.ACTIVE, (member,)))
    assert group.images == ""
    group.check()
    assert group.images == Worker.image
    assert Worker.image in (tmp_path / "run" / "events.jsonl").read_text()


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


class Joining:
    """A generation of member 0 alone, which member 1 would join, but each of its starts ends with the error."""

    def __init__(self, folder: Path, error: Exception) -> None:
        spec = TrainSpec(name="small", dataset="none", out=str(folder / "run"), steps=3)
        self.record, self.error, self.starts = RunLog(spec, VirtualClock(1000.0)), error, 0
        shape = Shape(members=2, min_members=1, resources={"CPU": 1.0})
        self.members = tuple(Member(index, MemberState.READY, f"node-{index}") for index in range(2))
        alone = replace(self.members[1], state=MemberState.WAITING)
        lease = Lease("lease-1", "job-1", shape, LeaseState.ACTIVE, (self.members[0], alone))
        self.watch: Any = Watch(lease)
        self.group = WorkerGroup(spec, self.record, self.start)
        self.group.reconcile(lease)
        self.group.check()
        rest: Any = {"micro_batch": 1, "on_steps": None}
        workers = self.group.assign(shape)
        self.generation = GenerationRunner(1, spec, workers, self.group, self.watch, self.record, **rest)
        self.give(0)

    def start(self, spec: TrainSpec, member: Member, shape: Shape) -> Any:
        if member.index == 0:
            return Worker()
        self.starts += 1
        failed: Future[Any] = Future()
        failed.set_exception(self.error)
        return SimpleNamespace(call=lambda method: failed, kill=lambda: None)

    def give(self, incarnation: int) -> None:
        given = replace(self.members[1], incarnation=incarnation)
        self.watch.lease = replace(self.watch.lease, members=(self.members[0], given), epoch=1 + incarnation)


def test_a_member_whose_packages_can_never_be_installed_is_reported_and_started_once(tmp_path: Path) -> None:
    joining = Joining(tmp_path, ConfigError("no such package"))
    for _ in range(50):
        joining.generation._follow_lease()
    assert joining.starts == 1
    why = "its worker died: no such package"
    assert joining.group.refused == f"member 1 (node-1 ): {why}"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["why"] for event in events if event["event"] == "refused"] == [why]
    assert joining.generation._end_reason is None, "the others train on"
    joining.give(1)
    for _ in range(50):
        joining.generation._follow_lease()
    assert joining.starts == 2, "another member in its place, perhaps of another node, is tried"


def test_a_member_that_fails_to_join_for_a_reason_that_may_pass_rests_longer_and_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining, clock = Joining(tmp_path, ClusterError("the index: 503")), VirtualClock(0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.now_s))
    started_s, known = list[float](), 0
    while clock.now_s() < 3600.0:
        joining.generation._follow_lease()
        if joining.starts > known:
            known = joining.starts
            started_s.append(clock.now_s())
        clock.sleep(1.0)
    rests = [after - before for before, after in pairwise(started_s)]
    assert rests[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert set(rests[9:]) == {module.LONGEST_REST_S}
    assert (joining.group.refused, joining.group.refusal, joining.group.starting) == ("", None, 0)
