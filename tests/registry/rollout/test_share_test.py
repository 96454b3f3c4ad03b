from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.registry.rollout.share_test import BadShare, ShareTest, _block, _likelihood_ratio, _shifted

_SHARES = st.floats(0.01, 0.99)


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@given(
    n_a=st.integers(0, 6), n_b=st.integers(0, 6), theta=_SHARES, odds=st.floats(1.01, 200), true=_SHARES, less=_SHARES
)
def test_a_block_is_worth_at_most_one_on_average_if_b_is_no_worse(
    n_a: int, n_b: int, theta: float, odds: float, true: float, less: float
) -> None:
    """The property on which everything rests, computed exactly over all outcomes."""
    for true_b in (true, true * less):
        mean = sum(
            _binomial(n_a, x, true)
            * _binomial(n_b, y, true_b)
            * math.exp(_block(BadShare(n_a, x), BadShare(n_b, y), theta, _shifted(theta, odds)))
            for x in range(n_a + 1)
            for y in range(n_b + 1)
        )
        assert mean <= 1 + 1e-9


@given(n=st.integers(0, 8), limit=_SHARES, odds=st.floats(1.01, 200), less=st.floats(0, 1))
def test_a_comparison_with_a_limit_is_worth_at_most_one_below_it(
    n: int, limit: float, odds: float, less: float
) -> None:
    alternative, true = _shifted(limit, odds), limit * less
    mean = sum(
        _binomial(n, k, true) * math.exp(_likelihood_ratio(BadShare(n, k), alternative, limit)) for k in range(n + 1)
    )
    assert mean <= 1 + 1e-9


@pytest.mark.parametrize("share", [0.002, 0.05, 0.4])
def test_equal_shares_are_called_different_at_most_as_often_as_alpha_says(share: float) -> None:
    """200 seeds, a look at every block, and a split that changes."""
    alarms = 0
    for seed in range(200):
        rng, test = random.Random(seed), ShareTest()
        for block in range(150):
            n_a, n_b = rng.randrange(40), rng.randrange(1 + block)
            test = test.updated(_drawn(rng, n_a, share), _drawn(rng, n_b, share))
            if test.e_value >= 1 / 0.05:
                alarms += 1
                break
    assert alarms <= 10


@pytest.mark.parametrize(("good", "bad", "most"), [(0.0, 1.0, 10), (0.01, 0.3, 60), (0.01, 0.05, 1500)])
def test_a_worse_share_is_found_after_few_requests(good: float, bad: float, most: int) -> None:
    for seed in range(20):
        rng, test = random.Random(seed), ShareTest().updated(_drawn(random.Random(seed), 500, good), BadShare())
        while test.e_value < 1000:
            test = test.updated(_drawn(rng, 5, good), _drawn(rng, 1, bad))
            assert test.b.total <= most


def test_a_better_share_is_no_evidence() -> None:
    rng, test = random.Random(0), ShareTest()
    for _ in range(200):
        test = test.updated(_drawn(rng, 20, 0.2), _drawn(rng, 20, 0.02))
    assert test.e_value < 1e-3
    assert test.excess < -0.1


def test_one_side_alone_is_no_evidence_and_a_share_is_part_of_a_whole() -> None:
    assert ShareTest().updated(BadShare(), BadShare(50, 50)).e_value == 1.0
    assert ShareTest().updated(BadShare(50, 0), BadShare()).e_value == 1.0
    for total, bad in ((1, 2), (1, -1)):
        with pytest.raises(ValueError, match="is no share"):
            BadShare(total, bad)


def test_overwhelming_evidence_is_infinite_and_no_overflow() -> None:
    assert ShareTest().updated(BadShare(10**6, 0), BadShare(10**6, 10**6)).e_value == math.inf


@given(total=st.integers(1, 10_000), part=st.floats(0, 1))
def test_the_upper_limit_is_above_the_share_and_comes_closer_with_data(total: int, part: float) -> None:
    share = BadShare(total, int(total * part))
    more = BadShare(100 * share.total, 100 * share.bad)
    assert share.mean <= more.upper(0.01) + 1e-9
    assert more.upper(0.01) <= share.upper(0.01) + 1e-9 <= 1 + 2e-9
    assert BadShare().upper(0.01) == 1.0


def _drawn(rng: random.Random, n: int, share: float) -> BadShare:
    return BadShare(n, sum(rng.random() < share for _ in range(n)))
