"""Ranks that die, hang, run out of memory, leave and come: the losses stay those of one process, with its samples."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.actors.trainer.gang_processes import FakeLeases, Run, assert_undisturbed
from tests.actors.trainer.kills import kill_at_random
from tests.actors.trainer.pranks import (
    DiesInBuild,
    DiesInStep,
    HasRoomFor,
    HoldsBefore,
    SleepsInStep,
    SlowFiles,
    SlowInSteps,
    StuckInRead,
)

from raytide.actors.trainer.elastic.driver import run_train
from raytide.core.errors import CheckpointError, ClusterError, ConfigError, LeaseLostError, TrainError
from raytide.core.objects.gang import Member, Shape
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec

Start = Callable[..., Run]


@pytest.fixture
def start(spec: TrainSpec) -> Iterator[Start]:
    """`start(members, at_least, pranks, **changes of the spec)`"""
    runs: list[Run] = []

    def begin(members: int, at_least: int, pranks: Any = None, **changes: Any) -> Run:
        base = {"steps": 40, "checkpoint_every": 5, "record_samples": True, "collective_timeout_s": 20.0}
        shape = Shape(members=members, min_members=at_least, resources={"CPU": 1.0})
        runs.append(Run(spec.model_copy(update=base | changes), shape, pranks))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("slow", "at", "layout"),
    [
        (0, "forward", Parallelism(replicate=2, shard=1)),
        (0, "forward", Parallelism()),
        (1, "forward", Parallelism()),
        (1, "data", Parallelism()),
    ],
)
def test_the_driver_reports_which_rank_the_others_wait_for(
    start: Start, slow: int, at: Any, layout: Parallelism
) -> None:
    slow_s = 0.6 if at == "data" else 0.2  # a forward pass is slow in each layer and microbatch
    run = start(2, 2, {slow: [SlowInSteps(slow_s, at)]}, steps=8, layout=layout)
    run.result()
    told = [report for report in run.leases.reports if "slowest_ratio" in report]
    assert (told[-1]["slowest_rank"], float(told[-1]["slowest_ratio"]) > 1.5) == (slow, True), told[-1]


def test_four_become_two_by_a_death_and_a_notice_and_four_again(start: Start, tmp_path: Path) -> None:
    holds = HoldsBefore(tmp_path, (15, 30, 45))
    run = start(4, 2, {member: [holds] for member in range(4)}, steps=60)
    run.until_step(6)
    kept = {run.pid(0), run.pid(3)}
    os.kill(run.pid(1), signal.SIGKILL)
    run.leases.take(1)
    holds.open(15)
    run.until("three that train", lambda: len(run.events("recovered")) == 1)
    run.leases.notice(2)
    run.until("the notice", lambda: run.events("notice"))
    holds.open(30)
    run.until("two that train", lambda: len(run.events("recovered")) == 2)
    run.leases.take(2)
    run.leases.give(1, 2)
    run.until("new workers", lambda: len(run.events("ready")) == 6)
    holds.open(45)
    result = run.result()
    assert (result.steps, result.restarts, result.resizes) == (60, 1, 2)
    assert run.worlds == [4, 3, 2, 4]
    assert kept < set(run.events("formed")[-1]["pids"])
    assert_undisturbed(run.spec)
    death, notice, growth = run.events("recovered")
    assert (notice["steps_lost"], growth["steps_lost"]) == (0, 0)
    assert max(event["seconds"] for event in (death, notice, growth)) == pytest.approx(result.recovery_s, abs=0.01)
    phases = ("detect_s", "leave_s", "wait_s", "join_s", "build_s", "load_s", "first_step_s")
    assert 0 < sum(death[phase] for phase in phases) <= death["seconds"] + 0.01


def test_a_warm_spare_takes_the_seat_of_a_dead_rank_at_once(start: Start, tmp_path: Path) -> None:
    """The layout uses two of three ranks: the third is ready and idle until then."""
    holds = HoldsBefore(tmp_path, (20,))
    run = start(3, 2, {member: [holds] for member in range(3)}, layout=Parallelism(shard=2))
    run.until_step(6)
    assert run.events("formed")[0]["spare"] == 1
    spare = next(event["pid"] for event in run.events("ready") if event["host"].startswith("member 2 "))
    os.kill(run.pid(0), signal.SIGKILL)
    run.leases.take(0)
    holds.open(20)
    run.result()
    assert run.worlds == [2, 2]
    assert spare in run.events("formed")[-1]["pids"]
    assert len(run.events("ready")) == 3
    assert_undisturbed(run.spec)


def test_a_spare_that_dies_disturbs_nobody_and_is_replaced(start: Start, tmp_path: Path) -> None:
    holds = HoldsBefore(tmp_path, (20,))
    pranks = {member: [holds] for member in range(3)}
    run = start(3, 2, pranks, layout=Parallelism(shard=2))
    run.until_step(3)
    spare = next(event["pid"] for event in run.events("ready") if event["host"].startswith("member 2 "))
    os.kill(spare, signal.SIGKILL)
    run.until("another spare", lambda: len(run.events("ready")) == 4)
    holds.open(20)
    result = run.result()
    assert run.worlds == [2]
    assert (result.restarts, result.resizes) == (0, 0)


def test_a_hung_rank_is_named_with_its_host_and_its_code_and_replaced(start: Start, tmp_path: Path) -> None:
    """One that sleeps in a step, one whose data never comes, one that does not answer at all."""
    holds = HoldsBefore(tmp_path, (30,))
    pranks = {0: [holds], 1: [SleepsInStep(7), StuckInRead(14), holds]}
    run = start(2, 2, pranks, collective_timeout_s=8.0)
    run.until_step(21)
    os.kill(run.pid(1), signal.SIGSTOP)
    holds.open(30)
    result = run.result()
    sleeping, reading, stopped = run.events("hung")
    assert {event["rank"] for event in (sleeping, reading, stopped)} == {1}
    assert all(event["host"] == "member 1 (node-1 127.0.0.2)" for event in (sleeping, reading, stopped))
    assert "sleeps_here" in sleeping["where"] and "in _step" in sleeping["where"]
    assert "never_reads" in reading["where"]
    assert "trainer/" in stopped["where"]
    assert "step" in stopped["phase"]
    assert (result.steps, result.restarts) == (40, 3)
    assert len({event["pids"][0] for event in run.events("formed")}) == 1, "the other rank kept its process"
    assert_undisturbed(run.spec)


def test_a_rank_that_dies_as_it_builds_costs_no_other_process(start: Start) -> None:
    run = start(3, 2, {2: [DiesInBuild()]}, steps=6, collective_timeout_s=8.0)
    assert run.result().steps == 6
    assert run.events("hung") == []
    assert set(run.events("formed")[0]["pids"][:2]) <= set(run.events("formed")[-1]["pids"])


def test_a_rank_may_be_busy_with_files_for_as_long_as_the_spec_says(start: Start) -> None:
    run = start(2, 2, {0: [SlowFiles(log_s=12.0)], 1: [SlowFiles(data_s=12.0)]}, steps=3, collective_timeout_s=8.0)
    assert (run.result().restarts, run.events("hung")) == (0, [])


def test_out_of_memory_halves_the_micro_batch_at_equal_global_batch(start: Start) -> None:
    pranks = {index: [HasRoomFor(1)] for index in (0, 1)}
    run = start(2, 2, pranks, micro_batch=4, steps=8)
    result = run.result()
    assert [(event["was"], event["micro_batch"]) for event in run.events("oom")] == [(4, 2), (2, 1)]
    assert (result.steps, result.restarts) == (8, 0)
    assert_undisturbed(run.spec)


def test_a_model_that_does_not_fit_one_sequence_ends_the_run(start: Start) -> None:
    run = start(1, 1, {0: [HasRoomFor(0)]}, micro_batch=1, steps=2)
    with pytest.raises(TrainError, match="runs out of memory even with a microbatch of one sequence"):
        run.result()


def test_a_rank_that_dies_at_the_same_step_each_time_ends_the_run(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.actors.trainer.elastic.restart_policy.MAX_FAILURES", 2)
    run = start(2, 2, {1: [DiesInStep(7)] * 9}, steps=8)
    with pytest.raises(TrainError, match="times in a row at step 6"):
        run.result()
    assert len(run.events("broke")) == 4, "the first was no repetition, and one is one too many"


def test_what_is_wrong_with_the_run_itself_ends_it_with_that_error(start: Start) -> None:
    assert start(1, 1, steps=5).result().steps == 5
    with pytest.raises(CheckpointError, match="different model, seed or batch"):
        start(1, 1, steps=6, seed=5).result()


class FailsToStart:
    """A worker whose packages are not installed, for a reason of each start."""

    image = ""

    def __init__(self, errors: list[Exception]) -> None:
        self.left = errors

    def __call__(self, spec: TrainSpec, member: Member, shape: Shape) -> FailsToStart:
        self.error = self.left.pop(0)
        return self

    def call(self, method: str, *args: object) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_exception(self.error)
        return answer

    def kill(self) -> None:
        pass


def test_packages_that_do_not_exist_end_the_run_at_their_first_failure_and_an_unreachable_index_does_not(
    spec: TrainSpec,
) -> None:
    leases = FakeLeases(Shape(members=1, resources={"CPU": 1.0}))
    leases.give(0)
    never = FailsToStart([ClusterError("the index: 503"), ConfigError("no such package"), ConfigError("again")])
    with pytest.raises(ConfigError, match="no such package"):
        run_train(spec, leases, "job-1", start=never)
    assert len(never.left) == 1
    unreachable = FailsToStart([ClusterError("the index: 503")] * 9)
    with pytest.raises(TrainError, match=r"failed 6 times .*the index: 503"):
        run_train(spec, leases, "job-1", start=unreachable)


def test_the_workers_of_a_node_that_die_together_as_they_start_are_one_failure(spec: TrainSpec) -> None:
    leases = FakeLeases(Shape(members=1, resources={"CPU": 8.0, "GPU": 8.0}))
    leases.give(0)
    once = FailsToStart([ClusterError("the index: 503")] * 8 + [ConfigError("no such package")] * 8)
    with pytest.raises(ConfigError, match="no such package"):
        run_train(spec, leases, "job-1", start=once)


class Lacks(Run):
    """A run in which no member that comes anew can have its packages."""

    starts = 0

    def _start(self, spec: TrainSpec, member: Member, shape: Shape) -> Any:
        if member.incarnation == 0:
            return super()._start(spec, member, shape)
        self.starts += 1
        return FailsToStart([ConfigError("no such package")])(spec, member, shape)


@pytest.mark.parametrize("at_least", [1, 2])
def test_a_run_goes_on_without_a_member_whose_packages_do_not_exist_unless_it_needs_it(
    spec: TrainSpec, at_least: int, tmp_path: Path
) -> None:
    changes = {"steps": 12, "checkpoint_every": 5, "record_samples": True, "collective_timeout_s": 20.0}
    shape, holds = Shape(members=2, min_members=at_least, resources={"CPU": 1.0}), HoldsBefore(tmp_path, (8,))
    run = Lacks(spec.model_copy(update=changes), shape, {0: [holds], 1: [holds]})
    try:
        run.until_step(3)
        os.kill(run.pid(1), signal.SIGKILL)
        run.leases.take(1)
        run.leases.give(1)
        holds.open(8)
        if at_least == 1:
            assert run.result().steps == 12
            assert run.worlds == [2, 1]
            why = "member 1 (node-1 127.0.0.2): its worker died: no such package"
            assert run.leases.reports[-1]["not_joined"] == why
        else:
            with pytest.raises(ConfigError, match="no such package"):
                run.result()
        assert run.starts == 1
    finally:
        run.close()


def test_a_lost_lease_ends_the_driver(start: Start) -> None:
    run = start(1, 1, steps=100000)
    run.leases.end()
    with pytest.raises(LeaseLostError):
        run.result()


def test_a_notice_too_short_for_a_checkpoint_loses_no_step(start: Start, tmp_path: Path) -> None:
    holds = HoldsBefore(tmp_path, (20,))
    run = start(2, 1, {0: [holds], 1: [holds]}, checkpoint_every=1000)
    run.until_step(6)
    run.leases.notice(1, left_s=0.0)
    taken = run.leases.lease("job-1").version
    run.until("the notice", lambda: run.events("notice"))
    holds.open(20)
    assert run.result().steps == 40
    assert [event["saves"] for event in run.events("notice")] == [False]
    recovered = run.events("recovered")
    assert [(event["source"], event["steps_lost"]) for event in recovered] == [("memory", 0)]
    assert taken in [report["settled"] for report in run.leases.reports], "and says that it has left the seat"
    assert_undisturbed(run.spec)


@pytest.mark.soak
def test_random_kills_end_with_the_curve_of_one_process(start: Start) -> None:
    run = start(3, 1, steps=60, checkpoint_every=3, collective_timeout_s=8.0)
    killed = kill_at_random(run, kills=5, chance=random.Random(11))
    assert len(killed) == 5
    assert run.result().steps == 60
    assert_undisturbed(run.spec)
