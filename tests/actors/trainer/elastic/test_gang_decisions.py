"""Decisions about gangs, without a process: who is seated, which breaks count, and the cost of a recovery."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.elastic.rank_assignment import Key, assign_ranks, most_ranks, usable
from raytide.actors.trainer.elastic.recovery import Recovery, ScalingEfficiency
from raytide.actors.trainer.elastic.restart_policy import MAX_FAILURES, RestartPolicy
from raytide.actors.trainer.elastic.stragglers import LEAST_STEPS, RankTimes
from raytide.actors.trainer.elastic.worker import TrainWorker
from raytide.actors.trainer.types import GROW_AFTER, PATIENCE, MicroBatchLimit, StepResult, WorkerStatus
from raytide.core.errors import ConfigError, TrainError
from raytide.core.objects.gang import GangSpec, Member, Shape
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec


@dataclass(frozen=True)
class Seat:
    key: Key


def of(member: int, slot: int = 0, incarnation: int = 0) -> Seat:
    return Seat((member, incarnation, slot, "group"))


def shape(members: int, at_least: int | None = None, gpus: int = 0) -> Shape:
    return Shape(members=members, min_members=at_least, resources={"CPU": 1.0, "GPU": float(gpus)})


def run_spec(**changes: object) -> TrainSpec:
    return TrainSpec(dataset="d", out="o", steps=1).model_copy(update=changes)


def multiples_of(size: int) -> Callable[[int], int]:
    return lambda ranks: ranks // size * size


@given(
    members=st.sets(st.integers(0, 9)),
    held=st.sets(st.integers(0, 9)),
    size=st.integers(1, 3),
    most=st.integers(1, 10),
    gpus=st.sampled_from([0, 2]),
    at_least=st.integers(1, 4),
)
def test_seats_are_usable_in_rank_order_and_go_to_holders_first(
    members: set[int], held: set[int], size: int, most: int, gpus: int, at_least: int
) -> None:
    slots = max(1, gpus)
    able = [of(member, slot) for member in members for slot in range(slots)]
    before = [of(member, slot) for member in held for slot in range(slots)]
    seats = assign_ranks(able, shape(10, at_least, gpus), most=most, usable=multiples_of(size), current=before)
    assert seats == sorted(set(seats), key=lambda seat: seat.key)
    assert set(seats) <= set(able)
    if len(members) < at_least:
        assert seats == []
    else:
        assert len(seats) == min(len(able), most) // size * size
        left = set(able) - set(seats)
        assert not (any(seat in before for seat in left) and any(seat not in before for seat in seats))


def test_a_member_that_lacks_a_rank_takes_no_seat() -> None:
    able = [of(0, 0), of(0, 1), of(1, 1)]
    assert assign_ranks(able, shape(2, 1, gpus=2), most=4, usable=multiples_of(1)) == able[:2]


def test_spares_are_asked_for_beyond_the_gang_and_never_needed_to_begin() -> None:
    spec = run_spec(spares=2, gang=GangSpec(shapes=(shape(4), shape(3, 1))))
    assert [(s.members, s.at_least) for s in spec.asks.shapes] == [(6, 4), (5, 1)]
    assert [most_ranks(spec, s) for s in spec.asks.shapes] == [4, 3]
    assert run_spec(gang=GangSpec(shapes=(shape(4),))).asks.shapes[0].min_members is None


def test_a_layout_uses_what_it_can_and_nobody_when_they_are_too_few() -> None:
    spec = run_spec(layout=Parallelism(tensor=2, replicate=2))
    assert [usable(spec, ranks) for ranks in (0, 1, 3, 4, 7, 8)] == [0, 0, 0, 4, 4, 8]


def test_the_same_step_broken_too_often_ends_the_run() -> None:
    policy = RestartPolicy("run", furthest_step=5)
    for _ in range(MAX_FAILURES + 1):
        policy.record_break("why", [(0, 0)])
        policy.raise_if_exhausted()
    policy.record_break("the last", [(0, 0)])
    with pytest.raises(TrainError, match="at step 5; last: the last"):
        policy.raise_if_exhausted()


@given(st.lists(st.sampled_from(["break", "step"]), max_size=60))
def test_a_step_further_than_ever_clears_what_was_charged(deeds: list[str]) -> None:
    policy, in_a_row = RestartPolicy("run"), -1
    for deed in deeds:
        if deed == "step":
            policy.record_step(policy.furthest_step + 1)
            in_a_row = -1
        else:
            policy.record_break("why", [])
            in_a_row += 1
        if in_a_row > MAX_FAILURES:
            with pytest.raises(TrainError):
                policy.raise_if_exhausted()
            return
        policy.raise_if_exhausted()


@pytest.mark.parametrize("is_early", [False, True])
def test_lost_members_never_count_whether_the_lease_says_so_before_their_ranks_died_or_after(is_early: bool) -> None:
    policy = RestartPolicy("run")
    for incarnation in range(20):
        if is_early:
            policy.record_members([Member(0, incarnation=incarnation + 1)])
        policy.record_break("why", [(0, incarnation)])
        policy.record_members([Member(0, incarnation=incarnation + 1)])
        policy.raise_if_exhausted()
    for _ in range(MAX_FAILURES + 1):
        policy.record_break("why", [(1, 0)])
    policy.record_members([Member(0, incarnation=20), Member(1)])
    with pytest.raises(TrainError):
        policy.raise_if_exhausted()
    policy.record_members([Member(0, incarnation=20), Member(1, incarnation=1)])
    policy.raise_if_exhausted()


def test_a_worker_that_never_starts_ends_the_run_unless_its_member_is_lost() -> None:
    policy = RestartPolicy("run")
    for _ in range(MAX_FAILURES):
        for slot in range(8):
            policy.record_failed_start((0, 0, slot, "group"), "the index: 503")
        policy.raise_if_exhausted()
    policy.record_failed_start((0, 0, 3, "group"), "the index: 504")
    with pytest.raises(TrainError, match=r"failed 6 times .* last: the index: 504"):
        policy.raise_if_exhausted()
    policy.record_members([Member(0, incarnation=1)])
    policy.raise_if_exhausted()
    policy.record_members([])
    policy.record_step(1)
    policy.raise_if_exhausted()


def test_a_recovery_says_what_was_lost_and_where_the_time_went() -> None:
    recovery = Recovery(began_s=10.0, leave_s=0.25, ended_s=11.0, step=9, assigned_s=11.5)
    first = StepResult(step=8, loss=1.0, lr=0.1, grad_norm=1.0, tokens=1, step_s=1.0, data_s=0.0, world=3)
    laps = {"join": 0.1, "build": 0.2, "load": 0.3, "first_step": 0.4}
    told = recovery.finished_event(12.5, first, WorkerStatus(2, "after step 8", 0.0, phase_times=laps, source="memory"))
    assert told == {
        "seconds": 2.5,
        "world": 3,
        "step": 8,
        "steps_lost": 2,
        "source": "memory",
        "detect_s": 0.75,
        "leave_s": 0.25,
        "wait_s": 0.5,
        "join_s": 0.1,
        "build_s": 0.2,
        "load_s": 0.3,
        "first_step_s": 0.4,
    }


def test_a_halved_microbatch_is_tried_again_later_and_later_and_at_once_by_a_larger_gang() -> None:
    limit = MicroBatchLimit("run")
    assert limit.bound(8) == 8 and not limit.grow(8, 4)
    assert (limit.halve(8, 4), limit.halve(4, 4)) == (4, 2)
    limit.record_steps(PATIENCE * GROW_AFTER - 1)
    assert not limit.grow(8, 4)
    limit.record_steps(1)
    assert limit.grow(8, 4) and limit.bound(8) == 4
    assert not limit.grow(8, 4), "each doubling has to prove itself"
    limit.record_steps(PATIENCE**2 * GROW_AFTER)
    assert limit.grow(8, 4) and limit.bound(8) == 8
    limit.halve(8, 4)
    assert not limit.grow(8, 2)
    assert limit.grow(8, 5) and limit.bound(8) == 8


def test_a_microbatch_of_one_sequence_cannot_be_halved() -> None:
    with pytest.raises(TrainError, match="even with a microbatch of one sequence"):
        MicroBatchLimit("run").halve(1, 1)


def test_scaling_is_a_rank_s_throughput_against_that_in_the_smallest_gang() -> None:
    scaling = ScalingEfficiency()
    assert scaling.of(2) is None
    scaling.record(4, 3600.0, 20)
    assert scaling.of(4) is None, "nothing to compare with"
    scaling.record(2, 2000.0, 20)
    assert scaling.of(4) == pytest.approx(0.9)
    scaling.record(4, 4000.0, 20)  # one half-life
    assert scaling.of(4) == pytest.approx(0.95)
    assert scaling.of(2) is None


def test_a_worker_has_the_settings_of_nccl_that_the_spec_names_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nccl"):
        TrainSpec.parse({"dataset": "d", "out": "o", "steps": 1, "nccl": {"LD_PRELOAD": "x"}}, where="spec")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(gc, "freeze", lambda: None)
    TrainWorker(run_spec(nccl={"NCCL_SOCKET_IFNAME": "eth1"}), 1, "host").ready()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


def took(own_s: float, wait_s: float) -> StepResult:
    times = {"data": own_s / 4, "wait": wait_s, "forward_backward": 3 * own_s / 4 + wait_s}
    return StepResult(1, 1.0, 0.1, 1.0, 8, own_s + 2 * wait_s, 0.0, 3, times=times, forward_s=own_s / 4)


def test_the_rank_for_which_the_others_wait_is_the_slowest_however_long_its_steps_are() -> None:
    times = RankTimes()
    for _ in range(LEAST_STEPS - 1):
        for rank, own_s in enumerate((1.0, 3.0, 1.5)):
            times.record(rank, [took(own_s, wait_s=(3.0 - own_s) / 2)])
    assert times.slowest() is None, "the first steps of a generation say little"
    for rank, own_s in enumerate((1.0, 3.0, 1.5)):
        times.record(rank, [took(own_s, wait_s=(3.0 - own_s) / 2)])
    assert times.slowest() == (1, pytest.approx(3.0 / 1.25))
    for _ in range(200):
        times.record(1, [took(1.0, wait_s=1.0)])
    assert times.slowest() == (2, pytest.approx(1.5, rel=0.01)), "what is past is forgotten"


def test_a_rank_alone_holds_up_nobody() -> None:
    times = RankTimes()
    times.record(0, [took(1.0, wait_s=0.0)] * 20)
    assert times.slowest() is None
