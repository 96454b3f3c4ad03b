"""Building, keeping and doing without the C operators."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytide.kernels import cpu, library, ref
from raytide.kernels.registry import ops_for

needs_compiler = pytest.mark.skipif(library.compiler() is None, reason="no C compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a process that has loaded nothing yet."""
    monkeypatch.setenv("RAYTIDE_KERNEL_CACHE", str(tmp_path / "kernels"))
    library.library.cache_clear()
    yield tmp_path / "kernels"
    library.library.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that are built in no time."""
    sources = tmp_path / "c"
    sources.mkdir()
    (sources / "small.c").write_text('__attribute__((visibility("default"))) int answer(void) { return 42; }')
    monkeypatch.setattr(library, "_SOURCES", sources)
    return sources


def test_without_a_compiler_torch_serves_and_the_log_says_so_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING, logger="raytide.kernels.library"):
        ops = ops_for("cpu")
    assert ops.attention is cpu.attention
    assert [record.message for record in caplog.records] == [
        "no C operators, torch's are used instead: none of cc, gcc, clang is installed"
    ]


def test_a_compiler_that_fails_is_done_without(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ops_for("cpu").linear is cpu.linear
    assert "out of luck" in caplog.text
    assert not list(fresh.iterdir())


def test_a_user_without_a_home_folder_is_served_by_torch(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAYTIDE_KERNEL_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)  # of no user that the machine knows
    assert ops_for("cpu").attention is cpu.attention
    assert "no C operators" in caplog.text


@needs_compiler
def test_what_was_built_is_found_again_and_a_damaged_file_is_built_anew(
    fresh: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: builds.append(args) or run(*args, **options))
    path = library.build(fresh)
    whole = path.read_bytes()
    assert library.build(fresh) == path
    assert len(builds) == 1
    for damaged in (b"", whole[: len(whole) // 2], whole[:5000] + b"?" + whole[5001:]):
        path.write_bytes(damaged)
        assert library.build(fresh) == path
        assert path.stat().st_size == len(whole)
    assert len(builds) == 4
    path.chmod(0o777)  # somebody else may have written it
    library.build(fresh)
    assert len(builds) == 5
    assert [entry.name for entry in fresh.iterdir()] == [path.name]
    assert ctypes.CDLL(str(path)).answer() == 42


@needs_compiler
def test_other_sources_are_another_file(fresh: Path, small: Path) -> None:
    before = library.build(fresh)
    (small / "small.c").write_text("int answer(void) { return 43; }")
    assert library.build(fresh) != before


@needs_compiler
def test_two_processes_that_build_at_once_both_get_a_whole_library(fresh: Path, small: Path) -> None:
    script = (
        "import ctypes, pathlib, sys; from raytide.kernels import library;"
        "library._SOURCES, folder = map(pathlib.Path, sys.argv[1:]);"
        "sys.exit(ctypes.CDLL(str(library.build(folder))).answer())"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, small, fresh]) for _ in range(2)]
    assert [process.wait(timeout=200) for process in both] == [42, 42]
    assert len(list(fresh.iterdir())) == 1


@needs_compiler
def test_the_environment_forces_the_reference_for_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTIDE_OP_LINEAR", "ref")
    assert ops_for("cpu").linear is ref.linear
    assert ops_for("cpu").attention is not ref.attention
