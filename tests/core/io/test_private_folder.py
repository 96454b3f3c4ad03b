"""Folders of this user: those of ended processes go, those of running ones stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytide.core.io.private_folder import private_folder, temporary_folder

LEFT = "from raytide.core.io.private_folder import temporary_folder; print(temporary_folder('exports'))"


def test_the_folders_of_ended_processes_are_removed_when_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=True)
    left = Path(done.stdout.strip())
    (left / "model.safetensors").write_bytes(b"torn")
    first, second = temporary_folder("exports"), temporary_folder("exports")
    assert left.parent == private_folder("exports")
    assert set(left.parent.iterdir()) == {first, second}


def test_a_process_that_makes_and_removes_many_folders_keeps_no_handles_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary_folder("exports").rmdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        temporary_folder("exports").rmdir()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
