"""References and conditions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.workflows.references import MetricCondition, Reference, references_in, resolved, with_value

SPEC = {"a": "${data.out}", "b": ["x/${train.model}/y", 3], "c": {"d": "${eval.metrics.loss}"}, "e": "none"}


def test_every_reference_of_a_spec_is_found() -> None:
    assert list(references_in(SPEC)) == [("data", "out"), ("train", "model"), ("eval", "metrics.loss")]


def test_a_text_that_is_a_reference_becomes_its_value_with_its_type() -> None:
    values = {("data", "out"): "/d", ("train", "model"): "/m", ("eval", "metrics.loss"): 1.5}

    def lookup(reference: Reference) -> object:
        return values[tuple(reference)]

    assert resolved(SPEC, lookup) == {"a": "/d", "b": ["x//m/y", 3], "c": {"d": 1.5}, "e": "none"}


def test_a_field_is_replaced_by_its_path_and_the_original_is_kept() -> None:
    spec = {"optim": {"lr": 1, "name": "adamw"}, "steps": 3}
    assert with_value(spec, "optim.lr", 2) == {"optim": {"lr": 2, "name": "adamw"}, "steps": 3}
    assert with_value(spec, "model.dim", 8)["model"] == {"dim": 8}
    assert spec["optim"] == {"lr": 1, "name": "adamw"}


@pytest.mark.parametrize(
    ("text", "loss", "old", "holds"),
    [
        ("e.loss < 4.2", 4.1, 0, True),
        ("e.loss < 4.2", 4.2, 0, False),
        ("e.loss<=4.2", 4.2, 0, True),
        ("e.loss >= -1e-3", -0.001, 0, True),
        ("e.loss != 2", 2, 0, False),
        ("e.loss == 2", 2, 0, True),
        ("e.loss > 1.", 1.5, 0, True),
        ("e.loss <= 0.98 * o.loss", 3.92, 4.0, True),
        ("e.loss <= 0.98 * o.loss", 3.93, 4.0, False),
        ("e.loss < o.loss", 3.0, 4.0, True),
        ("e.loss < 4.2", math.nan, 0, False),
        ("e.loss != 4.2", math.nan, 0, False),
    ],
)
def test_a_condition_holds_or_says_why_not(text: str, loss: float, old: float, holds: bool) -> None:
    values = {("e", "loss"): loss, ("o", "loss"): old}
    why = MetricCondition.parse(text).broken_by(lambda stage, name: values[stage, name])
    assert (why == "") is holds
    assert holds or why.startswith(f"e.loss is {loss:g}, and the condition is {text}")


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_condition_and_its_opposite_never_both_hold(value: float, limit: float) -> None:
    one, other = (MetricCondition.parse(f"a.b {sign} {limit!r}") for sign in ("<", ">="))
    assert bool(one.broken_by(lambda *_: value)) is not bool(other.broken_by(lambda *_: value))
