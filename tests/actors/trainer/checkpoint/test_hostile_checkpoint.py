"""A checkpoint that somebody crafted runs nothing, reads and writes nothing outside its folder, and is named."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from raytide.actors.trainer.checkpoint import manifest, safe_unpickler
from raytide.actors.trainer.checkpoint.dcp.metadata import metadata_of
from raytide.actors.trainer.checkpoint.manifest import FileRecord, Manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.checkpoint.verify import verify
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import CheckpointError, ConfigError, RaytideError
from raytide.core.specs.train import TrainSpec


class Attribute:
    """Unpickled, it is an attribute of a class."""

    def __init__(self, of: type, name: object) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


class Runs:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def trained_once(make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    spec = make_spec(tmp_path_factory.mktemp("trained") / "run")
    spec = spec.model_copy(update={"steps": 2, "checkpoint_every": 1})
    train_local(spec)
    return spec


@pytest.fixture
def trained(trained_once: TrainSpec, tmp_path: Path) -> TrainSpec:
    shutil.copytree(trained_once.out, tmp_path / "run")
    return trained_once.model_copy(update={"out": str(tmp_path / "run"), "steps": 3})


def folders(spec: TrainSpec) -> list[Path]:
    """Returns the folders of the checkpoints, newest first."""
    root = Path(spec.checkpoint_url)
    return [root / name for name in manifest.folders_newest_first(LocalStore(root))]


def craft(folder: Path, file: str, body: bytes) -> None:
    """As who writes a checkpoint would: the manifest agrees with it."""
    (folder / file).write_bytes(body)
    told = json.loads((folder / "manifest.json").read_text())
    told["files"][file] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
    seal(folder, told)


def seal(folder: Path, told: dict[str, Any]) -> None:
    told.pop("sha256", None)
    told["sha256"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(told))


def crafted(folder: Path, mark: Path) -> bytes:
    """A metadata that is as it should be, and runs a command beside."""
    whole = pickle.loads((folder / ".metadata").read_bytes())
    whole.planner_data = Runs(f"touch {mark}")
    return pickle.dumps(whole)


def test_a_metadata_that_would_run_a_command_is_passed_over_on_resume_and_nothing_runs(
    trained: TrainSpec, tmp_path: Path
) -> None:
    newest = folders(trained)[0]
    craft(newest, ".metadata", crafted(newest, tmp_path / "ran"))
    assert train_local(trained).steps == 3
    events = (Path(trained.out) / "events.jsonl").read_text()
    assert "posix.system" in events
    assert not (tmp_path / "ran").exists()


def test_a_run_with_crafted_checkpoints_alone_ends_with_a_named_error(trained: TrainSpec, tmp_path: Path) -> None:
    for folder in folders(trained):
        craft(folder, ".metadata", crafted(folder, tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"was crafted: it names posix\.system"):
        train_local(trained)
    assert not (tmp_path / "ran").exists()


def test_verify_names_a_crafted_metadata_and_runs_nothing(trained: TrainSpec, tmp_path: Path) -> None:
    newest = folders(trained)[0]
    craft(newest, ".metadata", crafted(newest, tmp_path / "ran"))
    verdicts = verify(trained.out)
    assert [verdict.state for verdict in verdicts] == ["bad", "whole"]
    assert "posix.system" in verdicts[0].problems[0]
    assert not (tmp_path / "ran").exists()


def test_an_export_and_a_new_run_from_its_model_read_no_metadata(trained: TrainSpec, tmp_path: Path) -> None:
    for folder in folders(trained):
        craft(folder, ".metadata", crafted(folder, tmp_path / "ran"))
    with pytest.raises(CheckpointError, match="was crafted"):
        train_local(trained.model_copy(update={"export": True}))
    second = trained.model_copy(update={"init_from": trained.out, "out": str(tmp_path / "second")})
    with pytest.raises(RaytideError, match="holds no model"):
        resolve_model(second, open_data(second))
    assert not (tmp_path / "ran").exists()


def test_a_piece_that_would_run_a_command_is_a_named_error(trained: TrainSpec, tmp_path: Path) -> None:
    for folder in folders(trained):
        stream = io.BytesIO()
        torch.save(Runs(f"touch {tmp_path / 'ran'}"), stream)
        (file,) = (name for name in os.listdir(folder) if name.endswith(".distcp"))
        size = (folder / file).stat().st_size
        craft(folder, file, stream.getvalue() * (1 + size // len(stream.getvalue())))
    with pytest.raises(CheckpointError, match="holds no tensor for"):
        train_local(trained)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../out", "/etc/hostname", "a/b", "..", "", "manifest.json", "a\x00b", "a\nb"])
def test_a_manifest_names_files_of_its_own_folder_alone(trained: TrainSpec, name: str) -> None:
    newest = folders(trained)[0]
    told = json.loads((newest / "manifest.json").read_text())
    told["files"][name] = {"sha256": "0" * 64, "size": 1}
    seal(newest, told)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        manifest.read(LocalStore(newest.parent), newest.name)
    with pytest.raises((ValueError, ConfigError), match="inside a checkpoint's folder"):
        Manifest(step=1, samples=1, digests={}, world=1, files={name: FileRecord(sha256="0" * 64, size=1)})


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "null", '{"step": 1e999}', '{"step": %s}' % ("9" * 5000)])
def test_a_manifest_that_is_none_is_a_named_error(trained: TrainSpec, text: str) -> None:
    newest = folders(trained)[0]
    (newest / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        manifest.read(LocalStore(newest.parent), newest.name)


def test_a_manifest_of_another_step_than_its_folders_is_refused(trained: TrainSpec) -> None:
    newest = folders(trained)[0]
    told = json.loads((newest / "manifest.json").read_text())
    seal(newest, told | {"step": 10**6})
    with pytest.raises(CheckpointError, match="is of step 1000000"):
        manifest.read(LocalStore(newest.parent), newest.name)


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_file_that_is_a_link_or_a_pipe_is_named_and_never_opened(
    trained: TrainSpec, tmp_path: Path, what: str
) -> None:
    newest = folders(trained)[0]
    file = newest / ".metadata"
    file.rename(tmp_path / "elsewhere")
    if what == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert [verdict.state for verdict in verify(trained.out)] == ["bad", "whole"]
    assert train_local(trained).steps == 3


def test_pruning_a_link_to_another_runs_checkpoint_leaves_that_alone(trained: TrainSpec, tmp_path: Path) -> None:
    newest = folders(trained)[0]
    theirs = tmp_path / "theirs"
    shutil.copytree(newest, theirs)
    link = newest.with_name(manifest.folder_name(2, "0" * 8))
    link.symlink_to(theirs)
    manifest.remove(LocalStore(newest.parent), link.name)
    assert not link.exists()
    assert (theirs / "manifest.json").exists()


def metadata(file: str = "__0_0.distcp", offset: int = 0, length: int = 10) -> Metadata:
    size = torch.Size([2])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    tensors = {"w": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [chunk])}
    places = {MetadataIndex("w", torch.Size([0])): _StorageInfo(file, offset, length)}
    return Metadata(tensors, None, places, StorageMeta("somewhere"))


def test_what_dcp_writes_is_read_as_pickle_would() -> None:
    whole = metadata()
    found = metadata_of(pickle.dumps(whole), {"__0_0.distcp": 10}, "x")
    assert found.state_dict_metadata == whole.state_dict_metadata
    assert found.storage_data == whole.storage_data


def test_members_of_enumerations_are_read_as_python_3_11_2_pickles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = type(TensorProperties().__getstate__()[3])
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda member, _: (getattr, (encoding, member.name)))
    body = pickle.dumps(metadata())
    assert b"getattr" in body
    found = metadata_of(body, {"__0_0.distcp": 10}, "x")
    assert found.state_dict_metadata == metadata().state_dict_metadata


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("../../secret", 0, 1), "not a file of this checkpoint"),
        (("/etc/hostname", 0, 1), "not a file of this checkpoint"),
        (("__0_0.distcp", 0, 11), "beyond the end"),
        (("__0_0.distcp", -1, 1), "negative"),
        (("__0_0.distcp", 1 << 70, 1), "too large"),
    ],
)
def test_a_piece_lies_in_a_file_of_the_checkpoint(place: tuple[str, int, int], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        metadata_of(pickle.dumps(metadata(*place)), {"__0_0.distcp": 10}, "x")


@pytest.mark.parametrize(
    "hostile",
    [
        Runs("true"),
        functools.partial(os.system, "true"),
        eval,
        torch.load,
        {"a": getattr},
        Attribute(Metadata, "__init__"),
        Attribute(type(TensorProperties().__getstate__()[3]), 1),
        {(1, 2): 3},
        {1: 2},
        [{"a"}],
        bytearray(b"x"),
    ],
    ids=[
        "an object",
        "a partial",
        "eval",
        "torch.load",
        "getattr in a dict",
        "an attribute of another class",
        "an attribute without a name",
        "a tuple as key",
        "a number as key",
        "a set",
        "bytes",
    ],
)
def test_a_pickle_holds_nothing_but_what_metadata_does(hostile: object) -> None:
    with pytest.raises(CheckpointError):
        safe_unpickler.read(pickle.dumps(hostile), "x")


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x04r\xff\xff\xff\xff.",  # a memo index of four billion
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a bytearray of eight exabytes
        b"ctorch\nSize\n}\x8c\x01a\x8c\x01bsb.",  # sets an attribute of a class
        b"ctorch\nSize\n(}\x8c\x01a\x8c\x01bs\x86b.",
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"K\x01s.",  # hashing it would overflow the stack
        b"Ptorch\n.",
        b"\x82\x01.",
        b"",
        b".",
        b"\x80\x04N",
    ],
)
def test_a_hostile_pickle_is_a_named_error(body: bytes) -> None:
    with pytest.raises(CheckpointError):
        safe_unpickler.read(body, "x")


def test_a_list_that_is_referred_to_again_and_again_is_not_unfolded() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 3000
    tensors: dict[str, Any] = {}
    for index in range(3000):
        tensors[str(index)] = TensorStorageMetadata(TensorProperties(), torch.Size([1]), chunks)
    with pytest.raises(CheckpointError, match="more shards than its bytes"):
        metadata_of(pickle.dumps(Metadata(tensors, None, {}, None)), {}, "x")


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_any_changed_byte_gives_metadata_or_a_named_error(at: int, byte: int, cut: bool) -> None:
    body = bytearray(pickle.dumps(metadata()))
    body[at % len(body)] = byte
    try:
        metadata_of(bytes(body[: at % len(body)] if cut else body), {"__0_0.distcp": 10}, "x")
    except CheckpointError:
        return
