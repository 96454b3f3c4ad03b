"""Batches of one process, in the test's event loop: expiry, keys, and what a full disk or a lock does."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send
from tests.disk_fixture import Disk

from raytide.actors.serving.batch import run
from raytide.actors.serving.batch.input_file import InputRow
from raytide.actors.serving.openai_api.admission import BatchRow
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest, chat_request
from raytide.control.supervision.daemon import hold_lock
from raytide.gateway.batches.objects import FINAL, BatchObject, BatchRequest, ExpiresAfter
from raytide.gateway.batches.runner import _BATCHES_AT_ONCE, PRIORITY, BatchRunner
from raytide.gateway.batches.store import BatchStore, UnfinishedBatch
from raytide.gateway.files.database import FileDatabase
from raytide.gateway.files.store import FileLimits, FileStore

Answer = Callable[[str], Awaitable[int]]


class Gateway:
    """Batches over an app that answers each custom row with a status."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self.now_s, self.drain_s = 1000.0, 0.1
        self.files = FileStore(FileDatabase(folder), FileLimits(free_bytes=0), lambda: self.now_s)
        self.batches = BatchStore(self.files, lambda: self.now_s)
        self.asked: list[str] = []
        self.scope: Mapping[str, object] = {}
        self.refusal: ApiError | None = None
        self._answer = answer

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.scope = scope
        self.asked.append(body["prompt"])
        status = await self._answer(body["prompt"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def scope_of(self, account: str, row: BatchRow) -> Mapping[str, object]:
        if self.refusal is not None:
            raise self.refusal
        return {"account": account, "row": row}

    def submit(self, rows: int, expiry: ExpiresAfter | None = None, team: str = "red") -> BatchObject:
        line = {"method": "POST", "url": "/v1/completions"}
        with self.files.partial() as part:
            for place in range(rows):
                body = {"model": "m", "prompt": f"row {place}", "priority": 3}
                part.write(json.dumps({**line, "custom_id": f"id-{place}", "body": body}).encode() + b"\n")
            file = self.files.add(part, team, filename="rows", purpose="batch")
        request = BatchRequest(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", output_expires_after=expiry
        )
        return self.batches.create(request, team, "key-7")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        runner = BatchRunner(
            self.batches, self.app, self.scope_of, lambda _: False, poll_s=0.01, drain_s=self.drain_s, now_s=self.now
        )
        task = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(120):
                yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def now(self) -> float:
        return self.now_s

    async def ended(self, batch: BatchObject) -> BatchObject:
        await until(lambda: self.batches.get("red", batch.id).status in FINAL)
        return self.batches.get("red", batch.id)

    def lines(self, file_id: str | None) -> list[dict[str, object]]:
        assert file_id is not None
        return [json.loads(line) for line in self.files.content("red", file_id)[1].read_text().splitlines()]


def shown(gateway: Gateway) -> dict[str, float]:
    """Returns the metrics of the only batch, which is one of team red."""
    samples = gateway.batches.samples()
    assert {sample.labels[1] for sample in samples} <= {"red"}
    return {sample.metric.name: sample.value for sample in samples}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def ok(prompt: str) -> int:
    return 200


def test_rows_run_for_the_account_of_the_batch_and_end_with_its_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", ok)
        async with gateway.running():
            done = await gateway.ended(gateway.submit(2))
            assert (done.status, gateway.scope["account"]) == ("completed", "key-7")
            gateway.refusal = invalid("revoked", param=None, code="invalid_api_key", status=401)
            done = await gateway.ended(gateway.submit(2))
            assert done.request_counts.failed == 2 and done.output_file_id is None
            (first, _) = gateway.lines(done.error_file_id)
            assert isinstance(first["response"], dict) and first["response"]["status_code"] == 401
        assert len(gateway.asked) == 2

    asyncio.run(scenario())


def test_an_expired_batch_keeps_its_answers_and_names_the_rest(tmp_path: Path) -> None:
    async def answer(prompt: str) -> int:
        if int(prompt.removeprefix("row ")) >= 5:
            await asyncio.Event().wait()
        return 200

    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", answer)
        batch = gateway.submit(100, ExpiresAfter(anchor="created_at", seconds=3600))
        async with gateway.running():
            await until(lambda: gateway.batches.get("red", batch.id).request_counts.completed == 5)
            gateway.now_s = batch.expires_at - 60.0
            assert shown(gateway) == {"raytide_batch_left_seconds": 60.0, "raytide_batch_done_ratio": 0.05}
            gateway.now_s = batch.expires_at
            done = await gateway.ended(batch)
        assert (done.status, done.expired_at, done.cancelled_at) == ("expired", batch.expires_at, None)
        assert shown(gateway) == {}, "only those that have not ended"
        assert (done.request_counts.completed, done.request_counts.failed) == (5, 95)
        assert [each["custom_id"] for each in gateway.lines(done.output_file_id)] == [f"id-{i}" for i in range(5)]
        errors = gateway.lines(done.error_file_id)
        assert [each["custom_id"] for each in errors] == [f"id-{i}" for i in range(5, 100)]
        assert all(each["response"] is None for each in errors)
        assert {each["error"]["code"] for each in errors if isinstance(each["error"], dict)} == {"batch_expired"}
        assert gateway.files.get("red", str(done.output_file_id)).expires_at == batch.expires_at + 3600

    asyncio.run(scenario())


def test_a_batch_that_another_process_has_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", ok)
        held, free = gateway.submit(1), gateway.submit(1)
        async with gateway.running():
            with hold_lock(tmp_path / "files" / f"{held.id}.lock"):
                assert (await gateway.ended(free)).status == "completed"
                assert gateway.batches.get("red", held.id).status == "validating"
            assert (await gateway.ended(held)).status == "completed"

    asyncio.run(scenario())


def test_a_team_does_not_wait_for_the_batches_of_another_one(tmp_path: Path) -> None:
    async def answer(prompt: str) -> int:
        if prompt == "row 0":  # red's only rows
            await asyncio.Event().wait()
        return 200

    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", answer)
        stuck = [gateway.submit(1) for _ in range(_BATCHES_AT_ONCE + 2)]
        async with gateway.running():
            await until(lambda: len(gateway.asked) == _BATCHES_AT_ONCE)
            other = gateway.submit(2, team="blue")
            async with asyncio.timeout(30):
                await until(lambda: gateway.batches.get("blue", other.id).request_counts.completed == 1)
            waiting = [gateway.batches.get("red", each.id).status for each in stuck].count("validating")
            assert (waiting, len(gateway.asked)) == (2, _BATCHES_AT_ONCE + 2)

    asyncio.run(scenario())


def test_a_stopped_process_leaves_its_batch_to_the_next(tmp_path: Path) -> None:
    is_open = False

    async def answer(prompt: str) -> int:
        if not is_open and int(prompt.removeprefix("row ")) >= 50:
            await asyncio.Event().wait()
        return 200

    async def scenario() -> None:
        nonlocal is_open
        gateway = Gateway(tmp_path / "files", answer)
        batch = gateway.submit(100)
        async with gateway.running():
            await until(lambda: gateway.batches.get("red", batch.id).request_counts.completed == 50)
        assert gateway.batches.get("red", batch.id).status == "in_progress"
        is_open = True
        async with gateway.running():
            done = await gateway.ended(batch)
        assert (done.status, done.request_counts.completed) == ("completed", 100)
        assert all(gateway.asked.count(f"row {place}") == 1 for place in range(50))

    asyncio.run(scenario())


def test_a_full_disk_delays_a_batch(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_FULL_DISK_PAUSE_S", 0.01)
    monkeypatch.setattr("raytide.gateway.batches.runner._RETRY_S", 0.01)

    is_full = False

    async def answer(prompt: str) -> int:
        nonlocal is_full
        if prompt == "row 10" and not is_full:
            disk.fill()
            is_full = True
        return 200

    async def scenario() -> None:
        gateway = Gateway(disk.path / "files", answer)
        batch = gateway.submit(200)
        async with gateway.running():
            await until(lambda: is_full and "tried again" in caplog.text)
            assert gateway.batches.get("red", batch.id).status not in FINAL
            disk.free()
            done = await gateway.ended(batch)
        assert (done.status, done.request_counts.completed) == ("completed", 200)
        assert [each["custom_id"] for each in gateway.lines(done.output_file_id)] == [f"id-{i}" for i in range(200)]

    asyncio.run(scenario())


@pytest.mark.parametrize("last_row", [None, "row 4"])
def test_a_batch_waits_for_the_free_space_that_uploads_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, last_row: str | None
) -> None:
    """The space is short from the beginning, or when the results of all rows are to be published."""
    monkeypatch.setattr("raytide.gateway.batches.runner._RETRY_S", 0.01)
    short = FileLimits(free_bytes=1 << 60)

    async def scenario() -> None:
        async def answer(prompt: str) -> int:
            if prompt == last_row:
                gateway.files.limits = short
            return 200

        gateway = Gateway(tmp_path / "files", answer)
        batch, enough = gateway.submit(5), gateway.files.limits
        if last_row is None:
            gateway.files.limits = short
        async with gateway.running():
            await until(lambda: "tried again" in caplog.text or gateway.batches.get("red", batch.id).status in FINAL)
            assert gateway.batches.get("red", batch.id).status not in FINAL
            gateway.files.limits = enough
            done = await gateway.ended(batch)
        assert (done.status, done.request_counts.completed) == ("completed", 5)
        assert len(gateway.asked) == 5

    asyncio.run(scenario())


def test_a_team_without_room_for_results_creates_no_batch(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "files", ok)
    gateway.files.limits = FileLimits(team_files=1, free_bytes=0)
    with pytest.raises(ApiError, match="take all the room"):
        gateway.submit(1)
    assert gateway.batches.unfinished() == []


def test_a_batch_is_deleted_30_days_after_its_end_and_its_results_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", ok)
        batch = gateway.submit(1)
        async with gateway.running():
            done = await gateway.ended(batch)
        unfinished = gateway.submit(1)
        gateway.now_s += 30 * 86_400
        gateway.batches.sweep()
        assert gateway.batches.get("red", batch.id) == done
        gateway.now_s += 1
        async with gateway.running():  # its first sweep
            await until(
                lambda: batch.id not in {each.id for each in gateway.batches.page("red", after=None, limit=9).data}
            )
            assert (await gateway.ended(unfinished)).status == "expired"
        assert len(gateway.lines(done.output_file_id)) == 1

    asyncio.run(scenario())


def test_a_failure_that_nobody_expects_does_not_end_the_work_on_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "files", ok)
        unfinished, failures = gateway.batches.unfinished, [sqlite3.DatabaseError("malformed"), ValueError("odd")]

        def damaged() -> list[UnfinishedBatch]:
            if failures:
                raise failures.pop()
            return unfinished()

        monkeypatch.setattr(gateway.batches, "unfinished", damaged)
        async with gateway.running():
            assert (await gateway.ended(gateway.submit(1))).status == "completed"

    asyncio.run(scenario())


def test_a_row_of_the_responses_api_waits_behind_clients_too() -> None:
    runner = BatchRunner(None, None, None, lambda _: True)  # type: ignore[arg-type]
    row = runner._behind_clients(InputRow("a", "/v1/responses", {"model": "m", "input": "hi"}))
    assert chat_request(ResponsesRequest.model_validate(row.body)).priority == PRIORITY
