"""Tables and decisions on a terminal of any width."""

from __future__ import annotations

import pytest

from raytide.autoscaler.explain import AFTER_KIND
from raytide.cli.show import as_lines, as_table, fitted

COLUMNS = ("JOB", "DUE", "STATE", "WHY")
WORDS = "no node type has room for a member with 9 GPU"
ROWS = [["job-1", "-", "running", ""], ["job-2", "-", "queued", WORDS]]


def test_a_table_with_room_keeps_every_column() -> None:
    assert fitted(COLUMNS, ROWS, 80) == [
        "JOB    DUE  STATE    WHY",
        "job-1  -    running",
        f"job-2  -    queued   {WORDS}",
    ]


def test_a_table_that_is_too_wide_loses_what_says_nothing_and_then_breaks_its_last_column() -> None:
    assert fitted(COLUMNS, ROWS, 62)[2] == f"job-2  queued   {WORDS}"
    assert fitted(COLUMNS, ROWS, 50)[2:] == [
        "job-2  queued   no node type has room for a member",
        "                with 9 GPU",
    ]


def test_in_a_narrow_terminal_the_reason_stands_below_its_row() -> None:
    assert fitted(COLUMNS, ROWS, 40) == [
        "JOB    STATE",
        "job-1  running",
        "job-2  queued",
        "      no node type has room for a member",
        "      with 9 GPU",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert fitted(COLUMNS, [], 10) == ["JOB  WHY"]


def test_a_pipe_gets_all_columns_and_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    as_table(COLUMNS, ROWS)
    as_lines(["12:00:00  launch     " + WORDS * 5], indent=AFTER_KIND)
    assert capsys.readouterr().out.splitlines() == [
        "JOB\tDUE\tSTATE\tWHY",
        "job-1\t-\trunning\t",
        f"job-2\t-\tqueued\t{WORDS}",
        "12:00:00  launch     " + WORDS * 5,
    ]


def test_a_decision_goes_on_below_its_object_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    as_lines(["12:00:00  launch     node-1 cpu1.spot in local-a for job-1  one more member"], indent=AFTER_KIND)
    assert capsys.readouterr().out.splitlines() == [
        "12:00:00  launch     node-1 cpu1.spot in local-a for job-1",
        " " * AFTER_KIND + "one more member",
    ]
