"""The number of ranks changes who computes what, never the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.actors.trainer.trainer_ranks import shrink_and_grow, stop_at, train

from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec

RunRanks = Callable[..., list[Any]]


def alone(spec: TrainSpec) -> list[float]:
    losses: list[float] = []
    train_local(spec, on_step=lambda result: losses.append(result.loss))
    return losses


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-6), ("bf16", 5e-3)])
def test_any_world_gives_the_losses_of_one_process(
    spec: TrainSpec, run_ranks: RunRanks, precision: str, tolerance: float
) -> None:
    spec = spec.model_copy(update={"precision": precision})
    curves = {}
    for world in (1, 2, 4):
        here = spec.model_copy(update={"out": f"{spec.out}-{world}"})
        by_rank = run_ranks(world, train, here)
        assert all(curve == by_rank[0] for curve in by_rank)
        curves[world] = by_rank[0]
    assert len(curves[1]) == spec.steps
    assert curves[1][-1] < curves[1][0] - 0.3
    for world in (2, 4):
        assert max(abs(a - b) for a, b in zip(curves[1], curves[world], strict=True)) <= tolerance


def test_a_batch_that_does_not_divide_is_shared_out(spec: TrainSpec, run_ranks: RunRanks) -> None:
    """5 sequences over 3 ranks in microbatches of 1: ranks with one sequence pad their second microbatch."""
    spec = spec.model_copy(update={"global_batch": 5, "micro_batch": 1, "steps": 5})
    spread = run_ranks(3, train, spec.model_copy(update={"out": spec.out + "-3"}))[0]
    assert max(abs(a - b) for a, b in zip(alone(spec), spread, strict=True)) <= 5e-6


def test_more_ranks_than_sequences_still_train(spec: TrainSpec, run_ranks: RunRanks) -> None:
    spec = spec.model_copy(update={"global_batch": 1, "steps": 3})
    spread = run_ranks(2, train, spec.model_copy(update={"out": spec.out + "-2"}))[0]
    assert max(abs(a - b) for a, b in zip(alone(spec), spread, strict=True)) <= 5e-6


def test_untied_embeddings_train_alike(spec: TrainSpec, run_ranks: RunRanks) -> None:
    model = ModelSpec(dim=32, layers=2, heads=4, max_seq_len=64, tie_embeddings=False)
    spec = spec.model_copy(update={"model": model, "steps": 4})
    spread = run_ranks(2, train, spec.model_copy(update={"out": spec.out + "-2"}))[0]
    assert max(abs(a - b) for a, b in zip(alone(spec), spread, strict=True)) <= 5e-6


@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_on_the_same_layout_is_bit_equal(spec: TrainSpec, run_ranks: RunRanks, world: int) -> None:
    whole = run_ranks(world, train, spec.model_copy(update={"out": spec.out + "-whole"}))[0]

    before = run_ranks(world, stop_at, spec, 4)[0]
    after = run_ranks(world, train, spec)[0]
    assert before + after == whole


def test_survivors_re_form_in_their_own_process(spec: TrainSpec, run_ranks: RunRanks) -> None:
    """2 -> 1 -> 2 ranks, without a new process for the one that stays, on the curve of one process."""
    followed = run_ranks(2, shrink_and_grow, spec)
    reference = alone(spec.model_copy(update={"out": spec.out + "-alone"}))
    assert max(abs(a - b) for a, b in zip(followed[0], reference, strict=True)) <= 5e-6
    assert followed[1] == followed[0][:3] + followed[0][6:]
