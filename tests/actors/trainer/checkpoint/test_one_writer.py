"""Two runs never write to one out: the second is refused, and a run that lost it seals and exports nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.elastic.driver import _is_over
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.core.errors import ConflictError, DeniedError, LeaseLostError, NotFoundError
from raytide.core.io import claim
from raytide.core.io.claim import Claim, read_claim
from raytide.core.specs.train import TrainSpec


def steps_saved(spec: TrainSpec) -> list[int | None]:
    return [manifest.step_of(name) for name in manifest.folders_newest_first(LocalStore(Path(spec.checkpoint_url)))]


def test_a_run_into_an_out_that_is_written_to_is_refused_and_touches_nothing(spec: TrainSpec) -> None:
    train_local(spec.model_copy(update={"steps": 1}))
    before = {path: path.read_bytes() for path in Path(spec.out).rglob("*") if path.is_file()}
    first = Claim([spec.out], "job-1")
    try:
        with pytest.raises(ConflictError, match="is being written by job-1"):
            train_local(spec)
    finally:
        first.release()
    assert {path: path.read_bytes() for path in Path(spec.out).rglob("*") if path.is_file()} == before
    assert train_local(spec).steps == spec.steps
    assert read_claim(spec.out) is None


def test_two_runs_with_one_checkpoint_dir_are_two_writers_too(spec: TrainSpec, tmp_path: Path) -> None:
    shared = spec.model_copy(update={"checkpoint_dir": str(tmp_path / "shared")})

    def second(result: StepResult) -> None:
        with pytest.raises(ConflictError, match="shared is being written by"):
            train_local(shared.model_copy(update={"out": str(tmp_path / "second")}))

    train_local(shared.model_copy(update={"steps": 1}), on_step=second)


def test_a_run_whose_out_was_taken_over_seals_nothing_and_leaves_the_other_one_s_record(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 1000.0)
    spec = spec.model_copy(update={"checkpoint_every": 2, "steps": 6, "export": True})
    other: list[Claim] = []

    def taken_over(result: StepResult) -> None:
        if result.step == 3:
            other.append(Claim([spec.out], "job-2", is_over=lambda holder: True))

    with pytest.raises(ConflictError, match="was taken over by job-2"):
        train_local(spec, on_step=taken_over)
    assert all(step in (None, 2) for step in steps_saved(spec))
    assert not (Path(spec.out) / "model").exists()
    assert not (Path(spec.out) / "run.json").exists()
    held = read_claim(spec.out)
    assert held is not None
    assert held.token == other[0].token
    other[0].release()
    assert train_local(spec).steps == 6


class Answers:
    """Answers for the API about a job's lease."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer, self.asked = answer, list[str]()

    def lease(self, job_id: str) -> None:
        self.asked.append(job_id)
        if self.answer is not None:
            raise self.answer


@pytest.mark.parametrize(
    ("answer", "is_over"),
    [(None, False), (LeaseLostError("over."), True), (NotFoundError("no."), False), (DeniedError("not yours."), False)],
)
def test_a_holder_is_over_when_the_api_says_so_of_its_job(answer: Exception | None, is_over: bool) -> None:
    assert _is_over(Answers(answer), "train-0123") is is_over  # type: ignore[arg-type]


@pytest.mark.parametrize("holder", ["../admin", "a/b", "", "x" * 101, "a process without a job, 12"])
def test_a_claim_cannot_make_the_driver_ask_for_anything_but_a_job(holder: str) -> None:
    client = Answers(LeaseLostError("over."))
    assert _is_over(client, holder) is False  # type: ignore[arg-type]
    assert client.asked == []
