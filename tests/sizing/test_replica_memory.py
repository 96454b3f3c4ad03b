"""Replicas that share a GPU: each share must hold the weights and the KV cache of its model."""

from __future__ import annotations

import pytest

from raytide.core.errors import CapacityError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.node import ACCELERATOR_LABEL, TYPE_LABEL, NodeType
from raytide.sizing.serving import check_memory

L4 = NodeType(name="l4", resources={"GPU": 1}, labels={ACCELERATOR_LABEL: "L4"}, price_micro_usd_h=1)
H100 = NodeType(name="h100", resources={"GPU": 8}, labels={ACCELERATOR_LABEL: "H100"}, price_micro_usd_h=9)
OTHER = NodeType(name="other", resources={"GPU": 1}, price_micro_usd_h=1)
CPU = NodeType(name="cpu", resources={"CPU": 8}, price_micro_usd_h=1)
GB = 10**9


def spec(**fields: object) -> ServeSpec:
    return ServeSpec.parse({"name": "m", "model": "/m", **fields}, where="serve")


def types_of(found: ServeSpec) -> str | None:
    return found.labels.get(TYPE_LABEL)


@pytest.mark.parametrize(
    ("gpus", "weights_gb", "kv_gb", "types"),
    [
        (0.5, 10, 1, None),  # 11 GB in half of 24 GB
        (0.5, 10, 3, "h100"),  # 13 GB
        (0.5, 39, 1, "h100"),
        (1, 22, 1, None),
        (1, 30, 1, "h100"),
        ("L4:0.25", 4, 1, None),
    ],
)
def test_a_replica_runs_where_its_share_holds_weights_and_kv(
    gpus: object, weights_gb: int, kv_gb: float, types: str | None
) -> None:
    asked = spec(gpus=gpus, engine={"kv_memory_gb": kv_gb})
    assert types_of(check_memory(asked, weights_gb * GB, (L4, H100, CPU))) == types


@pytest.mark.parametrize(
    ("gpus", "engine"), [(0.5, {"kv_memory_gb": 2}), (0.5, {"vllm": {"kv_cache_memory_bytes": 2 * GB}})]
)
def test_what_no_share_holds_is_refused_with_the_sums(gpus: float, engine: dict[str, object]) -> None:
    with pytest.raises(CapacityError) as refused:
        check_memory(spec(gpus=gpus, engine=engine), 39 * GB, (L4, H100))
    sums = "endpoint m: its weights (39 GB) and its KV cache (2 GB) need 41 GB; 0.5 GPU has at most 40 GB here."
    assert sums in str(refused.value)
    assert "kv_memory_gb" in refused.value.hint


def test_two_that_fit_their_halves_fit_together_and_a_third_does_not_fit_a_half() -> None:
    halves = [spec(gpus=0.5), spec(gpus=0.5)]
    weights = 10 * GB
    assert all(check_memory(each, weights, (L4,)) == each for each in halves)
    with pytest.raises(CapacityError, match="at most 12 GB"):
        check_memory(spec(gpus=0.5), 2 * weights, (L4,))


def test_gpus_of_unknown_memory_are_taken_to_hold_it_and_blocks_are_not_counted() -> None:
    assert types_of(check_memory(spec(gpus=0.5), 30 * GB, (L4, OTHER))) == "other"
    assert types_of(check_memory(spec(gpus=0.5), 30 * GB, (L4, OTHER, H100))) == "in(h100,other)"
    assert types_of(check_memory(spec(gpus=0.5, engine={"num_blocks": 10}), 12 * GB, (L4,))) is None


def test_without_gpus_the_memory_that_was_asked_for_holds_it() -> None:
    assert check_memory(spec(cpus=2), 900 * GB, (CPU,)) == spec(cpus=2)
    assert check_memory(spec(memory="16GB"), 15 * GB, (CPU,)) == spec(memory="16GB")
    part = spec(memory="16GB", engine={"weights_memory_gb": 4})
    assert check_memory(part, 90 * GB, (CPU,)) == part
    with pytest.raises(CapacityError, match=r"need 16\.5 GB; a replica has memory 16 GB"):
        check_memory(spec(memory="16GB"), int(15.5 * GB), (CPU,))
