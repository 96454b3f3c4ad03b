"""What a script's processes print, and that their end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raytide.actors.gang import processes
from raytide.actors.gang.processes import Exit, Launch, MemberProcesses, _lines


@pytest.fixture
def member() -> Iterator[MemberProcesses]:
    member = MemberProcesses()
    yield member
    member.stop(0.0)


def ran(member: MemberProcesses, code: str) -> tuple[list[str], Exit]:
    """What it printed, and its end."""
    member.start(None, [Launch(0, ("python", "-c", code), {})])
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
    assert max(map(len, lines)) <= processes.LINE_CHARS
    assert len(end.tail) == processes.TAIL_CHARS


def test_a_process_that_got_away_with_the_pipe_does_not_hold_up_the_end() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid); print('half', end='')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0) as process:
        pid, last = _lines(process, os.pidfd_open(process.pid))
    os.kill(int(pid), signal.SIGKILL)
    assert last == "half"
