"""A run ends once its held-out loss no longer falls, at the same step whether or not it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.trainer.conftest import write_dataset

from raytide.actors.trainer.parallel.evaluation import EarlyStop, Evaluator
from raytide.actors.trainer.run_log import history
from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.mixture import HeldOutSpec
from raytide.core.specs.train import TrainSpec

CURVE = [3.0, 2.0, 1.96, 1.99, 1.5, 1.6, 1.55, 1.51, 1.0]


def test_it_counts_evaluations_since_the_best_one() -> None:
    judged = EarlyStop(HeldOutSpec(dataset="x", patience=2, min_delta=0.05))
    for loss in CURVE[:3]:
        judged.record(loss)
    assert not judged.why, "a fall of less than min_delta is none"
    judged.record(CURVE[3])
    assert judged.why == "the held-out loss has not fallen below 2 in 2 evaluations"
    never = EarlyStop(HeldOutSpec(dataset="x"))
    for loss in [1.0] * 50:
        never.record(loss)
    assert not never.why


@pytest.fixture
def early(spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSpec:
    """A run of twenty steps whose held-out loss is CURVE: it ends after the eighth evaluation."""
    held_out = write_dataset(tmp_path / "held-out", tokens=400, shard_tokens=(400,))
    monkeypatch.setattr(Evaluator, "loss", lambda self, compute, micro_batch: CURVE[self.seen])
    due = Evaluator.is_due

    def is_due(self: Evaluator, step: int) -> bool:
        self.seen = step // 2 - 1  # type: ignore[attr-defined]
        return due(self, step)

    monkeypatch.setattr(Evaluator, "is_due", is_due)
    config = HeldOutSpec(dataset=str(held_out), every=2, patience=3)
    return spec.model_copy(update={"steps": 20, "eval": config, "checkpoint_every": 1, "export": True})


def test_the_run_ends_there_exports_its_model_and_says_why(early: TrainSpec) -> None:
    result = train_local(early)
    assert result.steps == 16
    assert Path(early.out, "model", "config.json").exists()
    (event,) = [each for each in history.read(early.out).events if each["event"] == "early_end"]
    assert event["step"] == 16
    assert event["why"] == "the held-out loss has not fallen below 1.5 in 3 evaluations"
    assert train_local(early).steps == 16, "started again it is still over"


def test_a_run_that_is_interrupted_ends_at_the_same_step(early: TrainSpec) -> None:
    class StopError(Exception):
        pass

    def interrupt(result: object) -> None:
        if getattr(result, "step", 0) == 13:
            raise StopError

    with pytest.raises(StopError):
        train_local(early, on_step=interrupt)
    assert train_local(early).steps == 16
    assert [line["step"] for line in history.read(early.out).steps] == list(range(1, 17))
