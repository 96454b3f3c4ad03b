"""A checkpoint is whole or it is not there; one that changed afterwards is named and never loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.trainer.checkpoints import latest
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manager import CheckpointManager
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import CheckpointError, DataError, StorageError
from raytide.core.specs.train import TrainSpec


@pytest.fixture(scope="module")
def trained_once(make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    """A run of 6 steps with checkpoints at 2, 4 and 6, of which 4 and 6 are kept."""
    spec = make_spec(tmp_path_factory.mktemp("trained") / "run")
    spec = spec.model_copy(update={"steps": 6, "checkpoint_every": 2})
    train_local(spec)
    return spec


@pytest.fixture
def trained(trained_once: TrainSpec, tmp_path: Path) -> TrainSpec:
    shutil.copytree(trained_once.out, tmp_path / "run")
    return trained_once.model_copy(update={"out": str(tmp_path / "run")})


def root(spec: TrainSpec) -> LocalStore:
    return LocalStore(Path(spec.out) / "checkpoints")


def folder(spec: TrainSpec, step: int) -> Path:
    (name,) = (name for name in root(spec).folders() if manifest.step_of(name) == step)
    return root(spec).root / name


def steps(spec: TrainSpec) -> list[int | None]:
    return [manifest.step_of(name) for name in root(spec).folders()]


def events(spec: TrainSpec) -> list[dict[str, Any]]:
    file = Path(spec.out) / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def flip(file: Path, at: int) -> None:
    body = bytearray(file.read_bytes())
    body[at % len(body)] ^= 1
    file.write_bytes(bytes(body))


def test_the_newest_are_kept_and_verify(trained: TrainSpec) -> None:
    assert steps(trained) == [4, 6]
    checkpoint = manifest.verify(root(trained), folder(trained, 6).name)
    assert (checkpoint.manifest.step, checkpoint.manifest.samples, checkpoint.manifest.world) == (6, 36, 1)


def test_torch_itself_can_read_it(trained: TrainSpec, tmp_path: Path) -> None:
    dcp_to_torch_save(folder(trained, 6), tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    assert {key.partition(".")[0] for key in state} == {"model", "optim", "extra"}
    assert state["optim.embedding.weight.exp_avg"].shape == state["model.embedding.weight"].shape
    assert state["optim.embedding.weight.step"] == 6


@pytest.mark.parametrize("damage", ["flip", "missing", "no manifest"])
def test_a_resume_passes_over_a_bad_checkpoint_and_says_so(trained: TrainSpec, damage: str) -> None:
    whole = [json.loads(line)["loss"] for line in (Path(trained.out) / "metrics.jsonl").read_text().splitlines()]
    newest = folder(trained, 6)
    if damage == "flip":
        flip(newest / "__0_0.distcp", 5000)
    else:
        (newest / ("manifest.json" if damage == "no manifest" else ".metadata")).unlink()
    again: list[float] = []
    train_local(trained, on_step=lambda result: again.append(result.loss))
    assert again == whole[4:]
    assert [event["event"] for event in events(trained)] == ["skipped"]
    assert steps(trained) == [4, 6]  # the bad one is gone, another is there
    assert manifest.verify(root(trained), folder(trained, 6).name).manifest.step == 6


def test_when_no_checkpoint_is_good_the_run_does_not_start_over_in_silence(trained: TrainSpec) -> None:
    for path in root(trained).root.iterdir():
        flip(path / "__0_0.distcp", 5000)
    with pytest.raises(CheckpointError, match="was altered"):
        train_local(trained)
    assert json.loads((Path(trained.out) / "run.json").read_text())["state"] == "failed"


def test_a_write_that_was_cut_off_is_never_seen_and_later_removed(trained: TrainSpec) -> None:
    torn = root(trained).root / manifest.folder_name(8, "0123abcd")
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    found = latest(root(trained)).checkpoint
    assert found is not None
    assert found.manifest.step == 6
    train_local(trained.model_copy(update={"steps": 7}))
    assert not torn.exists()


def test_a_full_disk_is_a_storage_error_and_loses_nothing(trained: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    before = latest(root(trained)).checkpoint
    longer = trained.model_copy(update={"steps": 8})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
        with pytest.raises(StorageError, match=r"no space left while writing .*step-00000008") as caught:
            train_local(longer)
    assert "earlier files are complete" in caught.value.hint
    assert latest(root(trained)).checkpoint == before
    assert steps(trained) == [4, 6]
    assert train_local(longer).steps == 8


def test_a_full_disk_at_the_manifest_loses_nothing_either(trained: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", full)
        with pytest.raises(StorageError, match="no space left"):
            train_local(trained.model_copy(update={"steps": 8}))
    assert steps(trained) == [4, 6]


@pytest.mark.parametrize("change", [{"seed": 1}, {"global_batch": 4}, {"seq_len": 16}])
def test_another_runs_checkpoint_is_refused(trained: TrainSpec, change: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="different model, seed or batch"):
        train_local(trained.model_copy(update=change))


def test_ranks_that_read_different_datasets_do_not_train_together(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's own disk may have an older copy at the same path."""
    with process_group.single_process() as mine:
        monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: [value, {**value, "dataset": "older"}])
        with pytest.raises(DataError, match="rank 1 has a different dataset than rank 0"):
            CheckpointManager(spec, {"model, seed or batch": "a", "dataset": "newer"}, mine)


def test_a_run_goes_on_from_the_checkpoints_of_an_earlier_release(trained: TrainSpec) -> None:
    """Its architectures had no fields for a classification head and for images."""
    arch = asdict(resolve_model(trained, open_data(trained)).arch)
    known = {key: value for key, value in arch.items() if key not in ("dtype", "num_labels", "vision")}
    body = {"arch": known, "finetune": None, "order": trained.digest(), "first_weights": None}
    older = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    for name in root(trained).folders():
        found = manifest.read(root(trained), name).manifest
        assert "model, seed or batch" in found.digests
        digests = {**found.digests, "model, seed or batch": older}
        manifest.commit(root(trained), name, found.model_copy(update={"digests": digests}))
    assert train_local(trained.model_copy(update={"steps": 8})).steps == 8
    with pytest.raises(CheckpointError, match="different model, seed or batch"):
        train_local(trained.model_copy(update={"steps": 10, "seed": 1}))
