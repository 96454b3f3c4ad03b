"""The block files on disk: only whole ones of this user are used, the oldest go first, and one engine has a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raytide.actors.engine.kv_cache.block_folder import BlockFolder
from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.core.errors import ConfigError

SIZE = 96
FILE = SIZE + 48


def key(index: int) -> bytes:
    return bytes([index]) * 16


def content(index: int) -> Bytes:
    return np.full(SIZE, index, np.uint8)


def folder(root: Path, files: int = 4, identity: str = "kv-a") -> BlockFolder:
    return BlockFolder(root, identity, SIZE, files * FILE)


def fill(found: BlockFolder, *indices: int) -> None:
    for index in indices:
        found.write(key(index), [content(index)[:32], content(index)[32:]])


def read(found: BlockFolder) -> list[int]:
    return [index for index in range(20) if (block := found.read(key(index))) is not None and set(block) == {index}]


def test_a_block_comes_back_also_in_a_later_engine_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    first = folder(tmp_path / "new")
    fill(first, 1, 2)
    assert read(first) == [1, 2]
    files = list(first.path.iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {each.stat().st_mode & 0o777 for each in (first.path, tmp_path / "new")} == {0o700}
    first.release()
    later = folder(tmp_path / "new")
    assert (later.path, later.num_bytes, read(later)) == (first.path, 2 * FILE, [1, 2])


@pytest.mark.parametrize("damage", ["torn", "altered", "longer", "another block", "altered key"])
def test_a_damaged_file_is_never_used(damage: str, tmp_path: Path) -> None:
    found = folder(tmp_path)
    fill(found, 1, 2)
    path = found.path / key(1).hex()
    body = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(body[:-1])
    elif damage == "altered":
        body[60] ^= 1
        path.write_bytes(body)
    elif damage == "longer":
        path.write_bytes(body + b"\0")
    elif damage == "another block":
        path.write_bytes((found.path / key(2).hex()).read_bytes())
    else:
        path.write_bytes(body[:16] + key(2) + body[32:])
        path.rename(found.path / key(2).hex())
    assert found.read(key(2 if damage == "altered key" else 1)) is None
    assert found.damaged == 1
    assert len(list(found.path.iterdir())) == (damage != "altered key")


def test_what_a_crash_left_is_removed_and_a_torn_file_is_not_indexed(tmp_path: Path) -> None:
    found = folder(tmp_path)
    fill(found, 1, 2)
    (found.path / "unfinished-x").write_bytes(b"half")
    os.chmod(found.path / "unfinished-x", 0o600)
    os.truncate(found.path / key(2).hex(), 100)
    found.release()
    later = folder(tmp_path)
    assert (read(later), len(list(later.path.iterdir()))) == ([1], 1)


def test_the_bound_holds_and_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    found = folder(tmp_path)
    fill(found, 1, 2, 3, 4)
    found.touch(key(1))
    fill(found, 5)
    assert (read(found), found.evictions, found.num_bytes) == ([1, 3, 4, 5], 1, 4 * FILE)
    assert sum(file.stat().st_size for file in found.path.iterdir()) == 4 * FILE
    for used_s, index in enumerate((5, 1, 4, 3)):
        os.utime(found.path / key(index).hex(), (used_s, used_s))
    found.release()
    smaller = folder(tmp_path, files=2)
    assert read(smaller) == [3, 4]


def test_files_of_another_user_or_mode_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = folder(tmp_path)
    fill(found, 1, 2, 3)
    os.chmod(found.path / key(1).hex(), 0o640)
    (found.path / key(2).hex()).rename(tmp_path / "elsewhere")
    (found.path / key(2).hex()).symlink_to(tmp_path / "elsewhere")
    assert found.read(key(1)) is None and found.read(key(2)) is None
    fill(found, 4)
    os.chmod(found.path / key(4).hex(), 0o604)
    found.release()
    assert read(folder(tmp_path)) == [3]
    assert "1 files in" in caplog.text


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = folder(tmp_path)
    own.release()
    os.chmod(own.path, 0o770)
    with pytest.raises(ConfigError, match="is not to be trusted"):
        folder(tmp_path)
    os.chmod(own.path, 0o700)
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        folder(tmp_path)
    os.chmod(tmp_path, 0o1777)
    folder(tmp_path).release()
    own.path.rename(tmp_path / "moved")
    own.path.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is not to be trusted"):
        folder(tmp_path)
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError):
        folder(tmp_path, identity="kv-b")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="a KV block takes 144"):
        BlockFolder(tmp_path, "kv-a", SIZE, FILE - 1)


def test_two_engines_have_a_folder_each_and_an_ended_ones_makes_room(tmp_path: Path) -> None:
    first, second = folder(tmp_path), folder(tmp_path)
    other = folder(tmp_path, identity="kv-b")
    fill(first, 1, 2)
    fill(second, 3)
    fill(other, 4, 5, 6)
    assert len({each.path for each in (first, second, other)}) == 3
    assert (read(first), read(second)) == ([1, 2], [3])
    first.release()
    other.release()
    for used_s, each in enumerate((first, other)):
        for file in each.path.iterdir():
            os.utime(file, (used_s, used_s))
    third = folder(tmp_path, files=6, identity="kv-c")
    fill(third, 7)
    assert first.path.exists() and other.path.exists()
    fill(third, 8)
    assert not first.path.exists(), "2 + 3 + 2 files are more than 6"
    fill(third, 9, 10)
    assert not other.path.exists() and second.path.exists(), "a living engine's stays"
    assert (read(third), third.evictions) == ([7, 8, 9, 10], 0)


def test_reading_is_measured_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    found = folder(tmp_path)
    assert found.seconds_per_byte() > 0
    assert list(found.path.iterdir()) == []
