"""Specs must not name some paths, since raytide's own programs read and write them as raytide's user."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest

from raytide.core.errors import DeniedError, RaytideError
from raytide.core.io import private_paths
from raytide.core.io.private_paths import check_named, check_path
from raytide.core.io.storage import open_url, read_bytes, write_bytes
from raytide.core.specs.data import DataSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner


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
    with pytest.raises(DeniedError, match="in a folder of raytide"):
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


def test_a_home_in_shared_memory_is_as_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", "/dev/shm/home")
    for path in ("/dev/shm/home/clusters/local/client.json", "/dev/shm/rt-2-0a1b2c3d/x"):
        with pytest.raises(DeniedError):
            check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("~/.npmrc", "~/.bash_history", "~/.cache/huggingface/token", "/srv/ana/.ssh/id_ed25519", "/srv/u/.aws/x"),
        *("/var/spool/cron/crontabs", f"{tempfile.gettempdir()}/raytide-{os.getuid()}/datasets/x"),
    ],
)
def test_settings_of_any_user_and_copies_of_others_data_are_private(path: str) -> None:
    with pytest.raises(DeniedError):
        check_path(path)


def test_an_installed_python_in_a_hidden_folder_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As pyenv and conda install it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / ".pyenv" / "versions" / "3.11"))
    private_paths._python.cache_clear()
    try:
        check_path(str(tmp_path / ".pyenv" / "versions" / "3.11" / "lib" / "json"))
        for name in (".pyenv/version", ".pyenv/versions/3.11/.netrc", ".settings"):
            with pytest.raises(DeniedError):
                check_path(str(tmp_path / name))
    finally:
        private_paths._python.cache_clear()


def test_caches_of_models_are_not(tmp_path: Path) -> None:
    check_path("~/.cache/huggingface/hub/models--a--b/snapshots/1/config.json")


@pytest.mark.parametrize("length", [0, 4090])
def test_relative_and_padded_paths_are_followed_too(secret: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.chdir(secret.parents[2])
    named = "./" * (length // 2) + "clusters/local/client.json"
    with pytest.raises(DeniedError):
        check_named({"x": named}, "job")
    with pytest.raises(DeniedError):
        check_named({"x": f"file://{'/' * length}{secret}"}, "job")


def test_a_link_inside_a_named_folder_is_found(secret: Path, tmp_path: Path) -> None:
    model = tmp_path / "mine" / "model"
    model.mkdir(parents=True)
    (model / "chat_template.jinja").symlink_to(secret)
    for named in (model, model.parent):
        with pytest.raises(DeniedError, match=r"chat_template\.jinja"):
            check_named({"init_from": str(named)}, "job", links=True)


def test_the_opener_looks_at_what_was_opened(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "folder").symlink_to(secret.parent)
    os.mkfifo(tmp_path / "pipe")
    before = secret.read_text()
    for name in ("link", "folder/client.json", "folder/new.json"):
        for mode in ("rb", "wb", "ab", "r+b"):
            with pytest.raises((RaytideError, OSError)), open(tmp_path / name, mode, opener=private_paths.safe_opener):
                pass
    with pytest.raises(OSError, match="regular"), open(tmp_path / "pipe", "rb", opener=private_paths.safe_opener):
        pass
    assert secret.read_text() == before
    with open(tmp_path / "data", "wb", opener=private_paths.safe_opener) as file:
        file.write(b"whole")
    assert (tmp_path / "data").read_bytes() == b"whole"


def test_no_link_in_a_folder_is_written_through(secret: Path, tmp_path: Path) -> None:
    before = secret.read_text()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part").symlink_to(secret)
    fs, path = open_url(str(tmp_path / "out"))
    with pytest.raises(DeniedError):
        fs.pipe_file(f"{path}/part", b"")
    assert secret.read_text() == before


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(private_paths.ROOTS, "[]")  # restored afterwards
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "far").mkdir()
    (data / "link").symlink_to(tmp_path / "far")
    private_paths.restrict_to((f"{data}/", "s3://ours/data"))
    return data


def test_below_the_data_roots_everything_may_be_named(roots: Path) -> None:
    check_named({"a": [str(roots), f"{roots}/x/y", "s3://ours/data/x", "adamw", 1]}, "job")
    write_bytes(f"{roots}/x", b"1")
    assert read_bytes(f"file://{roots}/x") == b"1"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{}/../far/x",
            "{}/link/x",
            "{}x",
            "/dev/shm/x",
            "file://{}/../far",
            "S3://ours/data/../x",
            "s3://ours/datax",
        ),
        *("gs://ours/data", "simplecache::file:///tmp/x", "/"),
    ],
)
def test_nothing_else_may(roots: Path, text: str) -> None:
    with pytest.raises(DeniedError, match="data roots"):
        check_named({"x": text.format(roots)}, "job")


def test_what_is_opened_elsewhere_is_outside_too(roots: Path) -> None:
    with pytest.raises(DeniedError, match="data roots"):
        open_url(str(roots.parent / "far" / "x"))
    private_paths.restrict_to(())
    open_url(str(roots.parent / "far" / "x"))


def test_workers_inherit_the_roots(roots: Path) -> None:
    assert private_paths.inherited_restriction() == {
        "env_vars": {private_paths.ROOTS: f'["{roots}/", "s3://ours/data"]'}
    }
    private_paths.restrict_to(())
    assert private_paths.inherited_restriction() is None
