"""Processes are known by pid and start time; marks find what no record names; files are whole or absent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytide.core.io import process
from raytide.core.io.atomic_file import create_json, read_json, write_json
from raytide.core.io.process import Process, free_port, kill_marked, marked, terminate_all


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"], env={**os.environ, "RAYTIDE_TEST": "sleeper"})
    yield child
    child.kill()
    child.wait()


def identity(child: subprocess.Popen[bytes]) -> Process:
    process = Process.of(child.pid, "sleeper")
    assert process is not None
    return process


def test_a_record_brings_the_same_process_back(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    identity(sleeper).write(tmp_path / "p.json")
    read = Process.read(tmp_path / "p.json")
    assert read == identity(sleeper)
    assert read.alive
    assert Process.read(tmp_path / "none.json") is None


def test_a_process_with_a_reused_pid_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    impostor = Process(sleeper.pid, identity(sleeper).start_time - 1)
    assert not impostor.alive
    impostor.send(signal.SIGKILL)
    terminate_all([impostor], grace_s=0.0)
    assert sleeper.poll() is None


def test_a_zombie_counts_as_ended(sleeper: subprocess.Popen[bytes]) -> None:
    process = identity(sleeper)
    process.send(signal.SIGKILL)
    assert process.wait(20.0)
    assert not process.alive
    assert Process.of(sleeper.pid) is None


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    terminate_all([identity(child)], grace_s=0.1)
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL


def test_marks_are_inherited_by_children_that_left_their_session(tmp_path: Path) -> None:
    value = str(tmp_path)
    command = ["sh", "-c", "setsid sleep 1000 & echo ready; exec sleep 1000"]
    child = subprocess.Popen(command, env={**os.environ, "RAYTIDE_TEST": value}, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert kill_marked("RAYTIDE_TEST", value) >= 2
    assert marked("RAYTIDE_TEST", value) == []
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL


def test_a_mark_must_match_whole(sleeper: subprocess.Popen[bytes]) -> None:
    assert [process.pid for process in marked("RAYTIDE_TEST", "sleeper")] == [sleeper.pid]
    assert marked("RAYTIDE_TEST", "sleep") == []
    assert marked("AYTIDE_TEST", "sleeper") == []


@pytest.mark.parametrize(("file", "content"), [("environ", b"A=1\0MARK=x\0"), ("cmdline", b"python\0-m\0x\0")])
def test_a_process_is_found_in_the_middle_of_an_exec(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: bytes
) -> None:
    """The kernel shows neither its environment nor its arguments for a moment."""
    entry = tmp_path / str(sleeper.pid)
    entry.mkdir()
    (entry / "stat").write_bytes(Path(f"/proc/{sleeper.pid}/stat").read_bytes())
    (entry / "exe").symlink_to("/bin/sh")
    (entry / file).touch()
    monkeypatch.setattr(process, "_PROC", tmp_path)
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=lambda _: (entry / file).write_bytes(content)))
    found = marked("MARK", "x") if file == "environ" else process.running(["-m", "x"])
    assert [each.pid for each in found] == [sleeper.pid]


def test_the_first_of_several_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "ended.json"
    assert create_json(path, {"at": 1})
    assert not create_json(path, {"at": 2})
    assert read_json(path) == {"at": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["ended.json"]


def test_a_write_replaces_the_whole_file_and_keeps_it_private(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_json(path, {"a": "x" * 1000})
    write_json(path, {"b": 1})
    assert read_json(path) == {"b": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_json(tmp_path / "none.json") is None


def test_a_free_port_is_none_that_an_outgoing_connection_gets_nor_one_that_is_open() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chosen = {free_port() for _ in range(200)}
    assert not [port for port in chosen if first <= port <= last]
    assert len(chosen) > 150, "callers rarely meet"
    with socket.socket() as probe:
        probe.bind(("", min(chosen)))


def test_an_open_port_is_passed_by_on_whatever_address_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", free_port())) as open_:
        taken, free = open_.getsockname()[1], free_port()
        drawn = iter((taken, taken, free))
        monkeypatch.setattr(process, "random", SimpleNamespace(choice=lambda ports: next(drawn)))
        assert free_port() == free


def test_without_room_outside_of_the_ephemeral_range_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65000\n")
    monkeypatch.setattr(process, "_EPHEMERAL_PORTS", tmp_path / "range")
    assert free_port() > 0
    (tmp_path / "range").write_text("1024\t60000\n")
    assert free_port() > 60000
