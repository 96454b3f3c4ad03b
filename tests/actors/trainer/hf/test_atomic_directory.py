"""An export appears whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import fsspec
import pytest

from raytide.actors.trainer.hf.export import AtomicDirectory
from raytide.core.errors import StorageError


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
    assert list(tmp_path.iterdir()) == []
