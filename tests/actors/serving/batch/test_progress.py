"""The record of rows: torn lines, full disks, cancellation, and what is retried."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send
from tests.disk_fixture import Disk

from raytide.actors.serving.batch import run
from raytide.actors.serving.batch.input_file import BatchInput, InputRow, check_input
from raytide.actors.serving.batch.progress_file import ProgressFile, RowResult, RowUsage
from raytide.actors.serving.batch.row_request import request_row
from raytide.actors.serving.batch.run import run_rows, write_results
from raytide.core.errors import DataError
from raytide.core.io.storage import is_full_disk

HEADER = {"input": "abc"}


def result(place: int, *, is_ok: bool = True, text: str = "é") -> RowResult:
    return RowResult(place, is_ok, {"custom_id": f"id-{place}", "text": text}, RowUsage(2, 1, 3, 0))


def rows_of(folder: Path, count: int) -> BatchInput:
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m"}}
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**line, "custom_id": f"id-{place}"}) + "\n" for place in range(count)))
    rows = check_input(path, None)
    assert rows.errors == [] and len(rows) == count
    return rows


@pytest.mark.parametrize("torn", [b"", b'{"place": 2', b"\0" * 100, b'{"place": 2}\n', b"\0" * 50 + b"\n" + b"\0" * 50])
def test_a_torn_end_is_cut_off_and_the_rest_is_kept(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "progress"
    progress = ProgressFile(path, HEADER)
    progress.append([result(1), result(0, is_ok=False)])
    progress.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = ProgressFile(path, HEADER)
    assert path.read_bytes() == whole
    assert (again.completed, again.failed, len(again), 1 in again, 2 in again) == (1, 1, 2, True, False)
    assert again.usage == RowUsage(4, 2, 6, 0)
    again.append([result(2)])
    assert [again.result(place) for place in range(3)] == [result(0, is_ok=False), result(1), result(2)]
    again.close()


def test_the_progress_of_another_batch_is_refused(tmp_path: Path) -> None:
    ProgressFile(tmp_path / "progress", HEADER).close()
    with pytest.raises(DataError, match="another batch"):
        ProgressFile(tmp_path / "progress", {"input": "other"})


def test_a_disk_without_the_free_space_that_is_kept_counts_as_full(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    ProgressFile(path, HEADER).close()
    whole = path.read_bytes()
    progress = ProgressFile(path, HEADER, free_bytes=1 << 60)
    with pytest.raises(OSError, match="no more room") as refused:
        progress.append([result(0)])
    assert is_full_disk(refused.value)
    assert (len(progress), path.read_bytes()) == (0, whole)
    progress.close()


def test_a_full_disk_delays_a_batch_and_loses_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FULL_DISK_PAUSE_S", 0.01)
    ran: list[int] = []

    began = asyncio.Event()

    async def work() -> None:
        rows, progress = rows_of(disk.path, 20), ProgressFile(disk.path / "progress", HEADER)
        disk.fill()

        async def request(place: int, row: InputRow) -> RowResult:
            ran.append(place)
            if len(ran) == 4:
                began.set()
            return result(place, text="x" * 5000)

        running = asyncio.create_task(run_rows(rows, progress, request, at_once=4))
        async with asyncio.timeout(60):
            await began.wait()
            assert len(progress) < 4 and len(ran) <= 4 + len(progress), "no row goes on before the last is recorded"
            disk.free()
            await running
        assert sorted(ran) == list(range(20)) and progress.completed == 20
        progress.close()

    asyncio.run(work())
    again = ProgressFile(disk.path / "progress", HEADER)
    assert again.completed == 20
    again.close()


def test_a_stop_records_the_rows_that_have_begun_and_begins_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        rows, progress = rows_of(tmp_path, 100), ProgressFile(tmp_path / "progress", HEADER)
        begun: list[int] = []
        is_stopping, gate = False, asyncio.Event()

        async def request(place: int, row: InputRow) -> RowResult:
            begun.append(place)
            if place >= 50:
                await gate.wait()
            return result(place)

        running = asyncio.create_task(run_rows(rows, progress, request, at_once=8, is_stopping=lambda: is_stopping))
        async with asyncio.timeout(60):
            while len(begun) < 58:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            is_stopping = True
            gate.set()
            await running
        assert sorted(begun) == list(range(58)) == [place for place in range(100) if place in progress]
        progress.close()

    asyncio.run(scenario())


def test_what_was_recorded_does_not_run_after_a_cancellation(tmp_path: Path) -> None:
    ran: list[int] = []

    began = asyncio.Event()

    async def work() -> None:
        rows, progress = rows_of(tmp_path, 100), ProgressFile(tmp_path / "progress", HEADER)

        async def request(place: int, row: InputRow) -> RowResult:
            assert row.custom_id == f"id-{place}"
            ran.append(place)
            if len(ran) == 58:
                began.set()
            if place >= 50:
                await asyncio.Event().wait()
            return result(place, is_ok=place % 2 == 0)

        running = asyncio.create_task(run_rows(rows, progress, request, at_once=8))
        async with asyncio.timeout(60):
            await began.wait()
        running.cancel()
        await asyncio.wait({running})
        assert len(progress) == 50
        progress.close()

        async def quick(place: int, row: InputRow) -> RowResult:
            ran.append(place)
            return result(place)

        progress = ProgressFile(tmp_path / "progress", HEADER)
        await run_rows(rows, progress, quick, at_once=8)
        write_results(progress, len(rows), tmp_path / "out", tmp_path / "errors")
        progress.close()

    asyncio.run(work())
    assert {place for place in ran if ran.count(place) == 2} == set(range(50, 58))
    good = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert good == [f"id-{place}" for place in range(100) if place >= 50 or place % 2 == 0]
    assert len((tmp_path / "errors").read_text().splitlines()) == 25


@pytest.mark.parametrize(
    ("status", "code", "headers", "attempts"),
    [
        (400, None, {}, 1),
        (429, "rate_limit_exceeded", {}, 6),
        (429, "insufficient_quota", {"x-should-retry": "false"}, 1),
        (503, "overloaded", {}, 6),
        (503, "engine_dead", {}, 3),
        (500, "internal_error", {}, 3),
    ],
)
def test_only_what_another_attempt_may_help_is_retried(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str | None, headers: dict[str, str], attempts: int
) -> None:
    from raytide.actors.serving.batch import row_request

    monkeypatch.setattr(row_request, "_BACKOFF_S", (0.001, 0.001))
    asked = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal asked
        asked += 1
        assert json.loads((await receive())["body"]) == {"model": "m"} and scope["team"] == "red"
        found = (200, b"{}", {}) if asked == 6 else (status, json.dumps({"error": {"code": code}}).encode(), headers)
        head = [(name.encode(), value.encode()) for name, value in found[2].items()]
        await send({"type": "http.response.start", "status": found[0], "headers": head})
        await send({"type": "http.response.body", "body": found[1]})

    row = InputRow("id", "/v1/completions", {"model": "m"})
    done = asyncio.run(request_row(app, 7, row, lambda: {"team": "red"}))
    assert asked == attempts and done.place == 7 and done.is_ok == (attempts == 6)
    assert done.line["response"]["status_code"] == (200 if attempts == 6 else status)


def test_half_a_surrogate_pair_in_an_answer_stops_no_batch(tmp_path: Path) -> None:
    """UTF-8 lacks it, and an API that cuts an emoji at `max_tokens` answers with it, as an escape."""
    rows, progress = rows_of(tmp_path, 3), ProgressFile(tmp_path / "progress", HEADER)

    async def request(place: int, row: InputRow) -> RowResult:
        return result(place, text="\ud83d" if place == 1 else "é")

    async def body() -> None:
        async with asyncio.timeout(60):
            await run_rows(rows, progress, request, at_once=1)

    asyncio.run(body())
    write_results(progress, 3, tmp_path / "out", tmp_path / "bad")
    texts = [json.loads(each)["text"] for each in (tmp_path / "out").read_bytes().splitlines()]
    assert texts == ["é", "\ud83d", "é"]
    progress.close()
