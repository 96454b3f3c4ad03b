from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.registry.rollout.ab_test import AbSpec, Arm, Comparison, look
from raytide.registry.rollout.traffic import TrafficSplit

SPLIT = TrafficSplit(endpoint="chat", champion=1, challenger=2, percent=50)
Outcome = Callable[[float, random.Random], float]
"""Draws an outcome from the user's trait between 0 and 1, which is the same at each request, and random numbers."""


def experiment(seed: int, spec: AbSpec, outcome: Outcome, shift: float = 0.0, looks: int = 60) -> list[Comparison]:
    """Looks after every 50 requests of 300 users, some of whom send many more than others."""
    rng = random.Random(seed)
    users = []
    for number in range(300):
        user = f"user-{seed}-{number}"
        users.append((SPLIT.revision_of(user), SPLIT.group_of(user), rng.random()))
    weights = [rng.paretovariate(2.0) for _ in users]
    arms, seen = {1: Arm(), 2: Arm()}, [Comparison()]
    for _ in range(looks):
        for revision, group, trait in rng.choices(users, weights, k=50):
            arms[revision].add(group, outcome(trait, rng) + (shift if revision == 2 else 0.0))
        seen.append(look(spec, arms[1], arms[2], seen[-1]))
    return seen


def thumbs(trait: float, rng: random.Random) -> float:
    return float(rng.random() < 0.1 + 0.7 * trait)  # users differ in what they like


def seconds(trait: float, rng: random.Random) -> float:
    return (0.5 + 1.5 * trait) * rng.lognormvariate(0.0, 0.7)


def alike(trait: float, rng: random.Random) -> float:
    return trait  # all requests of a user have the same outcome


@pytest.mark.parametrize(("outcome", "effect"), [(thumbs, 0.1), (seconds, 0.2), (alike, 0.1)])
def test_an_a_a_test_of_200_seeds_declares_a_winner_in_at_most_5_percent(outcome: Outcome, effect: float) -> None:
    spec = AbSpec(effect=effect)
    winners = [experiment(seed, spec, outcome)[-1].winner for seed in range(200)]
    assert sum(winner != "" for winner in winners) <= 10


@pytest.mark.parametrize(("better", "winner"), [("higher", "b"), ("lower", "a")])
def test_a_real_difference_is_found_and_its_interval_holds_at_every_look(better: str, winner: str) -> None:
    spec = AbSpec.model_validate({"effect": 0.2, "better": better})
    runs = [experiment(seed, spec, seconds, shift=0.6, looks=120) for seed in range(40)]
    assert sum(run[-1].winner == winner for run in runs) >= 38
    assert not any(each.winner not in ("", winner) for run in runs for each in run)
    assert sum(all(each.low <= 0.6 <= each.high for each in run) for run in runs) >= 36


def test_the_p_value_never_rises_and_a_winner_stays() -> None:
    run = experiment(1, AbSpec(effect=0.2), seconds, shift=0.6, looks=120)
    assert all(after.p_value <= before.p_value for before, after in pairwise(run))
    won = [each.winner for each in run if each.winner]
    assert won
    assert set(won) == {"b"}
    assert [each.winner for each in run[-len(won) :]] == won


def test_the_interval_and_the_p_value_agree() -> None:
    """Zero leaves the interval when the present likelihood ratio reaches 1 / alpha."""
    for seed in range(10):
        for each in experiment(seed, AbSpec(effect=0.2), seconds, shift=0.3):
            if math.isfinite(each.low) and not each.low <= 0.0 <= each.high:
                assert each.p_value <= 0.05 + 1e-9


def test_a_look_waits_for_requests_and_for_users() -> None:
    spec, a, b = AbSpec(effect=0.1, requests=40), Arm(), Arm()
    assert look(spec, a, b).reason == "a has 0 of 40 requests"
    for at in range(40):
        a.add(at, float(at % 2))
        b.add(at % 10, float(at % 2))
    assert look(spec, a, b).reason == "b has users in 10 groups; 20 are needed"
    same = Arm()
    for at in range(40):
        same.add(at, 1.0)
    assert look(spec, same, same).reason == "all observations are equal"
    with pytest.raises(ValueError, match="no observation"):
        a.add(0, math.nan)


@given(values=st.lists(st.tuples(st.integers(0, 99), st.integers(-5, 5)), min_size=30, max_size=80))
def test_the_mean_is_that_of_all_groups(values: list[tuple[int, int]]) -> None:
    whole = Arm()
    for group, value in values:
        whole.add(group, value)
    assert whole.mean == pytest.approx(sum(value for _, value in values) / len(values))


def test_the_variance_of_independent_observations_is_the_usual_one() -> None:
    rng, arm = random.Random(0), Arm()
    for _ in range(20_000):
        arm.add(rng.randrange(100), rng.gauss(3.0, 2.0))
    assert arm.variance == pytest.approx(4.0 / 20_000, rel=0.4)


def test_equal_observations_have_no_winner_although_their_sums_are_rounded() -> None:
    for seed in range(10):
        rng, arms, found = random.Random(seed), (Arm(), Arm()), None
        for number in range(2500):
            arms[rng.random() < 0.5].add(rng.randrange(100), 0.3)
            if number > 500 and number % 10 == 0:
                found = look(AbSpec(effect=0.015), *arms, found)
        assert found is not None and found.winner == ""
