"""The newest whole checkpoint is found, whatever was cut off, altered or pruned."""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.trainer.checkpoints import latest

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import MANIFEST, Checkpoint, FileRecord, Manifest
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, LocalStore, open_store
from raytide.core.errors import CheckpointError

FILES = {
    "__0_0.distcp": b"weights of rank 0" * 9,
    "__1_0.distcp": b"of rank 1" * 7,
    ".metadata": pickle.dumps("where what lies"),
}
Fate = Literal["whole", "unfinished", "altered", "short"]


@pytest.fixture(scope="module", autouse=True)
def _no_fsync() -> Iterator[None]:
    """The machine does not fail here, only processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


class Killed(BaseException):
    """A SIGKILL is like this exception to the code that it hits: nothing after it runs."""


class Cut(LocalStore):
    """A local store whose process is killed once it has written `left` bytes."""

    def __init__(self, root: Path, left: int) -> None:
        super().__init__(root)
        self.left = left

    @contextmanager
    def write(self, path: str) -> Iterator[BinaryIO]:
        with super().write(path) as stream:
            yield cast(BinaryIO, _Until(self, stream))


class _Until:
    def __init__(self, store: Cut, stream: BinaryIO) -> None:
        self._store, self._stream = store, stream

    def write(self, body: bytes) -> None:
        self._stream.write(body[: self._store.left])
        if len(body) > self._store.left:
            raise Killed
        self._store.left -= len(body)


def save(store: CheckpointStorage, step: int, *, attempt: str | None = None) -> Checkpoint:
    name = manifest.folder_name(step, attempt or uuid.uuid4().hex[:8])
    for file, body in FILES.items():
        with store.write(f"{name}/{file}") as stream:
            stream.write(body)
    files = {file: FileRecord(sha256=hashlib.sha256(body).hexdigest(), size=len(body)) for file, body in FILES.items()}
    body = Manifest(step=step, samples=6 * step, digests={"dataset": "d"}, world=2, files=files)
    return manifest.commit(store, name, body)


def replace(store: CheckpointStorage, path: str, body: bytes) -> None:
    with store.write(path) as stream:
        stream.write(body)


def meet(store: CheckpointStorage, checkpoint: Checkpoint, fate: Fate) -> None:
    path = f"{checkpoint.name}/__0_0.distcp"
    if fate == "unfinished":
        store.remove(checkpoint.name, first=MANIFEST)
        replace(store, path, b"half")
    elif fate != "whole":
        body = FILES["__0_0.distcp"]
        replace(store, path, body[:-1] if fate == "short" else b"W" + body[1:])


def newest(store: CheckpointStorage) -> int | None:
    found = latest(store).checkpoint
    return found.manifest.step if found else None


def test_a_write_killed_at_any_byte_is_never_found_and_the_one_before_is(tmp_path: Path) -> None:
    whole = LocalStore(tmp_path / "whole")
    name = save(whole, 20, attempt="0" * 8).name
    total = sum(whole.sizes(name).values())
    for at in [*range(0, total, 7), total - 1]:
        store = Cut(tmp_path / str(at), left=10_000)
        save(store, 10)
        store.left = at
        with pytest.raises(Killed):
            save(store, 20, attempt="0" * 8)
        found = latest(LocalStore(store.root))
        assert found.checkpoint is not None
        assert found.checkpoint.manifest.step == 10
        assert "it has no manifest.json" in str(found.rejected[0]) or at == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_or_changed_at_any_byte_is_named_and_passed_over(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    save(store, 10)
    name = save(store, 20).name
    file = data.draw(st.sampled_from([*FILES, MANIFEST]))
    path = store.root / name / file
    body = path.read_bytes()
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(body[:at])
    else:
        path.write_bytes(body[:at] + bytes([body[at] ^ (1 << data.draw(st.integers(0, 7)))]) + body[at + 1 :])
    found = latest(store)
    assert newest(store) == 10
    assert file in str(found.rejected[0])
    assert "Delete the folder" in found.rejected[0].hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    name = save(store, 20).name
    (tmp_path / name / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        manifest.verify(store, name)


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("step-00000020", "step-20-0123abcd", "step-00000020-0123abcd.part", "else"):
        (tmp_path / name).mkdir()
    assert manifest.folders_newest_first(store) == []
    assert latest(LocalStore(tmp_path / "nowhere")).checkpoint is None


Lying = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["whole", "unfinished", "altered", "short"])), max_size=7)


@settings(max_examples=80, deadline=None)
@given(lying=Lying, step=st.integers(1, 9), keep=st.integers(1, 3))
def test_pruning_keeps_the_newest_whole_steps_and_touches_nothing_newer_or_unfinished(
    lying: list[tuple[int, Any]], step: int, keep: int
) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    found = []
    for at, fate in lying:
        checkpoint = save(store, at)
        meet(store, checkpoint, fate)
        found.append((checkpoint, fate))
    sealed = save(store, step)
    known_bad = [checkpoint.name for checkpoint, fate in found if fate == "altered"]
    manifest.prune(store, keep, sealed, known_bad)

    left = set(manifest.folders_newest_first(store))
    whole = sorted({step, *(at for at, fate in lying if fate == "whole" and at <= step)})[-keep:]
    for checkpoint, fate in found:
        at = checkpoint.manifest.step
        kept = at > step or fate == "unfinished" or (fate == "whole" and at in whole)
        assert (checkpoint.name in left) == kept
    assert manifest.verify(store, sealed.name) == sealed
    for name in left:
        store.remove(name, first=MANIFEST)


def test_what_a_removal_that_was_cut_off_leaves_is_no_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    old, new = save(store, 10), save(store, 20)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
    manifest.prune(store, 1, new)
    assert manifest.unfinished_folders(store) == [old.name]
    assert newest(store) == 20
