"""The words for what a node must have, as every door takes them."""

from __future__ import annotations

import pytest

from raytide.core.errors import ConfigError, UsageError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.hardware.resources import resolve_accelerator
from raytide.core.objects.node import NodeType
from raytide.core.specs.train import TrainSpec

MODEL, MARKET = "ray.io/accelerator-type", "ray.io/market-type"


def parsed(**words: object) -> Shape:
    return Shape.parse(words, where="shape")


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ({"cpus": 4}, Shape(resources={"CPU": 4})),
        ({"gpus": 2}, Shape(resources={"GPU": 2})),
        ({"gpus": "0.5", "cpus": 2}, Shape(resources={"GPU": 0.5, "CPU": 2})),
        ({"gpus": "H100"}, Shape(resources={"GPU": 1}, labels={MODEL: "H100"})),
        ({"gpus": "H100:8"}, Shape(resources={"GPU": 8}, labels={MODEL: "H100"})),
        ({"gpus": "A100-80G:4"}, Shape(resources={"GPU": 4}, labels={MODEL: "A100-80G"})),
        ({"memory": "64GiB"}, Shape(resources={"CPU": 1, "memory": 64 * 2**30})),
        ({"memory": "1.5GB", "cpus": 1}, Shape(resources={"CPU": 1, "memory": 1.5e9})),
        ({"memory": 1000, "cpus": 1}, Shape(resources={"CPU": 1, "memory": 1000})),
        ({"spot": True, "cpus": 1}, Shape(resources={"CPU": 1}, labels={MARKET: "spot"})),
        (
            {"spot": False, "labels": {"zone": "a"}},
            Shape(resources={"CPU": 1}, labels={MARKET: "on-demand", "zone": "a"}),
        ),
        ({"nodes": 3}, Shape(members=3, min_members=3, resources={"CPU": 1})),
        ({"nodes": (1, 4), "gpus": 1}, Shape(members=4, min_members=1, resources={"GPU": 1})),
        ({"nodes": "1:4"}, Shape(members=4, min_members=1, resources={"CPU": 1})),
        ({"gpus": 1, "resources": {"TPU": 4}}, Shape(resources={"GPU": 1, "TPU": 4})),
    ],
)
def test_words_stand_for_resources_labels_and_members(words: dict[str, object], shape: Shape) -> None:
    assert parsed(**words) == shape


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"gpus": "H100:many"}, "write 8, H100 or H100:8"),
        ({"gpus": True}, "not a number of GPUs"),
        ({"gpus": "-1"}, "not a number of GPUs"),
        ({"memory": "lots"}, "write 64GiB"),
        ({"cpus": "two"}, "not a number"),
        ({"spot": "yes"}, "true, false"),
        ({"nodes": (1, 2, 3)}, "least and the most"),
        ({"nodes": (4, 1)}, "min_members"),
        ({"nodes": 2, "members": 2}, "mean the same"),
        ({"gpus": 1, "resources": {"GPU": 2}}, "exclude each other"),
        ({"spot": True, "labels": {MARKET: "on-demand"}}, "exclude each other"),
        ({"gpu": 1}, "unknown key"),
        ({"cpus": 0}, "some resource"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(words: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(**words)


def test_a_gang_of_one_shape_needs_no_list() -> None:
    gang = GangSpec.parse({"gpus": "H100:8", "nodes": [1, 4], "form_timeout_s": 5}, where="gang")
    assert gang == GangSpec(shapes=(parsed(gpus="H100:8", nodes=(1, 4)),), form_timeout_s=5)
    train = TrainSpec.parse({"dataset": "/d", "out": "/o", "steps": 1, "gang": {"cpus": 2, "spot": True}}, where="t")
    assert train.gang.shapes == (parsed(cpus=2, spot=True),)
    with pytest.raises(ConfigError, match="exclude each other"):
        GangSpec.parse({"gpus": 1, "shapes": [{"resources": {"CPU": 1}}]}, where="gang")


def test_an_endpoint_takes_the_same_words_but_nodes() -> None:
    spec = ServeSpec.parse({"name": "m", "model": "/m", "gpus": "L4:1", "spot": True}, where="serve")
    assert (spec.resources, spec.labels) == ({"GPU": 1.0}, {MODEL: "L4", MARKET: "spot"})
    with pytest.raises(ConfigError, match="unknown key nodes"):
        ServeSpec.parse({"name": "m", "model": "/m", "gpus": 1, "nodes": 2}, where="serve")


def node_type(name: str, model: str = "", gpus: int = 8) -> NodeType:
    labels = {MODEL: model} if model else {}
    return NodeType(name=name, resources={"GPU": gpus} if gpus else {"CPU": 8}, labels=labels, price_micro_usd_h=1)


def test_an_accelerator_is_found_by_its_label_or_by_the_name_of_a_node_type() -> None:
    types = [node_type("big", "H100"), node_type("gpu8"), node_type("small", gpus=0)]
    assert resolve_accelerator({MODEL: "h100", "zone": "a"}, types) == {MODEL: "H100", "zone": "a"}
    assert resolve_accelerator({MODEL: "GPU8"}, types) == {"ray.io/node-group": "gpu8"}
    assert resolve_accelerator({MODEL: "!H100"}, types) == {MODEL: "!H100"}
    assert resolve_accelerator({}, types) == {}
    with pytest.raises(UsageError, match="no node type of this cluster has B200") as refused:
        resolve_accelerator({MODEL: "B200"}, types)
    assert refused.value.hint == "It has H100, big, gpu8."
    with pytest.raises(UsageError) as refused:
        resolve_accelerator({MODEL: "B200"}, [node_type("small", gpus=0)])
    assert refused.value.hint == "It has no GPUs at all."
