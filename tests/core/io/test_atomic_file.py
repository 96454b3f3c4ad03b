"""Files that are whole or absent: nothing else stays, whether the disk is full, or the writer interrupted or killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.disk_fixture import Disk

from raytide.core.io.atomic_file import check_room, create_json, read_json, sweep, write_json


def test_a_full_disk_leaves_the_old_text_and_nothing_beside_it(disk: Disk) -> None:
    path = disk.path / "state.json"
    write_json(path, {"n": 1})
    disk.fill()
    for n in range(20):
        with pytest.raises(OSError, match="No space left"):
            write_json(path, {"n": n, "padding": "x" * 8192})
        with pytest.raises(OSError, match="No space left"):
            create_json(disk.path / "new.json", {"padding": "x" * 8192})
        with pytest.raises(OSError, match="No space left"):
            check_room(disk.path)
    assert read_json(path) == {"n": 1}
    assert sorted(os.listdir(disk.path)) == ["filler", "state.json"]
    disk.free()
    write_json(path, {"n": 2})
    check_room(disk.path)
    assert (read_json(path), os.listdir(disk.path)) == ({"n": 2}, ["state.json"])


@pytest.mark.parametrize("at", ["fsync", "replace", "write"])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if at == "write":
        with pytest.raises(TypeError):
            write_json(tmp_path / "x.json", {"x": object()})
    else:
        monkeypatch.setattr(os, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_json(tmp_path / "x.json", {"x": 1})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    kill = "import os, signal, sys, pathlib; from raytide.core.io import atomic_file as d;"
    kill += "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
    kill += "d.write_json(pathlib.Path(sys.argv[1]) / 'x.json', {'x': 1})"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", kill, str(tmp_path)], check=False)
        assert done.returncode == -9
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    assert sweep([tmp_path]) == 0, "young: it may be another container's writer"
    for path in left:
        os.utime(path, (1.0, 1.0))
    mine = tmp_path / f".y.json.{os.getpid()}.0011aabb.part"
    for other in (mine, tmp_path / ".hidden", tmp_path / "z.json"):
        other.write_text(json.dumps({}))
        os.utime(other, (1.0, 1.0))
    assert sweep([tmp_path, tmp_path / "none"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, ".hidden", "z.json"])
