"""The proxy's middleware: whatever the proxy does, the client reads OpenAI's bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.actors.serving.ray_serve.edge import OpenAIEdge, middlewares


def through_the_edge(messages: Sequence[Message], path: str = "/m/v1/chat/completions") -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(OpenAIEdge(app)), base_url="http://edge") as client:
            return await client.post(path)

    return asyncio.run(ask())


def start(status: int, *headers: tuple[str, str]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(k.encode(), v.encode()) for k, v in headers]}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_a_whole_answer_passes_untouched() -> None:
    answer = through_the_edge([start(200, ("content-type", "application/json")), body(b'{"a":', True), body(b"1}")])
    assert (answer.status_code, answer.json()) == (200, {"a": 1})


def test_a_replica_s_own_error_passes_untouched() -> None:
    answer = through_the_edge([start(400, ("content-type", "application/json")), body(b'{"error":{}}')])
    assert (answer.status_code, answer.json()) == (400, {"error": {}})


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (429, "requests", "rate_limit_exceeded"),
        (404, "invalid_request_error", "not_found"),
        (503, "server_error", "overloaded"),
        (500, "server_error", None),
    ],
)
def test_the_proxy_s_plain_text_becomes_an_error_body(status: int, kind: str, code: str | None) -> None:
    answer = through_the_edge([start(status, ("content-type", "text/plain"), ("x-request-id", "r1")), body(b"no")])
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, None)
    assert answer.headers["x-request-id"] == "r1"


def test_a_replica_lost_before_its_answer_is_a_503() -> None:
    answer = through_the_edge([])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")


def test_a_stream_that_lost_its_replica_ends_with_an_error_event() -> None:
    answer = through_the_edge([start(200, ("content-type", "text/event-stream")), body(b"data: {}\n\n", True)])
    events = answer.text.strip().split("\n\n")
    assert events[0] == "data: {}"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_a_finished_stream_gets_nothing_added() -> None:
    answer = through_the_edge([start(200, ("content-type", "text/event-stream")), body(b"data: [DONE]\n\n")])
    assert answer.text == "data: [DONE]\n\n"


def test_the_request_id_stands_once() -> None:
    answer = through_the_edge([start(200, ("x-request-id", "r1"), ("x-request-id", "r1")), body(b"")])
    assert answer.headers.get_list("x-request-id") == ["r1"]


def test_serve_s_own_routes_are_left_alone() -> None:
    answer = through_the_edge([start(503, ("content-type", "text/plain")), body(b"draining")], path="/-/healthz")
    assert answer.text == "draining"


async def converse(
    edge: ASGIApp, uploads: Sequence[Message], send: Send | None = None, **headers: str
) -> list[Message]:
    """What a client of the middleware gets for these messages; after them it stays and says nothing."""
    waiting, sent = list(uploads), list[Message]()

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def keep(message: Message) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/m/v1/completions", "method": "POST", "headers": raw}
    await asyncio.wait_for(edge(scope, receive, send or keep), 30)
    return sent


def upload(data: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def proxy(seen: list[bytes], answers: Sequence[Sequence[Message]]) -> ASGIApp:
    """As Serve's: reads all that comes until the client is gone, and gives the next of these answers each time."""
    left = list(answers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == "/m/v1/completions"
        scope["path"] = "/v1/completions"  # as Serve's does
        data, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            data, more = data + message["body"], message["more_body"]
        seen.append(data)
        for message in left.pop(0):
            await send(message)

    return app


DEAD = [start(503, ("content-type", "application/json"), ("x-raytide-retry-elsewhere", "1")), body(b"{}")]
GOOD = [start(200, ("content-type", "application/json")), body(b'{"a":1}')]


async def test_what_a_dead_engine_refused_is_sent_to_another_replica() -> None:
    seen: list[bytes] = []
    edge = OpenAIEdge(proxy(seen, [DEAD, DEAD, GOOD]), pauses_s=(0.0, 0.0))
    sent = await converse(edge, [upload(b"ab", True), upload(b"c")])
    assert (seen, sent[0]["status"], sent[1]["body"]) == ([b"abc"] * 3, 200, b'{"a":1}')


async def test_when_every_try_meets_a_dead_engine_the_client_is_told() -> None:
    seen: list[bytes] = []
    sent = await converse(OpenAIEdge(proxy(seen, [DEAD] * 3), pauses_s=(0.0, 0.0)), [upload(b"a")])
    assert (len(seen), [message.get("status") for message in sent]) == (3, [503, None])


@pytest.mark.parametrize(
    ("uploads", "headers"),
    [
        ([], {"content_length": "9"}),
        ([], {"content_length": "9" * 5000}),
        ([upload(b"abcd", True), upload(b"efghi", True)], {}),
        ([upload(b"abcd", True), upload(b"efghi", True)], {"content_length": "4"}),
    ],
)
async def test_a_body_over_the_limit_is_a_413_and_is_not_passed_on(
    uploads: list[Message], headers: dict[str, str]
) -> None:
    seen: list[bytes] = []
    sent = await converse(OpenAIEdge(proxy(seen, [DEAD]), max_body_bytes=8, pauses_s=()), uploads, **headers)
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_too_large"
    assert sum(map(len, seen)) <= 4


async def test_a_client_that_reads_nothing_is_given_up_and_its_replica_let_go() -> None:
    """Serve's proxy keeps whatever the client does not read: only the end of the request bounds that."""
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())  # as Serve's proxy watches for it
        await send(start(200, ("content-type", "text/event-stream")))
        while not leaving.done():
            await send(body(b"data: {}\n\n", more=True))
            await asyncio.sleep(0)
        assert leaving.result()["type"] == "http.disconnect"
        ended.set()

    taken = []

    async def full(message: Message) -> None:
        taken.append(message)
        if len(taken) > 10:  # its buffer is full
            await asyncio.Event().wait()

    await converse(OpenAIEdge(endless, send_timeout_s=0.05), [upload(b"")], full)
    assert ended.is_set()
    assert len(taken) == 11


def test_serve_finds_the_middleware() -> None:
    assert [middleware.cls for middleware in middlewares()] == [OpenAIEdge]
