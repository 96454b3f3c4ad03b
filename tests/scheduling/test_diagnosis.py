"""Reasons why no fleet could hold a shape: the constraint, what exists instead, and what to change."""

from __future__ import annotations

import pytest

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeType
from raytide.scheduling.diagnosis import describe_amounts, why_impossible

KIND = "ray.io/accelerator-type"
L4 = NodeType(name="l4", resources={"CPU": 8, "GPU": 1, "memory": 32 * 2**30}, labels={KIND: "L4"}, price_micro_usd_h=1)
A100 = NodeType(name="a100", resources={"CPU": 96, "GPU": 8}, labels={KIND: "A100", "rack": "7"}, price_micro_usd_h=9)
CLOSED = L4.model_copy(update={"max_nodes": 0})


def said(shape: Shape, *node_types: NodeType) -> tuple[str, str]:
    short = why_impossible(shape, shape.members, node_types, "gang job-1")
    assert short is not None
    assert short.constraint == "impossible"
    return short.reason, short.remedy


@pytest.mark.parametrize(
    ("labels", "reason", "remedy"),
    [
        ({KIND: "H100"}, "the fleet has A100, L4", "Ask for another ray.io/accelerator-type"),
        ({"nvlink": "yes"}, "needs nvlink=yes; none has it", "Drop a label"),
        ({KIND: "L4", "rack": "7"}, "none has all of them", "Drop a label"),
    ],
    ids=["a value nobody has", "a label nobody has", "two that no type has together"],
)
def test_labels_that_cannot_be_met_name_what_there_is(labels: dict[str, str], reason: str, remedy: str) -> None:
    told, help = said(Shape(resources={"CPU": 1}, labels=labels), L4, A100)
    assert reason in told
    assert help == f"{remedy}, or add a node type."


@pytest.mark.parametrize(
    ("fleet", "reason"), [((), "the fleet has no node types"), ((CLOSED,), "every type has max_nodes 0")]
)
def test_a_fleet_that_may_hold_nothing_says_so(fleet: tuple[NodeType, ...], reason: str) -> None:
    told, help = said(Shape(resources={"CPU": 1}), *fleet)
    assert reason in told
    assert help == "Raise max_nodes, or add a node type."


def test_memory_is_described_in_gib_and_an_accelerator_by_its_name() -> None:
    shape = Shape(resources={"GPU": 1, "memory": 48 * 2**30, "CPU": 0}, labels={KIND: "L4"})
    told, _ = said(shape, L4)
    assert "48 GiB memory" in told
    assert "1 x L4" in describe_amounts(shape)
    assert "CPU" not in describe_amounts(shape)


def test_what_an_empty_fleet_could_hold_is_not_impossible() -> None:
    assert why_impossible(Shape(members=2, resources={"GPU": 4}), 2, (A100,), "gang job-1") is None
