"""Tables and decisions on a terminal of any width."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from raytide.autoscaler.explain import AFTER_KIND
from raytide.cli.jobs import datasets
from raytide.cli.show import as_lines, as_list, as_result, as_table, fitted, local_time
from raytide.control.views import Waiting
from raytide.core.specs.data import DatasetVersion, DatasetVersionSpec, RegisteredDataset

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


def test_records_are_a_table_or_json_and_a_result_is_its_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    waits = [Waiting("quota", "no GPU is free", wait_s=3.0)]
    as_list(waits, ("WHY", "WAIT"), lambda each: (each.reason, each.wait_s), False)
    as_result(waits[0], "it waits", False)
    assert capsys.readouterr().out == "WHY\tWAIT\nno GPU is free\t3.0\nit waits\n"
    whole = {"constraint": "quota", "reason": "no GPU is free", "remedy": "", "wait_s": 3.0}
    as_list(waits, ("WHY", "WAIT"), lambda each: (each.reason, each.wait_s), True)
    assert json.loads(capsys.readouterr().out) == [whole]
    as_result(waits[0], "it waits", True)
    assert json.loads(capsys.readouterr().out) == whole


def test_a_time_has_its_date() -> None:
    assert datetime.fromisoformat(local_time(1_763_800_000.0)).timestamp() == 1_763_800_000.0


def test_the_list_of_datasets_says_on_which_day_each_was_registered() -> None:
    spec = DatasetVersionSpec.model_construct(name="tokens", documents=3, tokens=1200)
    row = datasets._row(RegisteredDataset("tokens", "team", 1, DatasetVersion(spec, 1, "ada", 1_763_800_000.0)))
    assert row == ("tokens", "team", 1, "3", "1,200", local_time(1_763_800_000.0))
