"""A full disk ends no training before its end: it is told, what was saved stays, and saving is tried again."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.disk_fixture import Disk

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manager import CheckpointManager
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.run_log import writer
from raytide.actors.trainer.run_log.writer import LineFile, RunLog
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.core.clock import SystemClock
from raytide.core.errors import StorageError, TrainError
from raytide.core.specs.train import TrainSpec


@pytest.fixture
def spec(make_spec: Callable[[Path], TrainSpec], disk: Disk) -> TrainSpec:
    """All that a run writes is on the small disk."""
    run = {"steps": 9, "checkpoint_every": 2, "keep_checkpoints": 1}
    return make_spec(disk.path / "run").model_copy(update=run)


def events(spec: TrainSpec) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(spec.out) / "events.jsonl").read_text().splitlines()]


def steps_saved(spec: TrainSpec) -> list[int | None]:
    return [manifest.step_of(name) for name in manifest.folders_newest_first(LocalStore(Path(spec.checkpoint_url)))]


def saved(spec: TrainSpec, step: int) -> None:
    """Wait for the save beside the training."""
    for _ in range(6000):
        if steps_saved(spec)[:1] == [step] and not manifest.unfinished_folders(LocalStore(Path(spec.checkpoint_url))):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not saved within 60 s")


def test_a_save_without_room_is_told_and_the_run_goes_on_from_the_last_good_one(
    spec: TrainSpec, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, saving, save = list[StepResult](), list[CheckpointManager](), CheckpointManager.save
    monkeypatch.setattr(CheckpointManager, "save", lambda self, *args: (saving.append(self), save(self, *args)))

    def on_step(result: StepResult) -> None:
        while saving and saving[-1].is_saving:  # room that comes while it writes would let it succeed
            time.sleep(0.001)
        seen.append(result)
        if result.step == 3:
            saved(spec, 2)
        if 3 <= result.step <= 7:
            disk.fill()
            disk.fill()  # what a save that failed has freed
        if result.step == 7:
            (folder,) = Path(spec.checkpoint_url).iterdir()  # nothing is left of those that failed
            assert manifest.step_of(folder.name) == 2
            manifest.verify(LocalStore(folder.parent), folder.name)
            disk.free()
        if result.step == 9:
            saved(spec, 8)

    assert train_local(spec.model_copy(update={"steps": 10}), on_step=on_step).steps == 10
    assert steps_saved(spec) == [10]
    told = [event for event in events(spec) if event["event"] == "not_saved"]
    assert len(told) >= 2  # those of steps 4 and 6
    assert all("no space left" in event["why"] for event in told)
    assert [bool(result.unsaved) for result in seen if result.step in (3, 6, 10)] == [False, True, False]
    lines = [json.loads(line) for line in (Path(spec.out) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))


def test_the_last_save_is_the_run_s_own_error_and_a_resume_ends_it(spec: TrainSpec, disk: Disk) -> None:
    def fill(result: StepResult) -> None:
        if result.step == 5:
            saved(spec, 4)
        if result.step >= 5:
            disk.fill()

    with pytest.raises(StorageError, match="no space left"):
        train_local(spec, on_step=fill)
    assert steps_saved(spec) == [4]
    disk.free()
    assert train_local(spec).steps == 9
    assert json.loads((Path(spec.out) / "run.json").read_text())["state"] == "done"


def test_an_export_without_room_is_the_run_s_error_and_leaves_no_half_model(spec: TrainSpec, disk: Disk) -> None:
    spec = spec.model_copy(update={"export": True})
    from raytide.actors.trainer.trainer import Trainer

    whole = Trainer.export

    def full(self: Trainer) -> str:
        disk.fill()
        return whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "export", full)
        with pytest.raises(StorageError):
            train_local(spec)
    assert [path.name for path in Path(spec.out).iterdir() if "model" in path.name] == []
    disk.free()
    assert train_local(spec).model_dir is not None


def test_lines_wait_for_room_and_none_is_torn_or_lost(disk: Disk) -> None:
    lines = LineFile(disk.path / "logs" / "x.jsonl")
    lines.add({"n": 0})
    disk.fill()
    while not lines.problem:
        lines.add({"n": json.loads(lines.path.read_text().splitlines()[-1])["n"] + 1, "long": "x" * 1000})
    assert "No space left on device" in lines.problem
    assert lines.path.read_text().endswith("\n")
    disk.free()
    lines.add({"n": -1})
    assert not lines.problem
    numbers = [json.loads(line)["n"] for line in lines.path.read_text().splitlines()]
    assert numbers == [*range(len(numbers) - 1), -1]


def test_lines_that_wait_too_long_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_KEPT", 3)
    (tmp_path / "file").write_text("")
    lines = LineFile(tmp_path / "file" / "x.jsonl")
    for number in range(5):
        lines.add({"n": number})
    assert (lines.dropped, bool(lines.problem)) == (2, True)


def test_the_reason_of_a_failed_run_is_not_hidden_by_the_disk_s(
    make_spec: Callable[[Path], TrainSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunLog(make_spec(tmp_path / "run"), SystemClock())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    record.close("failed", str(TrainError("the loss is no number.")))
    with pytest.raises(StorageError, match="no space left"):
        record.close("done")
    assert not (record.folder.path / "run.json.part").exists()


def test_a_profile_without_room_is_given_up_and_logged(
    make_spec: Callable[[Path], TrainSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from raytide.core.specs.train import ProfileSpec

    spec = make_spec(tmp_path / "run").model_copy(update={"profile": ProfileSpec(first=1, last=1), "steps": 2})
    Path(spec.out).mkdir()
    (Path(spec.out) / "profile").write_text("in the way")
    assert train_local(spec).steps == 2
    assert "was not written" in caplog.text
