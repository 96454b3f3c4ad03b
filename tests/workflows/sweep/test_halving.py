"""Successive halving: its rule, and its cost and regret over simulated loss curves."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.workflows.sweep.halving import goes_on, reached, rung_of_end, smoothed
from raytide.workflows.sweep.spec import HalvingSpec, SweepSpec

THIRDS = HalvingSpec(first=1, factor=3)


def test_the_best_third_goes_on() -> None:
    values = [5.0, 4.0, 3.0, 2.0, 1.0, 6.0]
    kept = [value for at, value in enumerate(values) if goes_on(value, values[:at] + values[at + 1 :], THIRDS, "min")]
    assert kept == [2.0, 1.0]
    best = [value for at, value in enumerate(values) if goes_on(value, values[:at] + values[at + 1 :], THIRDS, "max")]
    assert best == [5.0, 6.0]


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=40, unique=True), st.integers(2, 5))
def test_of_those_at_a_rung_just_the_best_share_goes_on_and_never_none(values: list[float | None], factor: int) -> None:
    spec = HalvingSpec(first=1, factor=factor)
    kept = [at for at, value in enumerate(values) if goes_on(value, values[:at] + values[at + 1 :], spec, "min")]
    assert len(kept) == max(1, len(values) // factor)
    ranked = sorted(values, key=lambda value: math.inf if value is None else value)
    assert {values[at] for at in kept} == set(ranked[: len(kept)])


def test_no_trial_ends_before_enough_have_reached_the_rung() -> None:
    patient = HalvingSpec(first=1, factor=3, least=4)
    assert goes_on(9.0, [1.0, 1.0], patient, "min")
    assert not goes_on(9.0, [1.0, 1.0, 1.0, 1.0], patient, "min")


def test_a_trial_is_judged_at_its_highest_rung_and_again_when_others_arrive() -> None:
    alone = {3: 2.0}
    assert rung_of_end(alone, [], THIRDS, "min") is None
    assert rung_of_end(alone, [{3: 1.0}], THIRDS, "min") == 3
    assert rung_of_end({3: 2.0, 9: 1.5}, [{3: 1.0}], THIRDS, "min") is None, "alone at its rung"
    assert rung_of_end({}, [{3: 1.0}], THIRDS, "min") is None


def test_a_diverged_trial_is_the_worst() -> None:
    assert rung_of_end({3: None}, [{3: 9e9}], THIRDS, "min") == 3
    assert rung_of_end({3: 9e9}, [{3: None}], THIRDS, "min") is None


def test_the_value_at_a_rung_is_a_mean_of_the_steps_before_it() -> None:
    curve = [(step, float(step)) for step in range(1, 41)]
    assert reached(curve, (10, 30, 90)) == {10: 10.0, 30: pytest.approx(29.0)}
    assert reached([], (10,)) == {}
    assert reached([(1, 1.0), (10, math.nan)], (10,)) == {10: None}
    assert smoothed([(25, 2.0)], 10) == 2.0, "a script that reports now and then"


def curves(seed: int) -> list[list[tuple[int, float]]]:
    """Returns the losses of 16 trials over 200 steps: each a power law with a floor of its own, and noise of 1 %.

    Rates, floors and noise are like those of small language models (Kaplan et al. 2020, figure 4: early order mostly,
    but not always, predicts the final one).
    """
    draw = random.Random(seed)
    found = []
    for _ in range(16):
        floor, rate = draw.uniform(2.0, 4.0), draw.uniform(0.25, 0.6)
        start = draw.uniform(5.5, 6.5)
        found.append(
            [(step, (floor + (start - floor) * step**-rate) * (1 + draw.gauss(0, 0.01))) for step in range(1, 201)]
        )
    return found


def simulate(trials: list[list[tuple[int, float]]], sweep: SweepSpec, nodes: int) -> tuple[float, float, float]:
    """Returns the share of all steps that ASHA ran, the loss it found and the best one there was.

    `nodes` trials run at a time, one step each per tick; decisions are the planner's.
    """
    assert sweep.asha is not None
    steps = len(trials[0])
    rungs = sweep.rungs(steps)
    done = [0] * len(trials)
    at: list[dict[int, float | None]] = [{} for _ in trials]
    over = [False] * len(trials)
    while not all(over):
        running = [number for number in range(len(trials)) if not over[number]][:nodes]
        for number in running:
            done[number] += 1
            at[number] = reached(trials[number][: done[number]], rungs)
            over[number] = done[number] == steps
        for number in running:
            others = [each for other, each in enumerate(at) if other != number]
            if not over[number] and rung_of_end(at[number], others, sweep.asha, sweep.mode) is not None:
                over[number] = True
    finals = [smoothed(curve, steps) or math.inf for curve in trials]
    found = min(final for final, each in zip(finals, done, strict=True) if each == steps)
    return sum(done) / (steps * len(trials)), found, min(finals)


def test_asha_costs_at_most_45_percent_of_16_whole_runs_on_4_nodes_and_finds_one_within_2_percent_of_the_best() -> None:
    sweep = SweepSpec.parse(
        {"space": {"lr": {"low": 0.1, "high": 1.0}}, "trials": 16, "asha": {"first": 20, "factor": 3}}, where="sweep"
    )
    results = [simulate(curves(seed), sweep, nodes=4) for seed in range(200)]
    assert max(cost for cost, _, _ in results) <= 0.45
    within = sum(found <= 1.02 * best for _, found, best in results) / len(results)
    assert within >= 0.95, f"{within:.0%} of 200 seeds"
    mean_regret = sum(found / best - 1 for _, found, best in results) / len(results)
    assert mean_regret <= 0.02
