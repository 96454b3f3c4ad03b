"""A working directory that travels with a job."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from raytide.core.errors import DataError
from raytide.core.io import working_dir
from raytide.core.io.working_dir import unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "lib" / "part.py").write_text("x = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_is_packed_is_unpacked_and_can_be_run(folder: Path, tmp_path: Path) -> None:
    working_dir.unpack(working_dir.pack(folder), tmp_path / "there")
    assert below(tmp_path / "there") == ["lib/part.py", "run.sh", "train.py"]
    assert (tmp_path / "there" / "train.py").read_text() == "print('hello')\n"
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "there" / "train.py", os.X_OK)


def test_the_same_files_are_the_same_package_at_any_time(folder: Path) -> None:
    before = working_dir.digest_of(working_dir.pack(folder))
    os.utime(folder / "train.py", (1, 1))
    assert working_dir.digest_of(working_dir.pack(folder)) == before
    (folder / "train.py").write_text("print('other')\n")
    assert working_dir.digest_of(working_dir.pack(folder)) != before


def test_histories_caches_and_what_the_user_names_stay_behind(folder: Path, tmp_path: Path) -> None:
    for name in (".git/HEAD", "lib/__pycache__/part.cpython.pyc", "data/big.bin", "lib/notes.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    working_dir.unpack(working_dir.pack(folder, ("data", "lib/*.log")), tmp_path / "there")
    assert below(tmp_path / "there") == ["lib/part.py", "run.sh", "train.py"]


def test_links_are_followed_and_a_circle_ends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "common.py").write_text("y = 2\n")
    (folder / "shared").symlink_to(tmp_path / "shared")
    (folder / "lib" / "circle").symlink_to(folder)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    working_dir.unpack(working_dir.pack(folder), tmp_path / "there")
    assert below(tmp_path / "there") == ["lib/part.py", "run.sh", "shared/common.py", "train.py"]


def test_a_directory_is_there_beside_a_link_to_it(folder: Path, tmp_path: Path) -> None:
    (folder / "current").symlink_to("lib")
    working_dir.unpack(working_dir.pack(folder), tmp_path / "there")
    assert below(tmp_path / "there") == ["current/part.py", "lib/part.py", "run.sh", "train.py"]


def test_an_empty_directory_travels(folder: Path, tmp_path: Path) -> None:
    (folder / "out" / "logs").mkdir(parents=True)
    working_dir.unpack(working_dir.pack(folder), tmp_path / "there")
    assert (tmp_path / "there" / "out" / "logs").is_dir()


@pytest.mark.parametrize("pattern", ["lib", "lib/", "./lib", "./lib/", "*/part.py"])
def test_what_to_leave_out_may_be_written_as_a_shell_completes_it(folder: Path, tmp_path: Path, pattern: str) -> None:
    working_dir.unpack(working_dir.pack(folder, (pattern,)), tmp_path / "there")
    assert "lib/part.py" not in below(tmp_path / "there")


def test_what_cannot_be_read_is_named_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refuse)
        with pytest.raises(DataError, match="work cannot be read: Permission denied"):
            working_dir.pack(folder)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"lib/part\.py cannot be read: Permission denied") as caught:
        working_dir.pack(folder)
    assert "--exclude 'lib/part.py'" in caught.value.hint


def test_a_name_that_is_no_text_is_named_by_a_pattern_that_leaves_it_out(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("x")
    with pytest.raises(DataError, match=r"caf\?\.txt cannot be read: its name is not valid UTF-8"):
        working_dir.pack(folder)
    working_dir.pack(folder, ("caf?.txt",))


def test_a_large_file_is_named_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_dir, "MOST_FILE_BYTES", 1000)
    (folder / "lib" / "model.bin").write_bytes(os.urandom(1001))
    with pytest.raises(DataError, match=r"lib/model\.bin") as caught:
        working_dir.pack(folder)
    assert "--exclude 'lib/model.bin'" in caught.value.hint
    working_dir.pack(folder, ("*.bin",))


def test_too_much_in_all_and_no_directory_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="not a directory"):
        working_dir.pack(folder / "train.py")
    monkeypatch.setattr(working_dir, "MOST_BYTES", 1000)
    (folder / "noise").write_bytes(os.urandom(2000))
    with pytest.raises(DataError, match="too large"):
        working_dir.pack(folder)


@pytest.mark.parametrize(("limit", "most"), [("MOST_ENTRIES", 2), ("MOST_UNPACKED_BYTES", 2_999)])
def test_a_folder_that_no_member_would_unpack_is_refused_before_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"0" * 1000)
    working_dir.pack(tmp_path)
    monkeypatch.setattr(working_dir, limit, most)
    with pytest.raises(DataError, match="limits:"):
        working_dir.pack(tmp_path)


def zipped(*entries: tuple[str, bytes], mode: int = 0o600) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, body)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("limit", "most"), [("MOST_ENTRIES", 2), ("MOST_UNPACKED_BYTES", 2_999), ("MOST_FILE_BYTES", 999)]
)
def test_a_package_that_would_fill_the_node_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(working_dir, limit, most)
    with pytest.raises(DataError, match="limits:"):
        working_dir.unpack(zipped(*((name, b"0" * 1000) for name in "abc")), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("broken", [b"", b"no zip", zipped(("a", b"x" * 9_000))[:-9], zipped(("a", b"x"))[4:]])
def test_a_broken_package_is_named(tmp_path: Path, broken: bytes) -> None:
    with pytest.raises(DataError, match="the package is broken"):
        working_dir.unpack(broken, tmp_path / "there")


def test_an_upload_makes_no_links_no_setuid_files_and_nothing_outside(tmp_path: Path) -> None:
    """It may be unpacked by root."""
    there = tmp_path / "below" / "there"
    working_dir.unpack(zipped(("../../out", b"x"), ("/abs", b"x"), mode=0o4755), there)
    working_dir.unpack(zipped(("link", b"/etc/passwd"), mode=0o120777), there)
    assert not (tmp_path / "out").exists()
    found = [path for path in there.rglob("*") if not path.is_dir()]
    assert {path.name for path in found} == {"out", "abs", "link"}
    assert not any(path.is_symlink() or path.stat().st_mode & 0o6000 for path in found)


@pytest.mark.parametrize(
    "names",
    [("..",), ("a", "a/b"), ("a/b", "a"), ("n" * 300,), ("",)],
    ids=["parent", "file", "folder", "long", "none"],
)
def test_names_that_cannot_be_written_are_a_named_error(names: tuple[str, ...], tmp_path: Path) -> None:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="broken"):
        unpack(body.getvalue(), tmp_path / "folder")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_methods_that_packages_do_not_have_are_not_unpacked(method: int, tmp_path: Path) -> None:
    """LZMA reserves as much memory as the file says."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", method) as archive:
        archive.writestr("x", b"x" * 1000)
    with pytest.raises(DataError, match="unsupported compression"):
        unpack(body.getvalue(), tmp_path / "folder")
    assert not list(tmp_path.glob("*/*"))
