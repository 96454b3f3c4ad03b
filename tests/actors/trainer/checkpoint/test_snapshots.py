"""After a loss the survivors go on from each other's memory, in whatever layout is left, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.actors.trainer.checkpoint_ranks import grow, lose_ranks

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
from raytide.actors.trainer.checkpoint.verify import verify
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import CheckpointError, StorageError
from raytide.core.specs.train import TrainSpec

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def held(spec: TrainSpec) -> TrainSpec:
    return spec.model_copy(update={"snapshot_every": 2, "steps": 8})


@pytest.fixture(scope="module")
def curve(make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Returns the losses of one process, by step."""
    losses: dict[int, float] = {}
    alone = make_spec(tmp_path_factory.mktemp("alone")).model_copy(update={"steps": 8})
    train_local(alone, on_step=lambda result: losses.update({result.step: result.loss}))
    return losses


def same(resumed: dict[str, Any], whole: dict[int, float], start: int) -> bool:
    losses = resumed["losses"]
    return list(losses) == list(range(start + 1, 9)) and all(abs(whole[at] - losses[at]) <= 5e-6 for at in losses)


def test_a_lost_host_is_made_up_for_from_its_buddies_memory(
    held: TrainSpec, run_ranks: RunRanks, curve: dict[int, float]
) -> None:
    lost = [2, 3]
    results = run_ranks(4, lose_ranks, held, "aabb", lost, ("step", 5), dying=lost)
    for resumed in results[:2]:
        assert (resumed["from"], resumed["at"]) == ("memory", 4)
        assert same(resumed, curve, start=4)


def test_a_death_in_the_middle_of_an_exchange_leaves_the_snapshot_before(
    held: TrainSpec, run_ranks: RunRanks, curve: dict[int, float]
) -> None:
    results = run_ranks(3, lose_ranks, held, "abc", [1], ("exchange", 2), dying=[1])
    for resumed in (results[0], results[2]):
        assert (resumed["from"], resumed["at"]) == ("memory", 2)
        assert same(resumed, curve, start=2)


def test_where_a_rank_and_its_buddy_are_lost_the_checkpoint_before_the_one_they_died_in_is_taken(
    held: TrainSpec, run_ranks: RunRanks, curve: dict[int, float]
) -> None:
    held = held.model_copy(update={"checkpoint_every": 3})
    lost = [0, 2]  # rank 0's copy is with rank 2
    results = run_ranks(4, lose_ranks, held, "aabb", lost, ("save", 2), dying=lost)
    for resumed in (results[1], results[3]):
        assert (resumed["from"], resumed["at"]) == ("storage", 3)
        assert same(resumed, curve, start=3)
    assert [(each.step, each.state) for each in verify(held.out)] == [(8, "whole"), (6, "whole")]


def test_newcomers_get_the_state_from_the_others_memory(
    held: TrainSpec, run_ranks: RunRanks, curve: dict[int, float]
) -> None:
    for resumed in run_ranks(3, grow, held, 3):
        assert (resumed["from"], resumed["at"]) == ("memory", 3)
        assert same(resumed, curve, start=3)


def test_a_bad_checkpoint_does_not_cost_the_newest_state_in_memory(held: TrainSpec) -> None:
    snapshots = Snapshots("a")
    with process_group.single_process() as mine:
        first = Trainer(held, mine, snapshots)
        first.step()
        first.take_snapshot()
        first.step()
        first.save()
        first.checkpoints.wait()
        first.close()
        (shards,) = Path(held.checkpoint_url).glob("*/*.distcp")
        shards.write_bytes(shards.read_bytes()[:-1])
        again = Trainer(held, mine, snapshots)
        (rejected,) = again.restore()
        again.close()
    assert "was altered" in str(rejected)
    assert (again.restored_from, again.steps_done) == ("memory", 1)


def test_a_failed_save_does_not_end_the_run_of_one_rank_that_keeps_its_state_in_memory(
    held: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the bucket answers 503.")

    snapshots = Snapshots("a")
    with process_group.single_process() as mine:
        first = Trainer(held, mine, snapshots)
        first.step()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "commit", refuse)
            first.flush()  # another member joins
        first.close()
        again = Trainer(held, mine, snapshots)
        assert again.restore() == []
        again.close()
    assert (again.restored_from, again.steps_done) == ("memory", 1)


def test_a_state_in_memory_is_not_continued_with_another_model_or_dataset(held: TrainSpec) -> None:
    snapshots = Snapshots("a")
    with process_group.single_process() as mine:
        first = Trainer(held, mine, snapshots)
        first.step()
        first.take_snapshot()
        first.close()
        other = Trainer(held.model_copy(update={"seed": 1}), mine, snapshots)
        with pytest.raises(CheckpointError, match="the model, seed or batch has changed since step 1"):
            other.restore()
        other.close()
