"""The proxy's middleware: whatever the proxy does, the client reads OpenAI's bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from raytide.actors.serving.edge import OpenAIEdge, middlewares


def through_the_edge(messages: Sequence[Message], path: str = "/m/v1/chat/completions") -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(OpenAIEdge(app)), base_url="http://edge") as client:
            return await client.post(path)

    import asyncio

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


def test_serve_finds_the_middleware() -> None:
    assert [middleware.cls for middleware in middlewares()] == [OpenAIEdge]
