"""The gang on real Ray: workers are killed, hung, taken and given back, and the losses stay those of one process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.trainer.core import RunResult
from raytide.actors.trainer.data import Sampler, TokenData
from raytide.actors.trainer.driver import run_train
from raytide.actors.trainer.local import train_local
from raytide.core.errors import CheckpointError, LeaseLostError
from raytide.core.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.train_spec import TrainSpec

pytestmark = pytest.mark.cluster
WAIT_S = 90.0


class FakeLeases:
    """A lease that the test changes by hand, with placement groups on the local Ray."""

    def __init__(self, shape: Shape) -> None:
        self._changed = threading.Condition()
        self._groups: dict[int, Any] = {}
        self._over = False
        self.reports: list[Mapping[str, float | int | str]] = []
        empty = tuple(Member(index) for index in range(shape.members))
        self._lease = Lease("lease-1", "job-1", shape, LeaseState.ACTIVE, empty)

    def give(self, index: int) -> None:
        """Fill a seat anew."""
        from ray.util.placement_group import placement_group

        self._groups[index] = placement_group([dict(self._lease.shape.resources)])
        self._set(
            index,
            state=MemberState.READY,
            node_id=f"node-{index}",
            address="127.0.0.1",
            placement_group_id=self._groups[index].id.hex(),
        )

    def notice(self, index: int) -> None:
        self._set(index, state=MemberState.LEAVING, leaves_at_s=time.time() + 60)

    def take(self, index: int) -> None:
        """The node is gone: its placement group is removed and the seat waits."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._groups.pop(index))
        self._set(index, state=MemberState.WAITING, incarnation=self._lease.members[index].incarnation + 1)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def clear(self) -> None:
        for index in list(self._groups):
            self.take(index)

    def lease(self, job_id: str) -> Lease:
        with self._changed:
            if self._over:
                raise LeaseLostError(f"the lease of {job_id} is over.")
            return self._lease

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._lease.epoch > newer_than, timeout_s)
        return self.lease(job_id)

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        self.reports.append(progress)

    def _set(self, index: int, **changes: Any) -> None:
        with self._changed:
            members = list(self._lease.members)
            members[index] = replace(members[index], **changes)
            self._lease = replace(self._lease, members=tuple(members), epoch=self._lease.epoch + 1)
            self._changed.notify_all()


class Run:
    """A driver in a thread of the test."""

    def __init__(self, spec: TrainSpec, leases: FakeLeases) -> None:
        self.spec, self.leases = spec, leases
        self._pool = ThreadPoolExecutor(1)
        self.future: Future[RunResult] = self._pool.submit(run_train, spec, leases, "job-1")

    def lines(self, name: str) -> list[dict[str, Any]]:
        file = Path(self.spec.out) / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def events(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["event"] == what]

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if self.future.done():
                raise AssertionError(f"the run ended before {what}: {self.future.result()}")
            assert time.monotonic() < deadline, f"{what} did not happen in {WAIT_S} s: {self.lines('events.jsonl')}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: any(line["step"] >= step for line in self.lines("metrics.jsonl")))

    def losses(self) -> list[float]:
        """By step; of a step that was done again, the last."""
        by_step = {line["step"]: line["loss"] for line in self.lines("metrics.jsonl")}
        return [by_step[step] for step in sorted(by_step)]

    def samples(self) -> dict[int, Counter[int]]:
        """The sample ids of each step, over all ranks, of its last time."""
        last: dict[int, tuple[int, Counter[int]]] = {}
        for file in sorted((Path(self.spec.out) / "samples").glob("*.jsonl")):
            for line in map(json.loads, file.read_text().splitlines()):
                generation, ids = last.get(line["step"], (-1, Counter()))
                if line["generation"] > generation:
                    generation, ids = line["generation"], Counter()
                if line["generation"] == generation:
                    ids.update(line["ids"])
                last[line["step"]] = generation, ids
        return {step: ids for step, (_, ids) in last.items()}


@pytest.fixture
def elastic(spec: TrainSpec) -> TrainSpec:
    changes = {"steps": 60, "checkpoint_every": 10, "record_samples": True, "collective_timeout_s": 8.0}
    return spec.model_copy(update=changes)


@pytest.fixture
def start(local_ray: None, elastic: TrainSpec) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(at_least: int, **changes: Any) -> Run:
        leases = FakeLeases(Shape(members=2, min_members=at_least, resources={"CPU": 1.0}))
        leases.give(0)
        leases.give(1)
        runs.append(Run(elastic.model_copy(update=changes), leases))
        return runs[-1]

    yield begin
    for run in runs:
        run.leases.end()
        run.future.exception(timeout=WAIT_S)
        run.leases.clear()


def assert_undisturbed(run: Run) -> None:
    """The run's losses are those of one process within 1e-5, and every step used exactly its samples."""
    spec = run.spec
    reference: list[float] = []
    alone = spec.model_copy(update={"out": spec.out + "-alone", "record_samples": False})
    train_local(alone, on_step=lambda result: reference.append(result.loss))
    assert max(abs(a - b) for a, b in zip(run.losses(), reference, strict=True)) <= 1e-5
    sampler = Sampler(spec.seed, TokenData(spec.dataset, spec.seq_len).n_sequences, spec.global_batch)
    want = {step + 1: Counter(sampler.ids(step).tolist()) for step in range(spec.steps)}
    assert run.samples() == want


def test_a_killed_worker_is_replaced_on_a_new_member_and_nothing_is_lost(start: Callable[..., Run]) -> None:
    run = start(at_least=2)
    run.until_step(15)
    survivor, victim = run.events("formed")[0]["pids"]
    os.kill(victim, signal.SIGKILL)
    run.leases.take(1)
    run.until("the break", lambda: run.events("broke"))
    run.leases.give(1)
    result = run.future.result(timeout=WAIT_S)
    assert (result.steps, result.restarts, result.resizes) == (60, 1, 0)
    assert result.recovery_s > 0
    assert run.events("formed")[-1]["pids"][0] == survivor
    assert run.leases.reports[-1]["step"] == 60
    assert_undisturbed(run)


def test_on_a_notice_it_checkpoints_shrinks_and_grows_when_the_member_returns(start: Callable[..., Run]) -> None:
    run = start(at_least=1, checkpoint_every=1000, collective_timeout_s=60.0)
    run.until_step(5)
    run.leases.notice(1)
    run.until("the smaller gang", lambda: [event["world"] for event in run.events("formed")] == [2, 1])
    run.leases.take(1)
    survivor = run.events("formed")[0]["pids"][0]
    os.kill(survivor, signal.SIGSTOP)  # or it would be done before the new worker has its imports
    run.leases.give(1)
    run.until("the new worker", lambda: len(run.events("ready")) == 3)
    os.kill(survivor, signal.SIGCONT)
    result = run.future.result(timeout=WAIT_S)
    assert (result.steps, result.restarts, result.resizes) == (60, 0, 2)
    assert [event["world"] for event in run.events("formed")] == [2, 1, 2]
    assert_undisturbed(run)


def test_a_hung_rank_is_named_with_its_host_and_replaced(start: Callable[..., Run]) -> None:
    run = start(at_least=2, collective_timeout_s=3.0)
    run.until_step(12)
    survivor, victim = run.events("formed")[0]["pids"]
    os.kill(victim, signal.SIGSTOP)
    result = run.future.result(timeout=WAIT_S)
    (hung,) = run.events("hung")
    assert hung["rank"] == 1
    assert "member 1 (node-1 127.0.0.1)" in hung["host"]
    assert "step" in hung["phase"]
    assert (result.steps, result.restarts) == (60, 1)
    assert run.events("formed")[-1]["pids"][0] == survivor
    assert_undisturbed(run)


def test_what_is_wrong_with_the_run_itself_ends_it_with_that_error(start: Callable[..., Run]) -> None:
    run = start(at_least=2, steps=12)
    assert run.future.result(timeout=WAIT_S).steps == 12
    run.leases.clear()
    again = start(at_least=2, steps=14, seed=5)
    with pytest.raises(CheckpointError, match="another model, seed or batch"):
        again.future.result(timeout=WAIT_S)


def test_a_lost_lease_ends_the_driver(start: Callable[..., Run]) -> None:
    run = start(at_least=1, steps=100000)
    run.leases.end()
    with pytest.raises(LeaseLostError):
        run.future.result(timeout=WAIT_S)
