"""The supervisor with stand-in children: restarts, orderly ends, and adoption after it was killed itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytide.control.supervision.daemon import hold_lock, spawn
from raytide.control.supervision.supervisor import Child
from raytide.core.errors import ConflictError
from raytide.core.io.process import Process, kill_marked

WAIT_S = 20.0
MARK = "RAYTIDE_TEST"


@pytest.fixture
def run_dir(tmp_path: Path, standin_path: str) -> Iterator[Path]:
    for folder in ("pids", "logs"):
        (tmp_path / folder).mkdir()
    yield tmp_path
    kill_marked(MARK, str(tmp_path))


def start(run_dir: Path) -> Process:
    argv = [sys.executable, "-m", "raytide.control.supervision.supervisor", str(run_dir), "controller=standin_child"]
    return spawn("supervisor", argv, run_dir=run_dir, environment={**os.environ, MARK: str(run_dir)})


def when(condition: Callable[[], Process | None]) -> Process:
    """The process as soon as the condition gives one; the test's own timeout bounds the wait."""
    pause = threading.Event()
    while (process := condition()) is None:
        pause.wait(0.02)
    return process


def controller(run_dir: Path, *, other_than: Process | None = None) -> Process | None:
    process = Process.read(run_dir / "pids" / "controller.json")
    return process if process is not None and process != other_than else None


def test_a_killed_child_is_started_again(run_dir: Path) -> None:
    start(run_dir)
    first = when(lambda: controller(run_dir))
    first.send(signal.SIGKILL)
    second = when(lambda: controller(run_dir, other_than=first))
    assert second.alive
    assert not first.alive


def test_a_stopped_supervisor_ends_its_children(run_dir: Path) -> None:
    supervisor = start(run_dir)
    child = when(lambda: controller(run_dir))
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait(WAIT_S)
    assert not child.alive


def test_the_children_of_a_killed_supervisor_are_adopted_by_the_next(run_dir: Path) -> None:
    first = start(run_dir)
    child = when(lambda: controller(run_dir))
    first.send(signal.SIGKILL)
    assert first.wait(WAIT_S)
    assert child.alive
    second = start(run_dir)
    child.send(signal.SIGKILL)
    successor = when(lambda: controller(run_dir, other_than=child))
    second.send(signal.SIGTERM)
    assert second.wait(WAIT_S)
    assert not successor.alive


def test_a_second_supervisor_of_the_same_cluster_ends_at_once(run_dir: Path) -> None:
    start(run_dir)
    when(lambda: controller(run_dir))
    second = start(run_dir)
    assert second.wait(WAIT_S)
    assert "another process holds" in (run_dir / "logs" / "supervisor.log").read_text()


def test_quick_deaths_back_off_and_a_healthy_life_forgives_them() -> None:
    child = Child("api", ["api"])
    waits = []
    for _ in range(8):
        child.started_s = 100.0
        child.on_end(101.0)
        waits.append(round(child.restart_at_s - 101.0, 3))
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    child.started_s = 100.0
    child.on_end(130.0)
    assert round(child.restart_at_s - 130.0, 3) == 0.2


def test_a_lock_has_one_holder_and_is_free_after_it(tmp_path: Path) -> None:
    path = tmp_path / "controller.lock"
    with hold_lock(path), pytest.raises(ConflictError, match="another process holds"), hold_lock(path):
        pass
    with hold_lock(path):
        pass
