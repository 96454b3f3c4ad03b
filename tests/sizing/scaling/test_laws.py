"""Scaling laws against the published optima (Hoffmann 2203.15556, Besiroglu 2404.10102)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.sizing.scaling.laws import (
    APPROACH_1,
    BALANCE,
    BESIROGLU,
    HOFFMANN,
    Allocation,
    ScalingLaw,
    approach_1,
    approach_2,
    cheapest_for_loss,
    over_trained,
    repeated_loss,
    repeated_optimum,
)


@pytest.mark.parametrize(
    ("law", "flops", "parameters", "tokens", "ratio", "loss"),
    [
        (HOFFMANN, 5.76e23, 3.219e10, 2.982e12, 92.7, 1.9307),
        (BESIROGLU, 5.76e23, 7.225e10, 1.329e12, 18.4, 1.9744),
        (BESIROGLU, 1e20, 8.535e8, 1.953e10, 22.9, 2.5534),
        (BESIROGLU, 1e21, 2.778e9, 5.999e10, 21.6, 2.3055),
    ],
)
def test_the_optimum_is_the_published_one(
    law: ScalingLaw, flops: float, parameters: float, tokens: float, ratio: float, loss: float
) -> None:
    found = law.optimum(flops)
    assert found.parameters == pytest.approx(parameters, rel=2e-4)
    assert found.tokens == pytest.approx(tokens, rel=2e-4)
    assert found.tokens / found.parameters == pytest.approx(ratio, abs=0.06)
    assert found.loss == pytest.approx(loss, abs=6e-5)
    assert found.flops == pytest.approx(flops)


def test_losses_of_chinchilla_and_gopher() -> None:
    assert BESIROGLU.loss(70e9, 1.4e12) == pytest.approx(1.9739, abs=5e-5)
    assert BESIROGLU.loss(280e9, 300e9) == pytest.approx(1.9996, abs=5e-5)
    assert BESIROGLU.size_exponent == pytest.approx(0.513, abs=0.02)


def test_a_budget_of_1e23_buys_a_model_of_29e9_parameters() -> None:
    """200e9 parameters on 300e9 tokens, and 50e9 on 1e12, both cost more than 1e23 FLOPs."""
    found = BESIROGLU.optimum(1e23)
    assert found.parameters == pytest.approx(29e9, rel=0.02)
    assert found.tokens == pytest.approx(570e9, rel=0.02)
    assert min(BESIROGLU.allocation(200e9, 300e9).flops, BESIROGLU.allocation(50e9, 1e12).flops) > 1e23


@given(st.floats(17, 27), st.floats(-1, 1).filter(lambda x: abs(x) > 0.05))
def test_no_other_split_of_a_budget_is_better(log_flops: float, shift: float) -> None:
    best = BESIROGLU.optimum(10**log_flops)
    assert BESIROGLU.loss(best.parameters * 10**shift, best.tokens / 10**shift) > best.loss


def test_approach_1_passes_through_its_table_and_agrees_with_approach_2() -> None:
    for parameters, tokens, flops in APPROACH_1:
        assert approach_1(flops) == pytest.approx((parameters, tokens))
    assert approach_2(5.76e23)[0] == 67e9
    assert approach_2(1e22)[0] == pytest.approx(approach_1(1e22)[0], rel=0.1)


def test_repeated_data_equals_the_published_losses_to_the_last_digit() -> None:
    assert repeated_loss(6.34e9, 242e9, 25e9) == 2.2256440889984477
    assert repeated_loss(8.67e9, 178e9, 25e9) == 2.2269634075087867
    assert pytest.approx(0.225802, abs=5e-7) == BALANCE


def test_the_best_split_with_little_data_repeats_it_nine_times() -> None:
    found = repeated_optimum(1e22, 25e9)
    assert found.parameters == pytest.approx(7.022e9, rel=1e-3)
    assert found.tokens == pytest.approx(237.3e9, rel=1e-3)
    assert found.epochs == pytest.approx(9.49, abs=0.01)
    assert found.loss <= repeated_loss(7.022e9, 237.3e9, 25e9) + 1e-9


@given(st.floats(8, 11), st.floats(9, 12), st.floats(9, 12))
def test_repeating_is_never_better_than_new_data(n: float, d: float, unique: float) -> None:
    assert repeated_loss(10**n, 10**d, min(10**unique, 10**d)) >= repeated_loss(10**n, 10**d, 10**d) - 1e-12


def lifetime_flops(plan: Allocation, served_tokens: float) -> float:
    return plan.flops + 2.0 * plan.parameters * served_tokens


def test_serving_many_tokens_makes_a_smaller_model_cheaper() -> None:
    best = BESIROGLU.optimum(1e22)
    plans = [over_trained(1e22, served) for served in (0.0, 1e11, 1e13)]
    assert plans[0].parameters == pytest.approx(best.parameters, rel=1e-3)
    assert plans[0].parameters > plans[1].parameters > plans[2].parameters
    for served, plan in zip((0.0, 1e11, 1e13), plans, strict=True):
        assert plan.loss == pytest.approx(best.loss)
        assert lifetime_flops(plan, served) <= lifetime_flops(best, served) * (1 + 1e-9)


def test_a_loss_below_the_irreducible_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.8 is not above"):
        cheapest_for_loss(1.8, 1e12)
