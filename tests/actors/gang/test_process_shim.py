"""Nothing of a script outlives its owner, and its end is told as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raytide.actors.gang import process_shim
from raytide.actors.gang.member_processes import launch_order

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
while True:
    time.sleep(600)
"""


def guarded(folder: Path, *command: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    with launch_order(os.environ) as fd:
        return subprocess.Popen(
            [sys.executable, "-I", str(Path(process_shim.__file__).resolve()), str(folder), str(fd), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(fd,),
        )


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_it_ends_as_the_command_did(tmp_path: Path, code: str, expected: int) -> None:
    with guarded(tmp_path / "there", sys.executable, "-c", code) as process:
        assert process.wait(60) == expected
    assert (tmp_path / "there").exists(), "its owner still wants to look"


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with guarded(tmp_path / "there", "no-such-command") as process:
        assert process.communicate()[0] == "cannot start no-such-command: No such file or directory\n"
        assert process.returncode == process_shim.NOT_STARTED


def test_an_owner_that_is_gone_takes_everything_with_it(tmp_path: Path) -> None:
    with guarded(tmp_path / "there", sys.executable, "-c", STUBBORN) as process:
        assert process.stdin is not None and process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(15)
        assert process.stdout.readline() == "asked to end\n"
        process.stdin.close()
        assert process.wait(60) == 137
        gone, alive = psutil.wait_procs([child], timeout=120)
        assert (gone, alive) == ([child], [])
    assert not (tmp_path / "there").exists()


SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


def test_what_a_shell_started_has_the_time_to_save_although_the_shell_ends_at_once(tmp_path: Path) -> None:
    with guarded(tmp_path / "there", "sh", "-c", f'"{sys.executable}" -c "$0"; echo over', SAVES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(15)
        assert process.communicate(timeout=60)[0] == "saved\n"
        assert process.returncode == 143


STAYS = f'''"{sys.executable}" -c "import signal; signal.signal(15, lambda *_: print('asked', flush=True))
print('ready', flush=True)
while True: signal.pause()"; echo over'''


def test_what_a_shell_started_ends_with_its_owner_although_the_shell_has_ended(tmp_path: Path) -> None:
    with guarded(tmp_path / "there", "sh", "-c", STAYS) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(15)
        assert process.stdout.readline() == "asked\n"
        process.stdin.close()
        assert process.wait(60) == 143
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("how", ["blocked", "ignored"])
def test_a_command_can_be_interrupted_whatever_its_owner_does_with_that_signal(tmp_path: Path, how: str) -> None:
    """Ray blocks the signal, and a cluster that a shell started in the background ignores it."""
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGINT)
    try:
        if how == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        process = guarded(tmp_path / "there", sys.executable, "-c", "import os; os.kill(os.getpid(), 2)")
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with process:
        assert process.wait(60) == 130


DAEMON = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
if len(sys.argv) < 2:
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["the owner's child", "its guard"])
def test_a_shim_that_is_killed_takes_everything_with_it(tmp_path: Path, killed: str) -> None:
    """Ray kills the direct children of a worker that it kills."""
    with guarded(tmp_path / "there", sys.executable, "-c", DAEMON) as process:
        assert process.stdin is not None and process.stdout is not None
        daemon = psutil.Process(int(process.stdout.readline()))
        shim_and_below = psutil.Process(process.pid)
        below = [*shim_and_below.children(recursive=True), daemon]
        (shim_and_below if killed == "the owner's child" else below[0]).kill()
        assert psutil.wait_procs(below, timeout=120)[1] == []


def test_a_daemon_that_the_command_left_behind_ends_with_it(tmp_path: Path) -> None:
    with guarded(tmp_path / "there", sys.executable, "-c", DAEMON, "leave") as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())  # it may have ended by now
        assert process.wait(60) == 0
        assert not psutil.pid_exists(daemon)


def test_a_machine_without_memory_ends_the_command_before_raytide_and_ray(tmp_path: Path) -> None:
    """The kernel prefers a process with a high score, by up to the whole memory; a child has its parent's."""
    read = ["cat", "/proc/self/oom_score_adj"]
    with guarded(tmp_path / "there", sys.executable, "-c", f"import subprocess; subprocess.run({read})") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process_shim.OOM_SCORE}\n"
        assert process.wait(60) == 0
