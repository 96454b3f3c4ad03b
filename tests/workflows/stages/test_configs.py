"""A flow is checked whole before anything of it runs."""

from __future__ import annotations

from typing import Any

import pytest

from raytide.core.errors import ConfigError
from raytide.workflows.spec import FlowSpec
from raytide.workflows.stages.configs import check

GOOD: dict[str, dict[str, Any]] = {
    "text": {"kind": "data", "spec": {"inputs": ["/in"]}, "gang": {"cpus": 2}},
    "train": {
        "kind": "train",
        "spec": {"dataset": "${text.out}", "steps": "${params.steps}"},
        "sweep": {"space": {"optim.lr": {"low": 0.1, "high": 1.0}}, "trials": 4, "asha": {"first": 5}},
    },
    "eval": {"kind": "eval", "spec": {"model": "${train.model}", "dataset": "${text.out}"}},
    "register": {
        "kind": "register",
        "spec": {"name": "m", "model": "${train.model}", "metrics": {"l": "${eval.metrics.loss}"}},
    },
    "serve": {"kind": "serve", "spec": {"name": "m", "model": "${register.reference}"}},
    "ask": {
        "kind": "eval",
        "spec": {"prompts": "/p.jsonl", "endpoint": "${serve.url}", "endpoint_model": "${serve.name}"},
    },
    "note": {"kind": "script", "spec": {"command": ["echo", "${ask.metrics.accuracy}"], "params": {"to": "me"}}},
}


def flow_with(stage: str = "text", **changes: Any) -> FlowSpec:
    stages = {**GOOD, stage: {**GOOD[stage], **changes}}
    return FlowSpec.parse({"name": "f", "out": "/out", "params": {"steps": 20}, "stages": stages}, where="f")


def spec_with(stage: str, **fields: Any) -> FlowSpec:
    return flow_with(stage, spec={**GOOD[stage]["spec"], **fields})


def test_a_flow_of_every_kind_is_good() -> None:
    check(flow_with())


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (spec_with("text", inptus=["/x"]), "f-text: unknown key inptus (did you mean inputs?)"),
        (spec_with("train", optim={"lrr": 1}), "f-train: unknown key optim.lrr (did you mean lr?)"),
        (spec_with("train", steps="many"), "f-train: steps: Input should be a valid integer"),
        (spec_with("eval", model=""), "stage eval: the loss on a dataset needs model"),
        (spec_with("eval", dataset=""), "stage eval: give dataset, prompts or suite"),
        (spec_with("ask", endpoint=""), "stage ask: prompts need endpoint and endpoint_model"),
        (spec_with("register", name="No Name"), "stage register: name"),
        (spec_with("serve", replicas={"min": 3, "max": 1}), "stage serve: replicas: min 3 is above max 1"),
        (spec_with("note", params={"a b": 1}), "stage note: params"),
        (
            flow_with("train", sweep={"space": {"optm.lr": {"choices": [1]}}, "trials": 1}),
            "f-train: unknown key optm (did you mean optim?)",
        ),
        (
            flow_with("train", sweep={"space": {"steps": {"choices": [1]}}, "trials": 1}),
            "f-train: a sweep cannot vary steps",
        ),
        (
            flow_with("train", sweep={"space": {"seed": {"choices": [1]}}, "trials": 1, "asha": {"first": 20}}),
            "the first rung of asha is at step 20, and a trial ends at 20",
        ),
        (flow_with("text", gang={"gpus": 1}), "f-text: gang: a build needs CPUs"),
    ],
)
def test_a_wrong_field_is_named_with_its_stage(flow: FlowSpec, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(flow)
    assert message in str(error.value).replace("(top level): ", "")
