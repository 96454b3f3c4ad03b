from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from raytide.core.errors import DataError, StorageError
from raytide.registry import content_digest
from raytide.registry.content_digest import digest_of_directory, digest_to_compare


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (folder / "extra" / "tokens.txt").write_text("a b")
    return folder


def test_the_digest_is_of_names_and_contents_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    found = digest_of_directory(str(model))
    assert (found.files, found.bytes) == (3, 2 + 256 * 9000 + 3)
    shutil.copytree(model, tmp_path / "elsewhere")
    assert digest_of_directory(f"{tmp_path}/elsewhere/") == found
    assert digest_of_directory(f"file://{model}") == found


@pytest.mark.parametrize("change", ["content", "name", "new", "moved"])
def test_every_change_of_a_file_changes_it(model: Path, change: str) -> None:
    before = digest_of_directory(str(model)).sha256
    if change == "content":
        (model / "extra" / "tokens.txt").write_text("a c")
    elif change == "name":
        (model / "extra" / "tokens.txt").rename(model / "extra" / "words.txt")
    elif change == "new":
        (model / "empty").touch()
    else:
        (model / "extra" / "tokens.txt").rename(model / "tokens.txt")
    assert digest_of_directory(str(model)).sha256 != before


def test_hidden_files_do_not_count(model: Path) -> None:
    before = digest_of_directory(str(model))
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_text("x")
    (model / ".gitattributes").write_text("x")
    assert digest_of_directory(str(model)) == before


def test_a_model_in_an_object_store_has_the_digest_of_its_copy(model: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in model.rglob("*"):
        if file.is_file():
            memory.pipe_file(f"/digest-test/model/{file.relative_to(model)}", file.read_bytes())
    try:
        assert digest_of_directory("memory://digest-test/model") == digest_of_directory(str(model))
    finally:
        memory.rm("/digest-test", recursive=True)


def test_the_mark_of_a_folder_in_a_bucket_does_not_count(model: Path, aws: None) -> None:
    import boto3

    store = boto3.client("s3")
    store.create_bucket(Bucket="marked")
    for file in ("config.json", "model.safetensors", "extra/tokens.txt"):
        store.put_object(Bucket="marked", Key=f"model/{file}", Body=(model / file).read_bytes())
    for mark in ("model/", "model/extra/", "model/empty/"):
        store.put_object(Bucket="marked", Key=mark, Body=b"")
    assert digest_of_directory("s3://marked/model") == digest_of_directory(str(model))


def test_a_model_in_a_bucket_that_has_changed_is_read_again(aws: None) -> None:
    import boto3

    store = boto3.client("s3")
    store.create_bucket(Bucket="changing")
    digests = set()
    for body in (b"{}", b"{ }"):
        store.put_object(Bucket="changing", Key="model/config.json", Body=body)
        digests.add(digest_of_directory("s3://changing/model").sha256)
    assert len(digests) == 2


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="not a model directory"):
            digest_of_directory(str(where))


def test_a_link_to_a_file_counts_as_the_file(model: Path, tmp_path: Path) -> None:
    """As in a snapshot of Hugging Face's cache."""
    linked, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    for file in [file for file in model.rglob("*") if file.is_file()]:
        link, blob = linked / file.relative_to(model), blobs / file.relative_to(model)
        for each in (link, blob):
            each.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link.symlink_to(blob)
    before = digest_of_directory(str(linked))
    assert before == digest_of_directory(str(model))
    (linked / "config.json").unlink()
    (linked / "config.json").write_bytes((model / "config.json").read_bytes())
    earlier = digest_of_directory(str(linked), with_links=False)  # as earlier releases stored it
    assert digest_to_compare(str(linked), earlier.sha256) == earlier != before
    assert digest_to_compare(str(linked), before.sha256) == before
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(blobs / "nothing")
    with pytest.raises(DataError, match=r"config.json is a link to nothing"):
        digest_to_compare(str(linked), before.sha256)
    with pytest.raises(DataError, match=r"config.json is a link to nothing"):
        digest_of_directory(str(linked))


def test_a_folder_or_a_file_that_cannot_be_read_is_an_error_and_not_left_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("/extra"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    def refuse(self: object, path: str, **_: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(StorageError, match=r"Permission denied.*extra"):
            digest_of_directory(str(model))
    monkeypatch.setattr(LocalFileSystem, "_open", refuse)
    with pytest.raises(StorageError, match=r"Permission denied"):
        digest_of_directory(str(model))


def test_a_file_that_grows_while_it_is_read_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = content_digest._chunks

    def longer(file: object) -> object:
        yield from chunks(file)
        yield b"more"

    monkeypatch.setattr(content_digest, "_chunks", longer)
    with pytest.raises(DataError, match="changed while it was read"):
        digest_of_directory(str(model))
