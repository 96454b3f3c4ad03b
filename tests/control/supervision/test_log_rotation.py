"""Logs have a limit, and whoever reads one in parts reads each line once, also while it is cut."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.api.test_logs import job
from tests.disk_fixture import Disk

from raytide.control.api.services.logs import job_log as logs
from raytide.control.supervision import log_rotation
from raytide.control.supervision.log_rotation import HEADER_BYTES, cut, forget_oldest, rotate
from raytide.core.objects.job import JobState
from raytide.queue.lifecycle.jobs import DriverKey


@pytest.fixture
def appended(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def test_a_log_is_rotated_while_it_is_written_to(tmp_path: Path, appended: int) -> None:
    for number in range(7):
        os.write(appended, f"{number}".encode() * 100)
        rotate([tmp_path / "log", tmp_path / "none"], most=50)
    assert (tmp_path / "log").read_bytes() == b""
    kept = {path.name: path.read_bytes()[:1] for path in tmp_path.iterdir() if path.name != "log"}
    assert kept == {"log.1": b"6", "log.2": b"5", "log.3": b"4"}
    os.write(appended, b"next")
    rotate([tmp_path / "log"], most=50)
    assert (tmp_path / "log").read_bytes() == b"next"


def test_a_full_disk_gets_the_room_of_a_log_that_cannot_be_copied(disk: Disk) -> None:
    path = disk.path / "log"
    path.write_bytes(b"x" * (1 << 20))
    disk.fill()
    rotate([path], most=1)
    assert path.stat().st_size == 0
    assert os.listdir(disk.path).count("log.1") == 0
    path.write_bytes(b"there is room")


class OnDisk:
    """The log of a driver as Ray's agent serves it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
        data = self.path.read_bytes()
        return data[start : start + most], len(data)


def test_what_is_left_of_a_cut_log_says_how_much_is_missing(tmp_path: Path, appended: int) -> None:
    for number in range(1000):
        os.write(appended, b"%07d\n" % number)
    assert not cut(appended, most=8000, kept=800)
    assert cut(appended, most=7999, kept=800)
    read = (tmp_path / "log").read_bytes()
    assert log_rotation.dropped_before(read) == 8000 - 99 * 8
    assert read[HEADER_BYTES:].splitlines()[0] == b"0000901"
    os.write(appended, b"1000000\n")
    printed = OnDisk(tmp_path / "log")
    text = logs.part(printed, job(state=JobState.RUNNING), "").text
    assert text.startswith("[7208 bytes were dropped here")
    assert text.endswith("0000999\n1000000\n")
    assert logs.part(printed, job(state=JobState.RUNNING), "0:7992").text == "0000999\n1000000\n"
    assert logs.tail(printed, job(), 2) == "0:7992"


def test_a_write_that_began_before_the_cut_and_ends_long_after_it_is_kept(
    tmp_path: Path, appended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a thread that waits for a CPU."""
    os.write(appended, b"first\n" * 1000)
    old, slept_s = os.dup(appended), 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        if slept_s <= 0.3 < slept_s + seconds:
            os.write(old, b"late\n")
        slept_s += seconds

    monkeypatch.setattr(log_rotation, "time", SimpleNamespace(sleep=sleep))  # other threads sleep as ever
    assert cut(appended, most=4000, kept=800)
    os.close(old)
    assert (tmp_path / "log").read_bytes().endswith(b"first\nlate\n")


@given(st.data(), st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=25))
def test_a_reader_that_keeps_up_sees_every_line_once_and_another_a_gap(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, moves: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    running, printed = job(state=JobState.RUNNING), OnDisk(path)
    said, after, read, last = 0, "", [], -1
    for count, is_cut in moves:
        for _ in range(count):
            os.write(fd, b"%06d\n" % said)
            said += 1
        if is_cut:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(log_rotation, "_IN_FLIGHT_S", 0.0)  # nobody else writes
                cut(fd, most=400, kept=300)
        assert path.stat().st_size <= 400 + HEADER_BYTES + 7 * 40 * 25
        if data.draw(st.booleans()):
            found = logs.part(printed, running, after)
            after = found.after
            read += [int(line) for line in found.text.splitlines() if not line.startswith("[")]
    os.close(fd)
    assert read == sorted(set(read)), "no line twice, none out of order"
    for line in read:
        assert line > last
        last = line


def test_the_oldest_logs_of_drivers_that_ended_go_first(tmp_path: Path) -> None:
    paths = [tmp_path / f"job-driver-raytide-job-{number}-0.log" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * 100)
        os.utime(path, (number + 1, number + 1))
    other = tmp_path / "job-driver-somebody.log"
    other.write_bytes(b"x" * 1000)
    with paths[0].open("a") as runs:
        fcntl.flock(runs, fcntl.LOCK_SH)
        forget_oldest(tmp_path, most=200)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(each.name for each in (paths[0], paths[3], other))


def test_a_driver_that_prints_for_ever_fills_no_disk(tmp_path: Path) -> None:
    """A process that prints as fast as it can, its log as Ray opens it."""
    script = """
import sys, time
from raytide.control.supervision import log_rotation as log_files
log_files._EVERY_S = 0.01
log_files.cut.__kwdefaults__.update(most=1 << 20, kept=1 << 19)
log_files.bound_driver_log()
for number in range(300_000):
    print(f"{number:09d} " + "x" * 90)
    if number % 2000 == 0:
        time.sleep(0.01)
print("the last line", flush=True)
time.sleep(0.1)
"""
    path = tmp_path / "job-driver-raytide-job-1-0.log"
    with path.open("a") as log:
        log.write("Running entrypoint for job raytide-job-1-0: x\n")
        log.flush()
        run = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=subprocess.STDOUT)
    assert run.wait(120) == 0
    read = path.read_bytes()
    dropped = log_rotation.dropped_before(read)
    assert dropped is not None
    printed = len("Running entrypoint for job raytide-job-1-0: x\n") + 300_000 * 101 + len("the last line\n")
    assert dropped + len(read) - HEADER_BYTES == printed, "not a byte is unaccounted for"
    assert len(read) < printed / 2
    assert b"the last line\n" in read
    assert not list(tmp_path.glob(".*"))


def test_the_log_of_a_driver_that_ends_before_the_next_look_is_cut_at_its_end(tmp_path: Path) -> None:
    script = """
from raytide.control.supervision import log_rotation as log_files
log_files._EVERY_S = 3600
log_files.cut.__kwdefaults__.update(most=1 << 20, kept=1 << 19)
log_files.bound_driver_log()
for number in range(30_000):
    print(f"{number:09d} " + "x" * 90)
print("the last line")
"""
    path = tmp_path / "job-driver-raytide-job-1-0.log"
    with path.open("a") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, stderr=subprocess.STDOUT, timeout=120, check=True)
    read = path.read_bytes()
    assert len(read) <= (1 << 19) + HEADER_BYTES
    assert read.endswith(b"the last line\n")
