"""The gate of the API: nothing is read of a stranger's body, and no body holds memory or a connection for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from raytide.control.api import gate
from raytide.control.api.auth import Tokens
from raytide.control.api.gate import BODY_BYTES, SPEC_BYTES, Gate
from raytide.control.api.queries import MOST_DEPTH, MOST_VALUES, parse_object
from raytide.core.errors import UsageError
from raytide.core.io.working_dir import MOST_BYTES

TOKEN = (b"authorization", b"Bearer secret")
PIECE = b"x" * 2**16


class Sender:
    """A client that sends pieces for as long as somebody reads them."""

    def __init__(self, pieces: int, piece: bytes = PIECE) -> None:
        self.left, self.sent, self._piece = pieces, 0, piece

    async def receive(self) -> Message:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        self.sent += len(self._piece)
        return {"type": "http.request", "body": self._piece, "more_body": self.left > 0}


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., tuple[int, bytes]]:
    """A request through the gate: its status, and the body that the route got."""
    (tmp_path / "tokens.json").write_text(json.dumps({"secret": {"user": "ana", "team": "default"}}))
    (tmp_path / "tokens.json").chmod(0o600)

    def run(method: str, path: str, headers: list[tuple[bytes, bytes]], receive: Receive) -> tuple[int, bytes]:
        statuses: list[int] = []
        got = bytearray()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            while True:
                message = await receive()
                got.extend(message.get("body", b""))
                if not message.get("more_body"):
                    break
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(asyncio.wait_for(Gate(route, Tokens(tmp_path / "tokens.json"))(scope, receive, send), 20.0))
        return (statuses[0] if statuses else 0), bytes(got)

    return run


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/packages/" + "a" * 64, "/v1/jobs/job-1/report", "/openapi.json"])
@pytest.mark.parametrize("token", [[], [(b"authorization", b"Bearer wrong")], [TOKEN, TOKEN]])
def test_nothing_is_read_of_a_body_whose_sender_is_unknown(
    call: Callable[..., tuple[int, bytes]], path: str, token: list[tuple[bytes, bytes]]
) -> None:
    sender = Sender(6400)
    status, got = call("POST", path, [*token, (b"transfer-encoding", b"chunked")], sender.receive)
    assert (status, got, sender.sent) == (401, b"", 0)


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("POST", "/v1/jobs", SPEC_BYTES),
        ("POST", "/v1/endpoints", SPEC_BYTES),
        ("POST", "/v1/jobs/job-1/report", BODY_BYTES),
        ("PATCH", "/v1/teams/default", BODY_BYTES),
        ("GET", "/v1/status", BODY_BYTES),
        ("PUT", "/v1/jobs/job-1/budget", BODY_BYTES),
    ],
)
def test_a_body_is_read_up_to_the_limit_of_its_route(
    call: Callable[..., tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch, method: str, path: str, most: int
) -> None:
    monkeypatch.setattr(gate, "_DISCARDED_BYTES", 2 * most)
    chunked = [TOKEN, (b"transfer-encoding", b"chunked")]
    assert call(method, path, chunked, Sender(most // len(PIECE)).receive) == (200, b"x" * most)
    sender = Sender(6400)
    assert call(method, path, chunked, sender.receive) == (413, b"")
    assert sender.sent <= 4 * most
    sender = Sender(6400)
    assert call(method, path, [TOKEN, (b"content-length", b"%d" % (most + 1))], sender.receive) == (413, b"")
    assert sender.sent <= 4 * most


@pytest.mark.parametrize("length", [b"%d" % (MOST_BYTES + 1), b"9" * 5000, b"-1", b"nonsense", b"1e9"])
def test_a_package_is_refused_by_its_announced_length(call: Callable[..., tuple[int, bytes]], length: bytes) -> None:
    status, got = call("PUT", "/v1/packages/" + "a" * 64, [TOKEN, (b"content-length", length)], Sender(1).receive)
    assert (status, got) == (413, b"")


def test_a_body_that_does_not_arrive_ends_the_request(
    call: Callable[..., tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "BODY_S", 0.05)
    assert call("POST", "/v1/jobs", [TOKEN, (b"content-length", b"10")], Sender(0).receive) == (408, b"")


def test_the_open_routes_take_no_body(call: Callable[..., tuple[int, bytes]]) -> None:
    sender = Sender(10)
    assert call("GET", "/health", [(b"transfer-encoding", b"chunked")], sender.receive) == (413, b"")
    assert sender.sent == 0


HOSTILE = {
    "no object": b"[]",
    "nothing": b"",
    "no JSON": b"{",
    "not valid UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a lone surrogate": b'{"a": "\\ud800"}',
    "a lone surrogate in a key": b'{"a": {"\\udfff": 1}}',
    "NUL": b'{"a": ["\\u0000"]}',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "an infinite number": b'{"a": 1e999}',
    "more digits than Python reads": b'{"a": ' + b"9" * 5000 + b"}",
    "more than 64 bits": b'{"a": 18446744073709551616}',
    "deep": b'{"a": ' + b"[" * MOST_DEPTH + b"]" * MOST_DEPTH + b"}",
    "deeper than Python reads": b'{"a": ' + b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many values": b'{"a": [' + b"0," * MOST_VALUES + b"0]}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_body_that_no_spec_can_be_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError, match="the request's body"):
        parse_object(body)


def test_what_specs_hold_is_read() -> None:
    body = {"a": [1, -(2**63), 2**64 - 1, 1e300, "naïve \U0001f600", None, True, {"b": []}]}
    assert parse_object(json.dumps(body).encode()) == body
    assert parse_object(json.dumps(body, ensure_ascii=False).encode()) == body
