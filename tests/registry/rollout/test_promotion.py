from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytide.core.specs.model_version import MetricRule, PromotionRule
from raytide.registry.rollout.ab_test import Comparison
from raytide.registry.rollout.promotion import decide_promotion

PERPLEXITY = PromotionRule(metrics={"ppl": MetricRule(better="lower", limit=12.4, gain=0.1)}, online="ignored")


@pytest.mark.parametrize(
    ("champion", "challenger", "promotes"),
    [(12.0, 11.9, True), (12.0, 11.95, False), (13.0, 12.5, False), (13.0, 12.4, True)],
)
def test_a_metric_must_reach_its_limit_and_improve(champion: float, challenger: float, promotes: bool) -> None:
    decision = decide_promotion(PERPLEXITY, {"ppl": champion}, {"ppl": challenger})
    assert decision.promotes is promotes
    assert all(reason.startswith("ppl: ") for reason in decision.reasons)


def test_the_first_model_needs_only_the_limits() -> None:
    assert decide_promotion(PERPLEXITY, None, {"ppl": 12.0}).promotes
    assert not decide_promotion(PERPLEXITY, None, {"ppl": 13.0}).promotes


def test_what_was_not_evaluated_is_not_promoted() -> None:
    assert decide_promotion(PERPLEXITY, {"ppl": 12.0}, {}).reasons == ("ppl: the challenger was not evaluated",)
    assert decide_promotion(PERPLEXITY, {}, {"ppl": 12.0}).reasons == ("ppl: the champion was not evaluated",)


@pytest.mark.parametrize(
    ("online", "winner", "promotes"),
    [
        ("not_worse", "a", False),
        ("not_worse", "", True),
        ("not_worse", "b", True),
        ("better", "a", False),
        ("better", "", False),
        ("better", "b", True),
        ("ignored", "a", True),
    ],
)
def test_the_a_b_test_must_have_shown_what_the_rule_wants(online: str, winner: str, promotes: bool) -> None:
    rule = PromotionRule.model_validate({"online": online})
    shown = Comparison(winner=winner)  # type: ignore[arg-type]
    assert decide_promotion(rule, {}, {}, shown).promotes is promotes


def test_a_missing_a_b_test_is_not_a_passed_one() -> None:
    assert decide_promotion(PromotionRule(), {}, {}).reasons == ("A/B test: there is none",)
    assert decide_promotion(PromotionRule(), None, {}).promotes


@given(gain=st.floats(-5, 5), old=st.floats(-10, 10), new=st.floats(-10, 10))
def test_higher_and_lower_are_mirror_images(gain: float, old: float, new: float) -> None:
    higher = PromotionRule(metrics={"m": MetricRule(better="higher", gain=gain)}, online="ignored")
    lower = PromotionRule(metrics={"m": MetricRule(better="lower", gain=gain)}, online="ignored")
    up, down = decide_promotion(higher, {"m": old}, {"m": new}), decide_promotion(lower, {"m": -old}, {"m": -new})
    assert up.promotes is down.promotes
    assert up.promotes is (new - old >= gain) or abs(new - old - gain) < 1e-6


def test_a_rule_asks_something() -> None:
    with pytest.raises(ValidationError, match="give limit or gain"):
        MetricRule(better="higher")
