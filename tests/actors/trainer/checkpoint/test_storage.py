"""Checkpoints in an object store: a real S3 server, in this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from tests.actors.trainer.checkpoints import latest

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, open_store
from raytide.actors.trainer.checkpoint.verify import verify
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import NotFoundError, StorageError
from raytide.core.specs.train import TrainSpec


def damage(store: CheckpointStorage, path: str) -> None:
    with store.read(path) as stream:
        body = stream.read()
    store.publish(path, body[:-5] + b"other")


def write(store: CheckpointStorage, path: str, *parts: bytes) -> None:
    with store.write(path) as stream:
        for part in parts:
            stream.write(part)


def test_a_run_saves_resumes_and_verifies_in_a_bucket(spec: TrainSpec, bucket: str) -> None:
    there = spec.model_copy(update={"checkpoint_dir": f"{bucket}/run", "steps": 4, "checkpoint_every": 1})
    losses: list[float] = []
    train_local(there, on_step=lambda result: losses.append(result.loss))
    verdicts = verify(f"{bucket}/run")
    assert [(verdict.step, verdict.state) for verdict in verdicts] == [(4, "whole"), (3, "whole")]
    assert not Path(spec.out, "checkpoints").exists()

    store = open_store(f"{bucket}/run")
    name = manifest.folders_newest_first(store)[0]
    damage(store, f"{name}/__0_0.distcp")
    assert verify(verdicts[0].url)[0].state == "bad"
    again: list[float] = []
    train_local(there.model_copy(update={"steps": 5}), on_step=lambda result: again.append(result.loss))
    assert again[0] == losses[3]  # from step 3, bit for bit
    assert [verdict.step for verdict in verify(f"{bucket}/run")] == [5, 4]
    with pytest.raises(NotFoundError):
        verify(f"{bucket}/elsewhere")


def test_a_write_that_ends_before_its_manifest_is_never_found(bucket: str) -> None:
    store = open_store(f"{bucket}/run")
    name = manifest.folder_name(7, "0123abcd")
    with store.write(f"{name}/__0_0.distcp") as stream:
        stream.write(b"whole file")
    with suppress(KeyboardInterrupt), store.write(f"{name}/__1_0.distcp") as stream:
        stream.write(b"half a fi")
        raise KeyboardInterrupt
    assert store.sizes(name) == {"__0_0.distcp": 10}
    found = latest(store)
    assert found.checkpoint is None
    assert "unfinished" in str(found.rejected[0])
    assert manifest.unfinished_folders(store) == [name]
    manifest.remove(store, name)
    assert store.folders() == []


def test_a_store_that_fails_at_reading_is_not_taken_for_a_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    name = manifest.folder_name(7, "0123abcd")
    store.publish(f"{name}/manifest.json", b"{}")
    assert "is not a manifest" in str(latest(store).rejected[0])

    def broken(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "read", broken)
    with pytest.raises(StorageError, match="Permission denied"):
        latest(store)


def test_a_folder_whose_name_looks_like_a_pattern_is_removed_and_no_other(bucket: str) -> None:
    one, other = open_store(f"{bucket}/run[12]"), open_store(f"{bucket}/run1")
    for store in (one, other):
        store.publish("step/manifest.json", b"{}")
        store.publish("step/file", b"x")
    one.remove("step", first="manifest.json")
    assert (one.sizes("step"), other.sizes("step")) == ({}, {"manifest.json": 2, "file": 1})
    one.remove("step", first="manifest.json")


def test_a_file_whose_last_part_is_refused_leaves_no_parts_in_the_bucket(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    import s3fs

    call = s3fs.S3File._call_s3
    parts: list[str] = []

    def refuse(self: object, method: str, *args: object, **options: object) -> object:
        if method == "upload_part":
            parts.append(method)
            if len(parts) == 2:
                raise OSError(5, "SlowDown")
        return call(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3File, "_call_s3", refuse)
    store = open_store(f"{bucket}/run")
    monkeypatch.setattr(store._fs, "default_block_size", 5 << 20)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="SlowDown"):
        write(store, "step/file", bytes(6 << 20), b"the rest, which `close` sends")
    assert len(parts) == 2
    assert boto3.client("s3").list_multipart_uploads(Bucket=bucket.removeprefix("s3://")).get("Uploads", []) == []
