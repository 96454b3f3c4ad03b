"""Snapshots are as frequent as costs a hundredth of the time, whatever makes them cost."""

from __future__ import annotations

import itertools

import pytest

from raytide.actors.trainer.checkpoint.peers.snapshot import FIRST, MOST, SHARE, SnapshotCadence


def trained(steps: int, step_s: float, stall_s: float, slower_s: float, beside: int = 1) -> tuple[list[int], float]:
    """Returns the steps after which a snapshot was taken, and the share of the time that they cost."""
    cadence, taken, last, spent_s, total_s = SnapshotCadence(), [], 0, 0.0, 0.0
    for step in range(1, steps + 1):
        is_beside = bool(taken) and step - taken[-1] <= beside
        took_s, waited_s = step_s + slower_s * is_beside, stall_s * (bool(taken) and taken[-1] == step - 1)
        spent_s, total_s = spent_s + waited_s + slower_s * is_beside, total_s + took_s + waited_s
        cadence.record(took_s, waited_s, is_beside)
        if cadence.is_due(step, last):
            taken.append(step)
            last = step
    return taken, spent_s / total_s


@pytest.mark.parametrize(
    ("stall_s", "slower_s", "every"),
    [(0.0005, 0.0, 1), (0.005, 0.0, 5), (0.002, 0.002, 4), (0.0, 0.03, 30), (0.04, 0.05, 90)],
)
def test_snapshots_are_as_frequent_as_costs_a_hundredth(stall_s: float, slower_s: float, every: int) -> None:
    taken, share = trained(4000, 0.1, stall_s, slower_s)
    gaps = [after - before for before, after in itertools.pairwise(taken[len(taken) // 5 :])]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(every, abs=1)
    assert share <= 1.3 * SHARE


def test_a_snapshot_after_each_step_is_left_out_now_and_then_to_see_a_step_without_one() -> None:
    taken, _ = trained(1000, 0.1, 0.0001, 0.0)
    left_out = set(range(taken[20], 1000)) - set(taken)
    assert 10 <= len(left_out) <= 16


def test_ten_steps_apart_until_something_is_known_and_never_more_than_a_thousand() -> None:
    cadence = SnapshotCadence()
    assert not cadence.is_due(FIRST - 1, 0) and cadence.is_due(FIRST, 0)
    for _ in range(5):
        cadence.record(0.001, 0.0, False)
        cadence.record(0.001, 100.0, True)
    assert cadence.every == MOST
