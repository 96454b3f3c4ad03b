from __future__ import annotations

import errno
import hashlib
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
from botocore.exceptions import NoCredentialsError

from raytide.core.errors import DataError, StorageError
from raytide.core.io import storage


@pytest.mark.parametrize("protocol", ["local", "memory"])
def test_what_is_written_is_read(protocol: str, tmp_path: Path) -> None:
    base = str(tmp_path) if protocol == "local" else f"memory://{tmp_path.name}"
    url = storage.join(base, "deep", "er", "file")
    assert not storage.exists(url)
    for content in (b"one", b"two"):
        storage.write_bytes(url, content)
        assert storage.read_bytes(url) == content
    assert storage.exists(url)
    fs, path = storage.open_url(storage.join(base, "deep", "er"))
    assert len(fs.ls(path)) == 1
    with pytest.raises(DataError, match="does not exist"):
        storage.read_bytes(url + "x")


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(DataError, match="nonsense://x"):
        storage.open_url("nonsense://x")


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write")])
def test_a_write_that_fails_leaves_the_old_content_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    url = str(tmp_path / "file")
    storage.write_bytes(url, b"old")

    def full(path: str) -> None:
        raise OSError(code, "simulated")

    monkeypatch.setattr(storage, "sync", full)
    with pytest.raises(StorageError, match=words) as caught:
        storage.write_bytes(url, b"new")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert storage.is_full_disk(error) == (code == errno.ENOSPC)
    assert storage.read_bytes(url) == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_hashes_are_sha256() -> None:
    assert storage.sha256(b"x") == hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize("protocol", ["local", "memory"])
def test_a_name_that_looks_like_a_pattern_is_a_name(protocol: str, tmp_path: Path) -> None:
    base = str(tmp_path) if protocol == "local" else f"memory://{tmp_path.name}"
    for name in ("data[12]", "data1"):
        storage.write_bytes(storage.join(base, name, "deep", "file"), name.encode())
    storage.remove_tree(storage.join(base, "data[12]"))
    assert not storage.exists(storage.join(base, "data[12]"))
    assert storage.read_bytes(storage.join(base, "data1", "deep", "file")) == b"data1"
    with pytest.raises(FileNotFoundError):
        storage.remove_tree(storage.join(base, "data[12]"))


def test_a_client_whose_errors_are_no_oserrors_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url, error = f"memory://{tmp_path.name}/file", NoCredentialsError()
    memory = type(storage.open_url(url)[0])
    for method in ("cat_file", "pipe_file", "exists"):
        monkeypatch.setattr(memory, method, Mock(side_effect=error))
    for call in (storage.read_bytes, storage.exists, lambda url: storage.write_bytes(url, b"x")):
        with pytest.raises(StorageError, match="file: NoCredentialsError: Unable to locate credentials"):
            call(url)
