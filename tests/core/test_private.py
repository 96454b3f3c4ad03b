"""What a spec must not name, since raytide's own programs read and write it as raytide's user."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raytide.core.data_spec import DataSpec
from raytide.core.errors import DeniedError
from raytide.core.private import check_named, check_path
from raytide.core.storage import open_url, read_bytes, write_bytes
from raytide.pipelines.build import build
from raytide.pipelines.runner import InlineRunner


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "clusters" / "local" / "client.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"token": "the operator\'s"}')
    return file


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "simplecache::file://{}", "{}/../client.json"])
def test_secrets_are_not_read_in_whatever_form_they_are_named(secret: Path, form: str) -> None:
    named = form.format(secret) if ".." not in form else form.format(secret.parent / "logs")
    with pytest.raises(DeniedError, match="raytide's own"):
        read_bytes(named)
    with pytest.raises(DeniedError):
        write_bytes(named, b"")


def test_a_link_does_not_lead_to_them(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").symlink_to(secret)
    with pytest.raises(DeniedError):
        open_url(str(tmp_path / "data" / "text.txt"))
    spec = DataSpec(inputs=(str(tmp_path / "data"),), out=str(tmp_path / "out"))
    with pytest.raises(DeniedError):
        build(spec, runner=InlineRunner())


def test_a_folder_that_holds_them_is_not_built_from(secret: Path, tmp_path: Path) -> None:
    spec = DataSpec(inputs=(str(tmp_path / "home"),), include=(".json",), out=str(tmp_path / "out"))
    with pytest.raises(DeniedError):
        build(spec, runner=InlineRunner())


@pytest.mark.parametrize(
    "path", ["/proc/1/environ", "/etc/shadow", "~/.aws/credentials", "~/.ray/auth_token", "/dev/mem"]
)
def test_the_systems_and_the_operators_own_are_private_too(path: str) -> None:
    with pytest.raises(DeniedError):
        check_path(path)
    with pytest.raises(DeniedError):
        check_named({"a": [{"b": path}]}, "job")


@pytest.mark.parametrize(
    "path", ["/tmp/rt-2-0a1b2c3d/r/x", "/tmp/ray/session_2026-11-22_10-00-00_1_2/logs", "/tmp/raytide-run-ab"]
)
def test_other_jobs_logs_and_folders_are_private(path: str) -> None:
    with pytest.raises(DeniedError):
        check_path(path)


@pytest.mark.parametrize(
    "text", ["adamw", "s3://bucket/x", "/data/x", "/dev/shm/x", "https://host/x", "a/b", "", "\0", "/" * 9999]
)
def test_data_is_not(text: str) -> None:
    check_named({"x": text}, "job")


def test_rays_token_is_private_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(DeniedError):
        open_url(str(tmp_path / "token"))


@pytest.mark.parametrize("read", ["open", "cat_file", "cat"])
def test_a_link_that_is_exchanged_after_the_check_is_found_when_it_is_opened(
    secret: Path, tmp_path: Path, read: str
) -> None:
    link = tmp_path / "text.txt"
    link.write_text("data")
    fs, path = open_url(str(link))
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(DeniedError):
        getattr(fs, read)(path)
    assert pickle.loads(pickle.dumps(fs)) == fs, "it travels to other processes"
