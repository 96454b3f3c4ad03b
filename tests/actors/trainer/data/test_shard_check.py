"""Nothing is learned from a shard that is not what was written; finding that out is done once on a machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from tests.actors.trainer.conftest import VOCAB, write_dataset

from raytide.actors.trainer.data import local_copy, shard_check
from raytide.actors.trainer.data.dataloader import DataLoader
from raytide.actors.trainer.data.order.shuffle import BatchSampler
from raytide.actors.trainer.data.shard_check import ShardCheck
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import DataError, StorageError, WaitTimeoutError
from raytide.core.io.private_folder import lock, private_folder
from raytide.core.specs.train import TrainSpec

HALF = "shards/00000.bin"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "tokens")


def zero_half(dataset: Path) -> None:
    file = dataset / HALF
    body = file.read_bytes()
    file.write_bytes(body[: len(body) // 2] + bytes(len(body) - len(body) // 2))


def rewrite(dataset: Path, file: str, body: bytes) -> None:
    """As a build that is broken would: the manifest agrees."""
    (dataset / file).write_bytes(body)
    manifest = json.loads((dataset / "manifest.json").read_text())
    for shard in manifest["shards"]:
        if shard["file"] == file:
            shard["sha256"] = hashlib.sha256(body).hexdigest()
    (dataset / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose bytes were read, in order."""
    names: list[str] = []
    whole = ShardCheck._hash

    def counted(self: ShardCheck, path: Path) -> Any:
        names.append(path.name)
        return whole(self, path)

    monkeypatch.setattr(ShardCheck, "_hash", counted)
    return names


def test_a_half_zeroed_shard_is_never_trained_on(mine: Path, spec: TrainSpec) -> None:
    zero_half(mine)
    with pytest.raises(DataError, match=r"shards/00000\.bin of .*tokens was altered") as caught:
        train_local(spec.model_copy(update={"dataset": str(mine)}))
    found = hashlib.sha256((mine / HALF).read_bytes()).hexdigest()
    wanted = json.loads((mine / "manifest.json").read_text())["shards"][0]["sha256"]
    assert found in caught.value.message
    assert wanted in caught.value.message
    assert "Build the dataset again" in caught.value.hint
    assert not (Path(spec.out) / "metrics.jsonl").exists()


def test_an_id_outside_the_vocabulary_is_a_named_error(mine: Path, spec: TrainSpec) -> None:
    body = np.frombuffer((mine / HALF).read_bytes(), "<u2").copy()
    body[1234] = VOCAB
    rewrite(mine, HALF, body.tobytes())
    with pytest.raises(DataError, match=rf"00000\.bin of .* holds the id {VOCAB}, outside its vocabulary of {VOCAB}"):
        train_local(spec.model_copy(update={"dataset": str(mine)}))


@pytest.mark.parametrize("bad", [VOCAB, 2**40, -1])
def test_whatever_data_gives_an_id_outside_its_vocabulary_the_step_is_named(
    dataset: Path, spec: TrainSpec, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TokenData.examples

    def foreign(self: TokenData, ids: Any) -> Any:
        inputs, targets = whole(self, ids)
        inputs[0, 3] = bad
        return inputs, targets

    monkeypatch.setattr(TokenData, "examples", foreign)
    with pytest.raises(DataError, match=r"has the id .* in step 1, outside its vocabulary of 96"):
        train_local(spec)


def test_each_shard_is_hashed_once_and_again_when_it_changed(mine: Path, hashed: list[str]) -> None:
    for _ in range(3):
        TokenData(str(mine), 32)
    assert sorted(hashed) == ["00000.bin", "00001.bin", "00002.bin"]

    before = (mine / HALF).stat()
    zero_half(mine)
    os.utime(mine / HALF, ns=(before.st_atime_ns, before.st_mtime_ns))  # as who hides it would
    with pytest.raises(DataError, match="was altered"):
        TokenData(str(mine), 32)
    assert hashed[3:] == ["00000.bin"]


def test_processes_that_open_it_together_share_the_work(mine: Path, hashed: list[str]) -> None:
    barrier = threading.Barrier(8)

    def rank() -> None:
        barrier.wait()
        TokenData(str(mine), 32)

    ranks = [threading.Thread(target=rank) for _ in range(8)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(30)
    assert sorted(hashed) == ["00000.bin", "00001.bin", "00002.bin"]


def test_a_note_that_is_torn_is_made_again(mine: Path, hashed: list[str]) -> None:
    TokenData(str(mine), 32)
    for note in private_folder("checked").glob("*.json"):
        note.write_text("{")
    TokenData(str(mine), 32)
    assert len(hashed) == 6


def test_a_full_disk_beside_the_data_costs_only_the_note(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_check, "write_json", full)
    assert TokenData(str(mine), 32).n_sequences > 0


def test_a_large_dataset_is_hashed_on_beside_the_training_which_ends_at_the_next_step(
    mine: Path, spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero_half(mine)
    go_on, whole = threading.Event(), ShardCheck._check_all

    def later(self: ShardCheck) -> None:
        go_on.wait(30)
        whole(self)

    monkeypatch.setattr(ShardCheck, "_check_all", later)
    monkeypatch.setattr(ShardCheck.wait, "__defaults__", (0.0,))
    data = TokenData(str(mine), 32)
    data.examples(np.arange(2))
    go_on.set()
    with pytest.raises(DataError, match="was altered"):
        data._check.wait(30.0)
    with pytest.raises(DataError, match="was altered"):
        data.examples(np.arange(2))


def bad_on_one(spec: TrainSpec, rank: int, world: int, meet: str) -> str:
    import torch.distributed as dist

    from raytide.actors.trainer.distributed import process_group

    def work() -> int:
        if rank == 1:
            raise DataError("shard 7 is bad.", hint="Build it again.")
        return rank

    mine = process_group.join(dist.FileStore(meet, world), rank, spec.layout.sizes(world), timeout_s=30.0)
    try:
        mine.run_on_all(work)
    except DataError as error:
        return str(error)
    finally:
        process_group.leave()
    return "went on"


def test_what_one_rank_finds_ends_all_of_them_with_that_error(
    run_ranks: Callable[..., list[Any]], spec: TrainSpec
) -> None:
    assert run_ranks(2, bad_on_one, spec) == ["shard 7 is bad. Build it again."] * 2


def remote(dataset: Path, name: str) -> str:
    fs = fsspec.filesystem("memory")
    fs.put(str(dataset), f"/{name}", recursive=True)
    return f"memory://{name}"


def test_a_remote_dataset_is_checked_too_and_only_its_own_files_are_copied(mine: Path) -> None:
    (mine / "unrelated.txt").write_text("x" * 100)
    url = remote(mine, "staged-1")
    data = TokenData(url, 32)
    assert not (data.path / "unrelated.txt").exists()
    assert (data.path / "tokenizer.json").is_file()

    zero_half(mine)
    with pytest.raises(DataError, match="was altered"):
        TokenData(remote(zeroed(mine), "staged-2"), 32)


def zeroed(mine: Path) -> Path:
    """Another manifest, so that it is another dataset."""
    manifest = json.loads((mine / "manifest.json").read_text())
    (mine / "manifest.json").write_text(json.dumps(manifest | {"documents": 2}))
    return mine


def test_a_copy_that_does_not_fit_is_refused_with_both_numbers_and_leaves_nothing(
    mine: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(scratch)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"staged-3 needs 0\.000 GB in .*datasets, which has 0\.000 GB left"):
        TokenData(remote(mine, "staged-3"), 32)
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(scratch))
    assert [path.suffix for path in private_folder("datasets").iterdir()] == [".lock"]
    assert TokenData("memory://staged-3", 32).n_sequences > 0


def test_a_copy_that_a_killed_process_left_is_no_dataset(mine: Path) -> None:
    url = remote(mine, "staged-4")
    home = local_copy.local_copy(url)
    half = home.with_suffix(".part")
    home.rename(half)
    (half / HALF).write_bytes(b"half")
    assert TokenData(url, 32).n_sequences > 0
    assert not half.exists()


def test_a_store_that_is_away_is_a_storage_error_although_the_machine_has_a_copy(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = remote(mine, "staged-5")
    local_copy.local_copy(url)

    def away(url: str) -> bytes:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(local_copy, "read_bytes", away)
    with pytest.raises(StorageError, match="cannot reach memory://staged-5: ConnectionError: no route to host"):
        local_copy.local_copy(url)


@pytest.mark.parametrize("taken", ["link", "file", "open"])
def test_a_folder_that_somebody_else_prepared_is_refused(scratch: Path, tmp_path: Path, taken: str) -> None:
    top = scratch / f"raytide-{os.getuid()}"
    if taken == "link":
        (tmp_path / "theirs").mkdir()
        top.symlink_to(tmp_path / "theirs")
    elif taken == "file":
        top.write_text("")
    else:
        top.mkdir()
        top.chmod(0o777)
    with pytest.raises(StorageError):
        private_folder("datasets")


def test_the_folder_and_what_is_in_it_belong_to_this_user_alone(mine: Path) -> None:
    TokenData(str(mine), 32)
    folder = private_folder("checked")
    assert {path.stat().st_mode & 0o077 for path in [folder.parent, folder, *folder.iterdir()]} == {0}


def test_a_lock_that_is_never_let_go_of_ends_the_wait(tmp_path: Path) -> None:
    with lock(tmp_path / "x"), pytest.raises(WaitTimeoutError, match="another process has held"):
        lock(tmp_path / "x", timeout_s=0.0).__enter__()


def test_batches_take_any_data_with_its_vocabulary(dataset: Path, spec: TrainSpec) -> None:
    from raytide.actors.trainer.distributed import process_group

    data = TokenData(str(dataset), spec.seq_len)
    with process_group.single_process() as mine:
        sampler = BatchSampler(0, data.n_sequences, spec.global_batch)
        batches = DataLoader(data, sampler, mine, spec, data.vocab_size)
        assert batches.next_batch(0, 2)[2] == spec.global_batch * spec.seq_len
