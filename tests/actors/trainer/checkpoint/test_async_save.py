"""A save runs beside the training: what it writes, who waits for it, how it fails, and what a kill leaves."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.actors.trainer import checkpoint_ranks, trainer_ranks
from tests.actors.trainer.checkpoints import latest

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore, open_store
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import TrainSpec

RunRanks = Callable[..., list[Any]]


class Gate(LocalStore):
    """A store that takes no byte before it is opened, like an object store far away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened, self.reached = threading.Event(), threading.Event()

    @contextmanager
    def write(self, path: str) -> Iterator[BinaryIO]:
        with super().write(path) as stream:
            self.reached.set()
            assert self.opened.wait(30.0)
            yield stream


@pytest.fixture
def trainer(spec: TrainSpec) -> Iterator[Trainer]:
    with process_group.single_process() as mine:
        trainer = Trainer(spec, mine)
        trainer.restore()
        yield trainer
        trainer.close()


def gated(trainer: Trainer) -> Gate:
    gate = Gate(Path(trainer.spec.checkpoint_url))
    trainer.checkpoints.store = gate
    return gate


def values(trainer: Trainer) -> dict[str, bytes]:
    return {piece.name: piece.local.numpy().tobytes() for piece in trainer.state.shards()}


def test_what_is_saved_is_the_state_at_the_save_although_training_went_on(trainer: Trainer) -> None:
    gate = gated(trainer)
    trainer.step()
    trainer.save()
    then = values(trainer)
    assert gate.reached.wait(30.0)
    trainer.step()
    trainer.step()
    assert values(trainer)["model.embedding.weight"] != then["model.embedding.weight"]
    gate.opened.set()
    trainer.checkpoints.wait()
    assert trainer.checkpoints.save_s > 0

    assert trainer.restore() == []
    assert (trainer.steps_done, trainer.restored_from) == (1, "storage")
    assert values(trainer) == then


def test_one_save_is_in_flight_at_most(trainer: Trainer) -> None:
    gate = gated(trainer)
    trainer.step()
    trainer.save()
    assert gate.reached.wait(30.0)
    trainer.step()
    second = threading.Thread(target=trainer.save)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert len(manifest.folders_newest_first(gate)) == 1
    gate.opened.set()
    second.join(30.0)
    trainer.checkpoints.wait()
    assert [manifest.step_of(name) for name in manifest.folders_newest_first(gate)] == [2, 1]


def test_a_straggler_of_a_generation_that_is_over_harms_no_newer_checkpoint(trainer: Trainer) -> None:
    gate = gated(trainer)
    trainer.step()
    trainer.save()
    assert gate.reached.wait(30.0)
    old = trainer.checkpoints
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytide.actors.trainer.checkpoint.manager.CLOSE_S", 0.0)
        trainer.close()

    again = Trainer(trainer.spec, trainer.group)
    again.restore()
    again.step()
    again.save()
    again.checkpoints.wait()
    newest = latest(open_store(trainer.spec.checkpoint_url)).checkpoint
    gate.opened.set()
    with pytest.raises(RuntimeError, match="cancelled writing"):
        old.wait()
    found = latest(open_store(trainer.spec.checkpoint_url))
    assert newest is not None
    assert found.checkpoint == newest
    again.close()


def test_a_failed_save_is_told_on_all_ranks_with_its_reason_and_tried_again(
    spec: TrainSpec, run_ranks: RunRanks
) -> None:
    """Rank 1's disk is full at its second save: both ranks go on, and save again two steps later."""
    spec = spec.model_copy(update={"checkpoint_every": 2, "steps": 8})
    for steps, unsaved, error in run_ranks(2, checkpoint_ranks.train_with_full_disk, spec):
        assert error is None
        assert steps == 8
        assert all("no space left while writing" in why and "step-00000004" in why for why in unsaved)
        assert unsaved
    store = open_store(spec.checkpoint_url)
    assert [manifest.step_of(name) for name in manifest.folders_newest_first(store)] == [8, 6]
    assert latest(store).rejected == []


def test_a_store_that_lets_nothing_be_deleted_keeps_old_checkpoints_and_fails_no_save(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(store: LocalStore, folder: str, first: str) -> None:
        raise PermissionError("delete is denied")

    monkeypatch.setattr(LocalStore, "remove", denied)
    unsaved: list[str] = []
    spec = spec.model_copy(update={"checkpoint_every": 1, "keep_checkpoints": 1, "steps": 4})
    train_local(spec, on_step=lambda result: unsaved.append(result.unsaved))
    assert not any(unsaved)
    folders = manifest.folders_newest_first(open_store(spec.checkpoint_url))
    assert [manifest.step_of(name) for name in folders] == [4, 3, 2, 1]
    assert "delete is denied" in caplog.text


def test_a_run_that_is_killed_again_and_again_in_its_saves_ends_like_one_that_is_not(
    spec: TrainSpec, tmp_path: Path
) -> None:
    """SIGKILL at random bytes of the saves."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    spec = spec.model_copy(update={"steps": 8, "checkpoint_every": 1})
    whole = spec.model_copy(update={"out": str(tmp_path / "whole")})
    train_local(whole)
    store = open_store(spec.checkpoint_url)
    multiprocessing.set_forkserver_preload(trainer_ranks.PRELOAD)
    context = multiprocessing.get_context("forkserver")
    exits = set()
    for kill in range(checkpoint_ranks.KILLS):
        process = context.Process(target=checkpoint_ranks.train_until_killed, args=(spec, draw.randrange(3_000_000)))
        process.start()
        process.join(240.0)
        found = latest(store)
        exits.add(process.exitcode)
        assert not [bad for bad in found.rejected if "is unfinished" not in str(bad)], f"seed {seed}, kill {kill}"
    assert -9 in exits <= {-9, 0}, f"seed {seed}"
    train_local(spec)
    ended, expected = (latest(each).checkpoint for each in (store, open_store(whole.checkpoint_url)))
    assert ended is not None and expected is not None
    tensors = "__0_0.distcp"
    assert ended.manifest.files[tensors] == expected.manifest.files[tensors], f"seed {seed}"
