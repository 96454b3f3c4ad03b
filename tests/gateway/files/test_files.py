"""Files with OpenAI's client and by hand, over the gateway's app."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from tests.disk_fixture import Disk

from raytide.actors.serving.http.app import openai_app
from raytide.actors.serving.openai_api.admission import CALLER
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.errors import StorageError
from raytide.gateway.files.database import FileDatabase
from raytide.gateway.files.routes import add_file_routes
from raytide.gateway.files.store import FileLimits, FileObject, FileStore
from raytide.gateway.models import EndpointModels

LIMITS = FileLimits(file_bytes=3 << 20, team_bytes=5 << 20, total_bytes=8 << 20, free_bytes=0)


class Caller:
    def __init__(self, team: str) -> None:
        self.team = team


class TeamHeader:
    """Middleware in place of the one that reads keys."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            scope[CALLER] = Caller(headers.get(b"team", b"default").decode())
        await self._app(scope, receive, send)


CLIENTS: list[OpenAI] = []


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client_of(url: str, team: str = "default") -> OpenAI:
    made = OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        default_headers={"team": team},
        _strict_response_validation=True,
    )
    CLIENTS.append(made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(FileDatabase(tmp_path / "files"), LIMITS)


def app_of(store: FileStore) -> FastAPI:
    @asynccontextmanager
    async def nothing(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = openai_app(EndpointModels("test"), nothing)
    add_file_routes(app, store)
    app.add_middleware(TeamHeader)
    return app


@pytest.fixture
def url(store: FileStore) -> Iterator[str]:
    app = app_of(store)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn did not start"
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_a_file_is_uploaded_listed_read_and_deleted(url: str, store: FileStore) -> None:
    client = client_of(url)
    content = bytes(range(256)) * 8000 + b"\r\n--boundary\r\n"
    made = client.files.create(
        file=('rows "1" ü.jsonl', content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (made.bytes, made.purpose, made.object, made.status) == (len(content), "batch", "file", "processed")
    assert made.expires_at == made.created_at + 7200
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    assert [each.id for each in client.files.list()] == [made.id]
    path = store.content_path(made.id)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert client.files.delete(made.id).deleted
    assert not path.exists()
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError) as refused:
            ask(made.id)
        assert refused.value.type == "invalid_request_error"


def test_lists_go_by_cursor_order_and_purpose(url: str) -> None:
    client = client_of(url)
    made = [client.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(5)]
    other = client.files.create(file=("other", b"x"), purpose="user_data").id
    assert [each.id for each in client.files.list(limit=2)] == [other, *made[::-1]]
    assert [each.id for each in client.files.list(limit=2, order="asc", purpose="batch")] == made
    page = client.files.list(limit=2, after=made[3])
    assert page.has_more and [each.id for each in page.data] == [made[2], made[1]]
    for status, param, value in ((404, "after", "file-x"), (400, "limit", "0"), (400, "order", "up")):
        answer = httpx.get(f"{url}/v1/files", params={param: value}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_teams_do_not_see_each_others_files(url: str) -> None:
    red, blue = client_of(url, "red"), client_of(url, "blue")
    made = red.files.create(file=("a", b"x"), purpose="batch")
    assert list(blue.files.list()) == []
    for ask in (blue.files.retrieve, blue.files.content, blue.files.delete):
        with pytest.raises(NotFoundError):
            ask(made.id)
    with pytest.raises(NotFoundError):
        blue.files.list(after=made.id)
    assert red.files.retrieve(made.id) == made


def test_limits_of_file_team_and_cluster(url: str, store: FileStore) -> None:
    red, blue = client_of(url, "red"), client_of(url, "blue")
    with pytest.raises(APIStatusError) as refused:
        red.files.create(file=("a", b"x" * (3 << 20) + b"x"), purpose="batch")
    assert refused.value.status_code == 413
    red.files.create(file=("a", b"x" * (3 << 20)), purpose="batch")
    with pytest.raises(BadRequestError) as full:
        red.files.create(file=("a", b"x" * (3 << 20)), purpose="batch")
    assert full.value.code == "storage_limit_exceeded"
    blue.files.create(file=("a", b"x" * (3 << 20)), purpose="batch")
    with pytest.raises(BadRequestError) as full:
        client_of(url, "green").files.create(file=("a", b"x" * (3 << 20)), purpose="batch")
    assert full.value.code == "storage_limit_exceeded"
    contents = [path for path in store.folder.iterdir() if path.name.startswith("file-") or path.suffix == ".part"]
    assert len(contents) == 2, "refused uploads leave nothing"


def form(*parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    heads = [f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() for head, _ in parts]
    return b"".join(head + body + b"\r\n" for head, (_, body) in zip(heads, parts, strict=True)) + end


FILE, PURPOSE = ('name="file"; filename="a"', b"x"), ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(FILE), None, 400, "purpose"),
        (form(PURPOSE), None, 400, "file"),
        (form(FILE, ('name="purpose"', b"fun")), None, 400, "purpose"),
        (form(FILE, FILE, PURPOSE), None, 400, "file"),
        (form(FILE, PURPOSE, end=b""), None, 400, None),
        (form(FILE, ('name="purpose"', b"x" * 9999)), None, 400, "purpose"),
        (form(*[('name="a"', b"")] * 40), None, 400, None),
        (form(FILE, PURPOSE, ('name="expires_after[anchor]"', b"now")), None, 400, "expires_after.anchor"),
        (
            form(
                FILE,
                PURPOSE,
                ('name="expires_after[anchor]"', b"created_at"),
                ('name="expires_after[seconds]"', b"3599"),
            ),
            None,
            400,
            "expires_after.seconds",
        ),
        (b"\xff" * 100, None, 400, None),
        (b"", None, 400, None),
        (b"{}", "application/json", 415, None),
        (b"{}", "multipart/form-data", 415, None),
        (b"{}", "multipart/form-data; boundary=" + "b" * 500, 400, None),
    ],
    ids=range(14),
)
def test_wrong_uploads_are_refused_and_leave_nothing(
    url: str, store: FileStore, body: bytes, kind: str | None, status: int, param: str | None
) -> None:
    kind = kind or "multipart/form-data; boundary=b"
    answer = httpx.post(f"{url}/v1/files", content=body, headers={"content-type": kind}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert {path.name for path in store.folder.iterdir() if not path.name.startswith("files.db")} == set()


def test_files_of_both_processes_stay_within_the_limit(tmp_path: Path) -> None:
    stores = [FileStore(FileDatabase(tmp_path / "files"), LIMITS) for _ in range(2)]

    def put(number: int) -> FileObject | None:
        store = stores[number % 2]
        with store.partial() as part:
            part.write(b"x" * (1 << 20))
            try:
                return store.add(part, "red", filename=f"{number}", purpose="batch")
            except ApiError:
                return None

    with ThreadPoolExecutor(8) as pool:
        added = [each for each in pool.map(put, range(16)) if each is not None]
    assert len(added) == 5
    listed = stores[0].page("red", after=None, limit=100, is_ascending=True, purpose=None)
    assert {each.id for each in listed.data} == {each.id for each in added}


async def test_slow_uploads_of_one_team_leave_room_for_others(store: FileStore) -> None:
    head = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nrow'
    begun, rest = asyncio.Queue[None](), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield head
        begun.put_nowait(None)
        await rest.wait()
        yield b"\r\n--x--\r\n"

    async def upload(team: str, content: bytes | AsyncIterator[bytes]) -> int:
        headers = {"team": team, "content-type": "multipart/form-data; boundary=x"}
        return (await http.post("/v1/files", content=content, headers=headers)).status_code

    transport = httpx.ASGITransport(app_of(store))
    async with asyncio.timeout(120), httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        uploads = [asyncio.create_task(upload("red", slow())) for _ in range(4)]
        for _ in uploads:
            await begun.get()
        whole = head + b"\r\n--x--\r\n"
        assert (await upload("red", whole), await upload("blue", whole)) == (429, 200)
        rest.set()
        assert await asyncio.gather(*uploads) == [200] * 4
        assert await upload("red", whole) == 200


def test_expired_files_and_what_killed_uploads_left_are_removed(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(FileDatabase(tmp_path / "files"), LIMITS, lambda: now[0])
    with store.partial() as part:
        part.write(b"x")
        made = store.add(part, "red", filename="a", purpose="batch", expires_after_s=3600)
    orphan = store.folder / f"file-{'0' * 32}"
    orphan.write_bytes(b"x")

    os.utime(orphan, (1.0, 1.0))
    now[0] += 3600
    store.sweep()
    assert store.get("red", made.id) == made and not orphan.exists()
    now[0] += 1
    with pytest.raises(ApiError):
        store.get("red", made.id)
    store.sweep()
    assert not store.content_path(made.id).exists()


def test_a_full_disk_refuses_an_upload_and_keeps_the_rest(disk: Disk) -> None:
    store = FileStore(FileDatabase(disk.path / "files"), LIMITS)
    with store.partial() as part:
        part.write(b"x")
        made = store.add(part, "red", filename="a", purpose="batch")
    disk.fill()
    with pytest.raises(StorageError), store.partial() as part:
        part.write(b"x" * (1 << 20))
    assert store.get("red", made.id) == made
    disk.free()
    with store.partial() as part:
        part.write(b"x" * (1 << 20))
        store.add(part, "red", filename="a", purpose="batch")
    keeps_room = FileStore(FileDatabase(disk.path / "files"), FileLimits(free_bytes=64 << 20))
    with pytest.raises(StorageError, match="no more room"), keeps_room.partial() as part:
        part.write(b"x")


def test_files_of_a_damaged_database_are_unknown_and_their_contents_kept_beside_it(
    url: str, store: FileStore, tmp_path: Path
) -> None:
    client = client_of(url)
    lost = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    database = store.database._path
    database.write_bytes(b"no database " * 1000)
    again = FileStore(FileDatabase(tmp_path / "files"), LIMITS)
    with pytest.raises(NotFoundError, match=f"No such File object: {lost.id}"):
        client.files.retrieve(lost.id)
    assert client.files.create(file=("b.jsonl", b"{}"), purpose="batch").id in {each.id for each in client.files.list()}
    os.utime(again.content_path(lost.id), (0, 0))
    again.sweep()
    assert again.content_path(lost.id).exists()
    for path in again.database.set_aside():
        path.unlink()
    again.sweep()
    assert not again.content_path(lost.id).exists()
