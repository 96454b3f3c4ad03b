"""One wrong bit in a replica's weights is found and its rank named; replicas that are equal are never accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.actors.trainer.replica_ranks import run_all

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.parallel.replica_check import find_outliers, replica_groups, weight_digest
from raytide.core.specs.parallelism import Parallelism, Sizes
from raytide.core.specs.train import MemorySpec, TrainSpec

RunRanks = Callable[..., list[Any]]
DDP = Parallelism(replicate=2, shard=1)


def of(spec: TrainSpec, name: str, **changes: object) -> TrainSpec:
    run = {"out": f"{spec.out}-{name}", "steps": 6, "replica_check_every": 1, "layout": DDP}
    return spec.model_copy(update=run | changes)


def test_replicas_of_two_are_equal_or_named(spec: TrainSpec, run_ranks: RunRanks) -> None:
    specs = [
        of(spec, "plain"),
        of(spec, "bf16", precision="bf16"),
        *(of(spec, name, memory=MemorySpec(compression=name)) for name in ("bf16", "int8", "powersgd")),
        of(spec, "flipped"),
        of(spec, "before a save", replica_check_every=100, checkpoint_every=2),
        of(spec, "never", replica_check_every=0),
    ]
    flips = [None] * 5 + [1, 1, 1]
    for ended in run_ranks(2, run_all, specs, flips):
        assert ended[:5] == [(6, "")] * 5
        assert ended[5][0] == 4
        assert "do not have the same weights after step 4: all differ: 0, 1." in ended[5][1]
        assert ended[6][0] == 4
        assert "after step 4" in ended[6][1]
        assert ended[7] == (6, "")
    saved = manifest.folders_newest_first(LocalStore(Path(specs[6].checkpoint_url)))
    assert [manifest.step_of(name) for name in saved] == [2], "no checkpoint is of replicas that differ"


def test_replicas_among_other_axes_are_equal_or_named(spec: TrainSpec, run_ranks: RunRanks) -> None:
    specs = [
        of(spec, "hybrid", layout=Parallelism(replicate=2)),
        of(spec, "tensor", layout=Parallelism(replicate=2, shard=1, tensor=2)),
        of(spec, "pipeline", layout=Parallelism(replicate=2, shard=1, pipeline=2)),
        of(spec, "flipped", layout=Parallelism(replicate=2)),
        of(spec, "of four", layout=Parallelism(replicate=4, shard=1)),
    ]
    for ended in run_ranks(4, run_all, specs, [None, None, None, 3, 2]):
        assert ended[:3] == [(6, "")] * 3
        assert ended[3][0] == 4
        assert "all differ: 1, 3." in ended[3][1]
        assert ended[4][0] == 4
        assert "those of rank 2 differ from those of rank 0, 1, 3." in ended[4][1]


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 5),
)
def test_every_rank_is_a_copy_in_one_group(shape: tuple[int, int, int, int, int]) -> None:
    sizes = Sizes(*shape)
    groups = replica_groups(sizes)
    assert sorted(rank for each in groups for rank in each) == list(range(sizes.world))
    assert {len(each) for each in groups} == {sizes.replicate}
    ranks = torch.arange(sizes.world).view(sizes.shape)
    for each in groups:
        places = [(ranks == rank).nonzero()[0].tolist() for rank in each]
        assert [place[1] for place in places] == list(range(sizes.replicate))
        assert len({(place[0], *place[2:]) for place in map(tuple, places)}) == 1


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([5, 5], []),
        ([5, 6], [0, 1]),
        ([5, 5, 6], [2]),
        ([6, 5, 5, 5], [0]),
        ([5, 5, 6, 6], [0, 1, 2, 3]),
        ([1, 2, 3], [0, 1, 2]),
    ],
)
def test_who_differs_from_most_is_named(digests: list[int], odd: list[int]) -> None:
    assert find_outliers(digests) == odd


@given(
    at=st.integers(0, 99),
    bit=st.integers(0, 31),
    which=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_any_one_bit_changes_the_digest(at: int, bit: int, which: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = [torch.randn(100), torch.randn(100), torch.randn(100).bfloat16().repeat(2), torch.full((100,), torch.nan)]
    before = int(weight_digest(weights, torch.device("cpu")))
    kind = torch.int16 if weights[which].element_size() == 2 else torch.int32
    bits = weights[which].view(kind)
    bits[at] ^= torch.tensor(1, dtype=kind) << (bit % (8 * kind.itemsize))
    assert int(weight_digest(weights, torch.device("cpu"))) != before
