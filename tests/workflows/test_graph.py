"""Errors of a flow's file name the stage, and say what was meant."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.workflows.test_planner import flow_of

from raytide.core.errors import ConfigError
from raytide.workflows.graph import order_of
from raytide.workflows.spec import FlowSpec


def test_stages_are_ordered_by_their_references_and_needs_else_as_written() -> None:
    flow = flow_of(
        {
            "z": {"spec": {"command": ["${m.out}"]}},
            "m": {"needs": ["a"]},
            "gate": {"when": "m.loss < 0.9 * a.loss"},
            "a": {},
        }
    )
    assert order_of(flow) == ("a", "m", "z", "gate")


def test_a_circle_is_named() -> None:
    flow = flow_of({"a": {"needs": ["c"]}, "b": {"spec": {"command": ["${a.out}"]}}, "c": {"when": "b.loss < 1"}})
    with pytest.raises(ConfigError, match=r"in a circle: (a -> c -> b -> a|c -> b -> a -> c|b -> a -> c -> b)\."):
        order_of(flow)


def test_a_stage_that_needs_itself_is_a_circle() -> None:
    with pytest.raises(ConfigError, match="in a circle: a -> a"):
        order_of(flow_of({"a": {"needs": ["a"]}}))


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("${trian.out}", "stage b: ${trian.out}: there is no stage trian", "Did you mean train?"),
        ("${train.modle}", "a train stage has no output modle", "Did you mean model?"),
        ("${params.step}", "there is no parameter step", "Did you mean steps?"),
        ("${zzz.out}", "there is no stage zzz", "There are: train, b."),
        ("${HOME}", "${HOME} is no reference", "a shell's variables are written $NAME"),
    ],
)
def test_an_unknown_reference_is_named_with_the_nearest_known_one(command: str, message: str, hint: str) -> None:
    stages = {
        "train": {"kind": "train", "spec": {"dataset": "d", "steps": 1}},
        "b": {"kind": "script", "spec": {"command": [command]}},
    }
    flow = FlowSpec.parse({"name": "f", "out": "x", "params": {"steps": 3}, "stages": stages}, where="f")
    with pytest.raises(ConfigError) as error:
        order_of(flow)
    assert message in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"retires": 2}, "unknown key stages.a.retires (did you mean retries?)"),
        ({"when": "loss < 3"}, "'loss < 3' is no condition"),
        ({"when": "eval.loss << 3"}, "is no condition"),
        ({"spec": {"out": "/x"}}, "spec.out is chosen by the flow"),
        ({"kind": "distil"}, "Input should be 'data', 'train', 'compress', 'eval', 'register', 'serve' or 'script'"),
        ({"rule": {"loss": {"better": "lower", "limit": 3}}}, "rule belongs to serve stages"),
        ({"sweep": {"space": {"a": {"low": 2, "high": 1}}, "trials": 3}}, "low 2 is above high 1"),
        ({"sweep": {"space": {"a": {"low": 0, "high": 1, "log": True}}, "trials": 3}}, "begins above 0"),
        ({"sweep": {"space": {"a": {"low": 0, "high": 1}}, "trials": 3, "sampler": "grid"}}, "a has a range"),
        ({"sweep": {"space": {"a": {"choices": [1]}}, "trials": 3, "asha": {"first": 2}}}, "asha needs the steps"),
    ],
)
def test_a_wrong_stage_is_named(stage: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        flow_of({"a": dict(stage)})
    assert message in str(error.value)


def test_a_wrong_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="'61 \\* \\* \\* \\*' is no cron expression"):
        flow_of({"a": {}}, schedule={"cron": "61 * * * *"})
    with pytest.raises(ConfigError, match="give cron or new_data_every_s"):
        flow_of({"a": {}}, schedule={})


def test_a_sweep_is_of_stages_that_train() -> None:
    stage = {"kind": "eval", "spec": {}, "sweep": {"space": {"a": {"choices": [1]}}, "trials": 1}}
    with pytest.raises(ConfigError, match="stages of kind eval have no sweep"):
        FlowSpec.parse({"name": "f", "out": "x", "stages": {"e": stage}}, where="f")
