"""An export appears whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from raytide.actors.trainer.hf.export import AtomicDirectory
from raytide.core.errors import ConflictError, StorageError
from raytide.core.io.private_folder import private_folder


def write(name: str, body: str, draft: AtomicDirectory) -> None:
    def work(folder: Path) -> None:
        (folder / name).write_text(body)

    draft.write(work)


def fill_up(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_it_replaces_what_was_there_at_once(tmp_path: Path) -> None:
    target = tmp_path / "run/model"
    for body in ("old", "new"):
        draft = AtomicDirectory(str(target))
        write(f"{body}.json", body, draft)
        assert target.exists() == (body == "new")
        assert draft.publish() is None
        assert [file.name for file in target.iterdir()] == [f"{body}.json"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failure_leaves_what_was_there_and_is_told_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    draft = AtomicDirectory(str(target))
    write("config.json", "new", draft)
    draft.write(fill_up)
    write("more.json", "x", draft)  # nothing happens any more, and nothing is raised: other ranks are still sending
    failed = draft.publish()
    assert isinstance(failed, StorageError)
    assert "no space left" in str(failed)
    assert (target / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_at_a_url_the_config_comes_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fs = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}/model"
    for stale in ("config.json", "model-00001-of-00009.safetensors"):
        fs.pipe_file(f"/{tmp_path.name}/model/{stale}", b"old")
    put, order = type(fs).put_file, []

    def noted(self: object, local: str, remote: str, **more: object) -> None:
        order.append(Path(remote).name)
        put(self, local, remote, **more)

    monkeypatch.setattr(type(fs), "put_file", noted)
    draft = AtomicDirectory(url)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        write(name, "new", draft)
    assert draft.publish() is None
    assert order == ["model.safetensors", "tokenizer.json", "config.json"]
    found = {Path(path).name: fs.cat_file(path) for path in fs.ls(f"/{tmp_path.name}/model", detail=False)}
    assert found == dict.fromkeys(order, b"new")
    assert list(private_folder("exports").iterdir()) == []


def test_a_url_that_looks_like_a_pattern_replaces_its_own_model_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fs, home = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    for run in ("run[12]", "run1"):
        fs.pipe_file(f"{home}/{run}/model/stale.safetensors", b"old")
    draft = AtomicDirectory(f"memory:/{home}/run[12]/model")
    write("config.json", "new", draft)
    assert draft.publish() is None
    assert fs.find(f"{home}/run[12]") == [f"{home}/run[12]/model/config.json"]
    assert fs.find(f"{home}/run1") == [f"{home}/run1/model/stale.safetensors"]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of a model, whose files are first written below `tmp_path`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"memory://{tmp_path.name}/model"


def test_a_full_temporary_directory_is_not_taken_for_a_full_bucket(bucket: str, tmp_path: Path) -> None:
    draft = AtomicDirectory(bucket)
    draft.write(fill_up)
    failed = draft.publish()
    assert failed is not None and f"no space left while writing {private_folder('exports')}/" in str(failed)
    assert bucket not in str(failed)
    assert list(private_folder("exports").iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("503 from the cloud"), FileNotFoundError("no such bucket")])
def test_any_error_of_an_upload_names_the_url_and_leaves_no_files_behind(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def refuse(*_: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    draft = AtomicDirectory(bucket)
    write("config.json", "new", draft)
    failed = draft.publish()
    assert isinstance(failed, StorageError)
    assert bucket in str(failed) and str(error) in str(failed)
    assert list(private_folder("exports").iterdir()) == []


def test_an_unexpected_error_is_raised_and_leaves_no_files_behind(bucket: str, tmp_path: Path) -> None:
    def break_off(folder: Path) -> None:
        raise RuntimeError("a bug")

    draft = AtomicDirectory(bucket)
    write("config.json", "new", draft)
    with pytest.raises(RuntimeError, match="a bug"):
        draft.write(break_off)
    assert list(private_folder("exports").iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_writer_that_may_publish(tmp_path: Path) -> None:
    killed, other = AtomicDirectory(str(tmp_path / "model")), AtomicDirectory(str(tmp_path / "model.old"))
    for each in (killed, other):
        write("config.json", "new", each)
    left = set(tmp_path.iterdir())
    assert len(left) == 2

    @contextmanager
    def lost() -> Iterator[None]:
        raise ConflictError("another run has claimed the folder.")
        yield

    draft = AtomicDirectory(str(tmp_path / "model"), lost)
    write("config.json", "new", draft)
    assert isinstance(draft.publish(), ConflictError)
    assert set(tmp_path.iterdir()) == left
    draft = AtomicDirectory(str(tmp_path / "model"))
    write("config.json", "new", draft)
    assert draft.publish() is None
    assert other.publish() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.old"]
