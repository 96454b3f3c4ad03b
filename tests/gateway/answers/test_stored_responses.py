"""The responses that the gateway processes of a cluster share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gateway.conftest import running_gateway
from tests.gateway.tenancy.conftest import Line, line, secret_of, store

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.protocols.responses_api.stored import (
    KEEP_S,
    MAX_RESPONSE_BYTES,
    ResponseOwner,
    StoredResponse,
    input_items,
)
from raytide.core.errors import StorageError
from raytide.gateway.answers.stored_responses import ResponseLimits, SharedResponses

__all__ = ["line", "secret_of", "store"]

WEB, OTHER = ResponseOwner("web", "key-1"), ResponseOwner("web", "key-2")
SMALL = ResponseLimits(account_responses=3, account_bytes=4000, team_bytes=6000, total_bytes=8000, free_bytes=0)


def response(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse(f"resp_{name}", "m", {"output": [{"text": "x" * size}]}, input_items([{"id": "i"}]))


async def kept(responses: SharedResponses, names: str, team: str = "web") -> str:
    return "".join([name for name in names if await responses.get(team, f"resp_{name}") is not None])


async def test_a_response_is_found_by_another_process_and_by_its_team_alone(tmp_path: Path) -> None:
    one, two = SharedResponses(tmp_path), SharedResponses(tmp_path)
    await one.add(WEB, response("a"))
    assert await two.get("web", "resp_a") == response("a")
    assert await two.get("lab", "resp_a") is None
    assert not await two.delete("lab", "resp_a")
    assert await two.delete("web", "resp_a")
    assert not await one.delete("web", "resp_a")
    assert await one.get("web", "resp_a") is None


async def test_the_oldest_of_a_key_of_a_team_and_of_all_make_room(tmp_path: Path) -> None:
    by_count = SharedResponses(tmp_path / "1", SMALL)
    for name in "abcd":
        await by_count.add(WEB, response(name))
    await by_count.add(OTHER, response("e"))
    assert await kept(by_count, "abcde") == "bcde"
    by_size = SharedResponses(tmp_path / "2", SMALL)
    for name, owner in (("a", WEB), ("b", WEB), ("c", OTHER), ("d", OTHER), ("e", OTHER)):
        await by_size.add(owner, response(name, 1700))
    assert await kept(by_size, "abcde") == "bde", "those of one key first, then the team's oldest"
    await by_size.add(ResponseOwner("lab", ""), response("f", 3500))
    assert await kept(by_size, "abcde") == "de"
    assert await kept(by_size, "f", "lab") == "f"


async def test_responses_expire_and_are_removed(tmp_path: Path) -> None:
    now_s = [1000.0]
    responses = SharedResponses(tmp_path, SMALL, lambda: now_s[0])
    await responses.add(WEB, response("a"))
    now_s[0] += KEEP_S + 1
    assert await kept(responses, "a") == ""
    responses.sweep()
    with responses._database.read() as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone()[0] == 0
        assert connection.execute("SELECT count(*) FROM sizes").fetchone()[0] == 0


async def test_what_is_too_large_or_has_no_room_is_not_kept(tmp_path: Path) -> None:
    responses = SharedResponses(tmp_path / "1")
    await responses.add(WEB, response("a", MAX_RESPONSE_BYTES))
    assert await kept(responses, "a") == ""
    full = SharedResponses(tmp_path / "2", ResponseLimits(free_bytes=1 << 60))
    with pytest.raises(StorageError):
        await full.add(WEB, response("b"))


def test_processes_that_start_at_once_all_open_the_database(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        for attempt in range(50):  # without a lock about one in thirty failed
            folder = tmp_path / str(attempt)
            assert len(list(threads.map(SharedResponses, [folder] * 16))) == 16


NO_DATABASE = b"no database " * 1000


async def test_a_damaged_database_fails_the_call_that_finds_it_and_a_new_one_is_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    responses, other = SharedResponses(tmp_path), SharedResponses(tmp_path)
    for name in ("responses.db", "responses.db-wal", "responses.db-shm"):
        (tmp_path / name).write_bytes(NO_DATABASE)
    with pytest.raises(StorageError, match=r"responses\.db is damaged"):
        await responses.add(WEB, response("a"))
    await responses.add(WEB, response("b"))
    assert await kept(other, "ab") == "b"
    kept_files = [path for path in responses._database.set_aside() if path.read_bytes() == NO_DATABASE]
    assert len(kept_files) == 1, "SQLite itself has emptied the journals"
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.__dict__["set_aside"] in map(str, kept_files)


async def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    responses = SharedResponses(tmp_path / "responses")
    shutil.rmtree(tmp_path / "responses")
    with pytest.raises(StorageError, match=r"responses\.db cannot be opened"):
        await responses.get("web", "resp_a")


def test_processes_that_start_at_once_set_a_damaged_database_aside_once(tmp_path: Path) -> None:
    (tmp_path / "responses.db").write_bytes(NO_DATABASE)
    with ThreadPoolExecutor(8) as threads:
        started = list(threads.map(lambda _: SharedResponses(tmp_path), range(8)))
    with started[0]._database.read() as connection:
        assert connection.execute("SELECT count(*) FROM responses").fetchone()[0] == 0
    assert [path.read_bytes() for path in tmp_path.glob("responses.db.damaged-*")] == [NO_DATABASE]


async def test_keys_of_a_team_share_responses_of_models_that_they_may_use(
    line: Line, secret_of: Callable[..., str]
) -> None:
    first, second = secret_of(name="first", team="web"), secret_of(name="second", team="web")
    narrow, other = secret_of(name="narrow", team="web", models=["none"]), secret_of(name="other", team="lab")
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("m", FakeEngine())

        async def ask(method: str, path: str, secret: str, **json: object) -> tuple[int, dict[str, object]]:
            body = {"json": json} if json else {}
            headers = {"authorization": f"Bearer {secret}"}
            answer = await gateway.http.request(method, f"/v1/responses{path}", headers=headers, **body)  # type: ignore[arg-type]
            return answer.status_code, answer.json()

        _, made = await ask("POST", "", first, model="m", input="hello", max_output_tokens=3)
        path = f"/{made['id']}"
        assert await ask("GET", path, second) == (200, made)
        assert (await ask("GET", f"{path}/input_items", second))[0] == 200
        for stranger in (narrow, other):
            assert (await ask("GET", path, stranger))[0] == 404
            assert (await ask("DELETE", path, stranger))[0] == 404
        status, refused = await ask("POST", "", other, model="m", input="x", previous_response_id=made["id"])
        assert (status, refused["error"]["code"]) == (400, "previous_response_not_found")  # type: ignore[index]
        assert (await ask("DELETE", path, second))[1] == {"id": made["id"], "object": "response", "deleted": True}
        assert (await ask("GET", path, first))[0] == 404


async def test_a_full_disk_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise StorageError("the disk is full.", hint="Free space.")

    monkeypatch.setattr("raytide.actors.serving.protocols.responses_api.stored.MemoryResponses.add", full)
    async with running_gateway() as gateway:
        await gateway.deploy("m", FakeEngine())
        for stream in (False, True):
            body = {"model": "m", "input": "hello", "max_output_tokens": 3, "stream": stream}
            answer = await gateway.http.post("/v1/responses", json=body)
            assert answer.status_code == 200
            assert "error\n" not in answer.text
