"""The batches that are learned from, as a policy of its own and in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.optim.anomaly_guard import HISTORY, AnomalyGuard
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import StepResult
from raytide.core.errors import TrainError
from raytide.core.specs.train import GuardSpec, TrainSpec

SKIP = GuardSpec(nan="skip", spike="skip", window=8, max_skips=3)
CALM = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 2.02, 1.98]

losses = st.lists(
    st.one_of(st.floats(0.0, 4.0), st.sampled_from([math.nan, math.inf, 9.0, 50.0])), min_size=1, max_size=3 * HISTORY
)
specs = st.builds(
    GuardSpec,
    nan=st.sampled_from(["stop", "skip"]),
    spike=st.sampled_from(["stop", "skip", "ignore"]),
    window=st.integers(8, HISTORY),
    max_skips=st.integers(1, 5),
)


Weights = dict[str, torch.Tensor]


def kinds(guard: AnomalyGuard, seen: list[float]) -> list[str]:
    return [guard.judge(loss, 1.0).kind for loss in seen]


def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run_unless_it_may_be_skipped() -> None:
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf)):
        assert AnomalyGuard(GuardSpec()).judge(loss, norm).kind == "stopped"
        assert AnomalyGuard(SKIP).judge(loss, norm).kind == "skipped"


def test_a_spike_is_far_above_the_median_of_a_full_window() -> None:
    guard = AnomalyGuard(SKIP)
    assert kinds(guard, [*CALM[:7], 40.0]) == ["applied"] * 8  # the eighth fills the window
    guard = AnomalyGuard(SKIP)
    assert kinds(guard, [*CALM, 2.4, 4.0, 2.4, 0.1]) == ["applied"] * 9 + ["skipped", "applied", "applied"]
    assert "is a spike: the limit is" in AnomalyGuard.judge(guard, 4.0, 1.0).why


def test_a_flat_curve_may_still_rise_a_little() -> None:
    assert kinds(AnomalyGuard(SKIP), [1.0] * 8 + [1.5, 1.51]) == ["applied"] * 9 + ["skipped"]


def test_after_max_skips_in_a_row_it_stops_and_one_good_batch_starts_the_count_anew() -> None:
    assert kinds(AnomalyGuard(SKIP), [math.nan] * 3 + [2.0] + [math.nan] * 4) == [
        *["skipped"] * 3,
        "applied",
        *["skipped"] * 3,
        "stopped",
    ]


@given(specs, losses, losses)
@example(SKIP, [math.nan] * 2, [math.nan] * 2)
@example(SKIP, CALM, [2.0, 40.0])
def test_a_guard_from_a_checkpoint_judges_as_the_one_that_wrote_it(
    spec: GuardSpec, before: list[float], after: list[float]
) -> None:
    whole = AnomalyGuard(spec)
    kinds(whole, before)
    resumed = AnomalyGuard(spec)
    resumed.load_state_dict(whole.state_dict())
    assert [resumed.judge(loss, 1.0) for loss in after] == [whole.judge(loss, 1.0) for loss in after]
    assert resumed.skipped == whole.skipped


@given(specs, losses)
def test_what_was_not_learned_from_is_no_measure_for_what_comes_after(spec: GuardSpec, seen: list[float]) -> None:
    spec = spec.model_copy(update={"max_skips": len(seen)})
    guard, verdicts = AnomalyGuard(spec), kinds(AnomalyGuard(spec), seen)
    learned = [loss for loss, kind in zip(seen, verdicts, strict=True) if kind == "applied"]
    assert kinds(guard, learned) == ["applied"] * len(learned)


def poisoned(spec: TrainSpec, steps: set[int], until: int | None = None) -> tuple[list[StepResult], Weights]:
    """A run in this process whose loss is not a number in these steps, counted from 1; it pauses after step `until`."""
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        trainer.restore()
        trainer.model_parts[-1].register_forward_hook(
            lambda module, inputs, loss: loss * (math.nan if trainer.steps_done + 1 in steps else 1.0)
        )
        results: list[StepResult] = []
        trainer.run(on_step=results.append, paused=lambda: trainer.steps_done == until)
        return results, weights(trainer)


def weights(trainer: Trainer) -> Weights:
    named = trainer.model_parts[0].named_parameters()
    return {name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone() for name, w in named}


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.fixture
def skipping(spec: TrainSpec) -> TrainSpec:
    return spec.model_copy(update={"steps": 6, "guard": GuardSpec(nan="skip")})


def test_a_skipped_batch_changes_nothing_but_the_place_in_the_data(skipping: TrainSpec, tmp_path: Path) -> None:
    """Steps 3 and 4 are not learned from: the rates go on from where they were, and weights and moments stay."""
    results, _ = poisoned(skipping, {3, 4})
    assert [result.verdict for result in results] == ["applied"] * 2 + ["skipped"] * 2 + ["applied"] * 2
    calm, _ = poisoned(skipping.model_copy(update={"out": str(tmp_path / "calm")}), set())
    assert [result.lr for result in results if result.verdict == "applied"] == [result.lr for result in calm[:4]]
    assert len(results[2].samples) == skipping.global_batch
    assert results[2].samples != results[3].samples

    _, before = poisoned(skipping.model_copy(update={"out": str(tmp_path / "two")}), set(), until=2)
    _, after = poisoned(skipping.model_copy(update={"out": str(tmp_path / "four")}), {3, 4}, until=4)
    assert equal(before, after)


def test_a_resume_after_a_skip_is_bit_equal(skipping: TrainSpec, tmp_path: Path) -> None:
    whole, _ = poisoned(skipping.model_copy(update={"out": str(tmp_path / "whole")}), {3})
    first, _ = poisoned(skipping, {3}, until=4)
    second, _ = poisoned(skipping, {3})
    told = [(result.loss, result.lr, result.grad_norm) for result in [*first, *second]]
    assert told[3:] == [(result.loss, result.lr, result.grad_norm) for result in whole[3:]]


def test_a_stop_tells_of_the_batch_and_leaves_the_weights_alone(skipping: TrainSpec, tmp_path: Path) -> None:
    stops = skipping.model_copy(update={"guard": GuardSpec()})
    told: list[StepResult] = []
    with process_group.single_process() as mine:
        trainer = Trainer(stops, mine)
        trainer.step()
        before = weights(trainer)
        trainer.model_parts[-1].register_forward_hook(lambda module, inputs, loss: loss * math.nan)
        with pytest.raises(TrainError, match=r"step 2 .* was not applied: loss nan"):
            trainer.run(on_step=told.append)
        assert equal(before, weights(trainer))
    assert [(result.step, result.verdict) for result in told] == [(2, "stopped")]
    assert len(told[0].samples) == stops.global_batch
