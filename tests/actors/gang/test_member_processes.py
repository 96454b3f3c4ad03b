"""The output and the end of a script's processes are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytide.actors.gang import member_processes
from raytide.actors.gang.member_processes import NO_RIGHTS, MemberProcesses, ProcessExit, ProcessLaunch, Rights, _lines
from raytide.core.errors import ConfigError


@pytest.fixture
def member() -> Iterator[MemberProcesses]:
    member = MemberProcesses()
    yield member
    member.stop(0.0)


def ran(member: MemberProcesses, code: str, rights: Rights = NO_RIGHTS, **more: str) -> tuple[list[str], ProcessExit]:
    """Returns the lines that it printed, and its end."""
    return ended(member, ProcessLaunch(0, ("python", "-c", code), more, rights))


def ended(member: MemberProcesses, launch: ProcessLaunch) -> tuple[list[str], ProcessExit]:
    member.start(None, [launch])
    lines: list[str] = []
    while True:
        report = member.report(60.0)
        lines += [line for _, line in report.lines]
        if report.exits:
            return lines, report.exits[0]


def test_lines_are_those_of_a_terminal(member: MemberProcesses) -> None:
    code = "import sys; sys.stdout.buffer.write(b'one\\r\\n\\n10%\\r20%\\n\\xff last'); sys.exit(3)"
    lines, end = ran(member, code)
    assert lines == ["one", "", "10%", "20%", "\ufffd last"]
    assert (end.code, end.tail) == (3, "\n".join(lines))


def test_what_is_printed_is_kept_whole_but_a_line_and_the_tail_are_bounded(member: MemberProcesses) -> None:
    lines, end = ran(member, "print('x' * 3_000_000)")
    assert "".join(lines) == "x" * 3_000_000
    assert max(map(len, lines)) <= member_processes.LINE_CHARS
    assert len(end.tail) == member_processes.TAIL_CHARS


def test_a_process_that_got_away_with_the_pipe_does_not_hold_up_the_end() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid); print('half', end='')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0) as process:
        pid, last = _lines(process, os.pidfd_open(process.pid))
    os.kill(int(pid), signal.SIGKILL)
    assert last == "half"


ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a command as another user")


def test_a_command_has_what_is_passed_named_and_its_own(
    member: MemberProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "RAYTIDE_HOME", "OURS", "NOT_OURS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("RAYTIDE_CLUSTER", "c-1")
    (line,), _ = ran(member, ENVIRONMENT, Rights("", ("OURS",), {"RAYTIDE_TOKEN": "t"}), MINE="y", RAYTIDE_CLUSTER="no")
    found = json.loads(line)
    assert (found["OURS"], found["RAYTIDE_TOKEN"], found["MINE"], found["RAYTIDE_CLUSTER"]) == ("x", "t", "y", "c-1")
    assert not {"AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "RAYTIDE_HOME", "NOT_OURS"} & found.keys()


def test_a_jobs_environment_does_not_act_on_the_shim(member: MemberProcesses, tmp_path: Path) -> None:
    """It may be root, and the command not."""
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'acted')!r}, 'w'); raise SystemExit(9)")
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'acted')!r}, 'a').write('x')")
    launch = ProcessLaunch(
        0, ("true",), {"PYTHONPATH": str(tmp_path), "LD_PRELOAD": "/nowhere.so", "PATH": os.environ["PATH"]}
    )
    _, end = ended(member, launch)
    assert end.code == 0
    assert not (tmp_path / "acted").exists()


@needs_root
def test_a_command_that_runs_as_another_user_owns_its_folder_and_nothing_else(member: MemberProcesses) -> None:
    look = (
        "id -u; id -G; touch mine && stat -c %U . mine; cat /proc/$PPID/environ; cat /proc/self/fd/0; "
        "grep NoNewPrivs /proc/self/status; echo $HOME $USER"
    )
    lines, end = ended(member, ProcessLaunch(0, ("sh", "-c", look), {}, Rights("nobody")))
    assert (lines[:4], end.code) == (["65534", "65534", "nobody", "nobody"], 0)
    assert "Permission denied" in lines[4]
    assert lines[5].split() == ["NoNewPrivs:", "1"]
    assert lines[6] == f"{member._folder} nobody"


@needs_root
@pytest.mark.parametrize(("user", "why"), [("no-such-user", "no such user"), ("root", "is root, which")])
def test_an_unknown_user_and_root_are_refused(member: MemberProcesses, user: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ended(member, ProcessLaunch(0, ("true",), {}, Rights(user)))


def test_another_user_needs_root(member: MemberProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="run as root on this node"):
        ended(member, ProcessLaunch(0, ("true",), {}, Rights("nobody")))


@needs_root
def test_processes_of_another_user_end_with_their_owner(member: MemberProcesses) -> None:
    others = set(psutil.Process().children(recursive=True))  # a cluster of other tests in this process
    member.start(
        None, [ProcessLaunch(0, ("sh", "-c", "trap '' TERM; echo here; sleep 600 & wait; wait"), {}, Rights("nobody"))]
    )
    while not member.report(60.0).lines:
        pass
    below = [each for each in psutil.Process().children(recursive=True) if each not in others]
    member.stop(0.1)
    assert psutil.wait_procs(below, timeout=120)[1] == []
    assert not member._folder.exists()


def test_the_folder_of_a_killed_machine_is_removed_by_the_next_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, orphaned, used = MemberProcesses(), MemberProcesses(), MemberProcesses()
    (left._folder / "of the script").mkdir()
    orphaned.start(None, [ProcessLaunch(0, ("sleep", "600"), {})])
    for gone in (left, orphaned):
        os.close(gone._held)  # as its actor was killed; the shim of the second one lives
    new = MemberProcesses()
    deadline = time.monotonic() + 60
    while left._folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {orphaned._folder, used._folder, new._folder}
    orphaned.stop(0.0)


def test_a_script_in_a_container_has_the_variables_of_the_image(
    member: MemberProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_MODELS", "/opt/models")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the cluster")
    code = "import os; print(*(os.environ.get(name) for name in ('OUR_MODELS', 'RAYTIDE_IMAGE', 'RAY_AUTH_TOKEN')))"
    assert ran(member, code)[0] == ["None None None"], "on a node, they are the operator's"
    monkeypatch.setenv("RAYTIDE_IMAGE", "registry.example.com/train:1")
    assert ran(member, code)[0] == ["/opt/models registry.example.com/train:1 None"]


def test_a_folder_is_removed_however_deep_it_is() -> None:
    member = MemberProcesses()
    nest = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    assert ran(member, nest)[1].code == 0
    member.stop(1.0)
    assert not member._folder.exists()
