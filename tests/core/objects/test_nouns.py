"""The rules that the nouns' own types enforce."""

from __future__ import annotations

import pytest

from raytide.core.clock import SystemClock, VirtualClock
from raytide.core.errors import ConfigError
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, Shape
from raytide.core.objects.node import CapacityType, NodeType, fits, labels_match, minus, plus
from raytide.core.objects.plan import Admit, Plan, Wait


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_nodes": 3, "max_nodes": 2}, "min_nodes 3 is above max_nodes 2"),
        ({"zones": ()}, "at least one zone"),
        ({"resources": {"CPU": -1}}, "cannot be negative"),
        ({"price_micro_usd_h": -1}, "greater than or equal to 0"),
    ],
)
def test_a_node_type_that_makes_no_sense_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NodeType.parse({"name": "x", "resources": {"CPU": 1}, "price_micro_usd_h": 1, **fields}, where="cluster.yaml")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resources": {}}, "needs some resource"),
        ({"resources": {"CPU": 1, "GPU": -1}}, "none negative"),
        ({"resources": {"CPU": 1}, "members": 2, "min_members": 3}, "min_members 3 is above members 2"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shape.parse(fields, where="job")


def test_an_endpoint_whose_replicas_need_nothing_is_refused() -> None:
    for odd in ({}, {"GPU": 0}, {"CPU": 1, "GPU": -1}):
        with pytest.raises(ConfigError, match="needs some resource"):
            ServeSpec.parse({"name": "chat", "model": "/m", "resources": odd}, where="serve")


def test_a_gang_needs_a_shape_and_an_endpoint_its_bounds_in_order() -> None:
    with pytest.raises(ConfigError, match="shapes"):
        GangSpec.parse({"shapes": []}, where="job")
    with pytest.raises(ConfigError, match="min 3 is above max 2"):
        Replicas.parse({"min": 3, "max": 2}, where="serve")


def test_a_shape_says_what_it_is() -> None:
    shape = Shape(members=2, resources={"GPU": 1.0, "CPU": 0.5}, labels={"ray.io/market-type": "spot"})
    assert shape.describe() == "2 x (0.5 CPU + 1 GPU) on market-type=spot"
    assert (shape.at_least, Shape(members=2, min_members=1, resources={"CPU": 1}).at_least) == (2, 1)


@pytest.mark.parametrize(
    ("want", "have", "matches"),
    [
        ("spot", "spot", True),
        ("spot", None, False),
        ("!spot", "on-demand", True),
        ("!spot", None, True),
        ("!spot", "spot", False),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
    ],
)
def test_label_selectors_match_as_rays_do(want: str, have: str | None, matches: bool) -> None:
    assert labels_match({"k": want}, {} if have is None else {"k": have}) is matches


def test_resources_add_up_by_name() -> None:
    assert fits({"CPU": 0.3}, {"CPU": 0.1 + 0.2})
    assert not fits({"GPU": 1}, {"CPU": 8})
    assert minus({"CPU": 3}, {"CPU": 1, "GPU": 1}) == {"CPU": 2, "GPU": -1}
    assert plus({"CPU": 3}, {"GPU": 1}) == {"CPU": 3, "GPU": 1}


def test_the_nodes_of_a_type_carry_market_zone_and_type() -> None:
    labels = NodeType(
        name="a", resources={}, labels={"rack": "1"}, market=CapacityType.SPOT, price_micro_usd_h=1
    ).all_labels("z")
    assert labels == {
        "rack": "1",
        "ray.io/market-type": "spot",
        "ray.io/availability-zone": "z",
        "ray.io/node-group": "a",
    }


def test_a_plan_is_json_with_its_reasons() -> None:
    lease = Lease("lease-1", "job-1", Shape(resources={"CPU": 1}), LeaseState.WAITING, (Member(0),))
    plan = Plan(5.0, (Admit("job-1", lease, "fits"), Wait("job-2", "behind", "waits", "stop job-1")))
    assert plan.to_json() == {
        "at_s": 5.0,
        "actions": [
            {
                "action": "admit",
                "job_id": "job-1",
                "lease": {"id": "lease-1", "shape": "1 x (1 CPU)"},
                "reason": "fits",
                "reserved_micro_usd": 0,
            },
            {"action": "wait", "subject": "job-2", "constraint": "behind", "reason": "waits", "remedy": "stop job-1"},
        ],
    }


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock(5.0)
    clock.sleep(2.0)
    clock.advance(1.0)
    assert clock.now_s() == 8.0
    real = SystemClock()
    before_s = real.now_s()
    real.sleep(0.0)
    assert real.now_s() >= before_s


@pytest.mark.parametrize("name", ["warm", "queue", "unmanaged", "node-7"])
def test_no_endpoint_has_a_name_under_which_something_else_is_told(name: str) -> None:
    with pytest.raises(ValueError, match="gives itself"):
        ServeSpec(name=name, model="/m")
