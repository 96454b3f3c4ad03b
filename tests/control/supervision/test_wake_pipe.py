"""An idle controller rests until something happens."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from raytide.control.supervision.wake_pipe import WakePipe, wake_controller

LONG_S = 60.0


def rested(pipe: WakePipe, seconds: float) -> float:
    began_s = time.monotonic()
    pipe.rest(seconds)
    return time.monotonic() - began_s


def test_a_rest_ends_when_something_is_written_before_or_meanwhile(tmp_path: Path) -> None:
    pipe = WakePipe(tmp_path)
    wake_controller(tmp_path)
    assert rested(pipe, LONG_S) < LONG_S / 2
    later = threading.Timer(0.1, wake_controller, [tmp_path])
    later.start()
    assert rested(pipe, LONG_S) < LONG_S / 2
    pipe.write()
    assert rested(pipe, LONG_S) < LONG_S / 2
    later.join()
    pipe.close()


def test_many_writes_end_one_rest(tmp_path: Path) -> None:
    pipe = WakePipe(tmp_path)
    for _ in range(100_000):  # more than the pipe holds
        wake_controller(tmp_path)
    pipe.rest(LONG_S)
    assert rested(pipe, 0.2) >= 0.2
    pipe.close()


def test_nobody_listens_and_nothing_waits(tmp_path: Path) -> None:
    wake_controller(tmp_path)
    (tmp_path / "controller.wake").mkdir()
    pipe = WakePipe(tmp_path)
    assert rested(pipe, LONG_S) < LONG_S / 2
    pipe.write()
    pipe.close()


def test_a_killed_controllers_pipe_serves_the_next_one(tmp_path: Path) -> None:
    first = WakePipe(tmp_path)
    first.close()
    wake_controller(tmp_path)
    second = WakePipe(tmp_path)
    wake_controller(tmp_path)
    assert rested(second, LONG_S) < LONG_S / 2
    second.close()
