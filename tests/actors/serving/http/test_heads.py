"""Heads of requests as the gateway takes them: without end or little by little they hold nothing for long."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import uvicorn

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.http import protocol
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server

GET = b"GET /health HTTP/1.1\r\nHost: api\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: api\r\nContent-Type: application/json\r\n"
ENDLESS = {
    "a header": (GET + b"X: ", b"x" * (1 << 16)),
    "headers": (GET, b"X-a: b\r\n" * (1 << 13)),
    "a target": (b"GET /", b"x" * (1 << 16)),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-a: b\r\n" * (1 << 13)),
    "a chunk's extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * (1 << 16)),
}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(protocol, "HEAD_S", 0.5)
    app = create_app(Server(FakeEngine(), model="fake", drain_s=1.0))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", http=protocol.BoundedHttpTools)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = True
    thread.join(60.0)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60.0)


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_cut_off_in_little_memory(port: int, what: str) -> None:
    first, more = ENDLESS[what]
    before, sent = psutil.Process().memory_info().rss, 0
    with connected(port) as endless:
        endless.sendall(first)
        try:
            while sent < 64 << 20:
                endless.sendall(more)
                sent += len(more)
        except OSError:
            pass
    assert sent < 64 << 20, "it was never cut off"
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.parametrize("first", [b"", b"GET /hea", GET + b"\r\nGET /hea"])
def test_a_head_that_does_not_come_is_not_waited_for(port: int, first: bytes) -> None:
    with connected(port) as slow:
        slow.sendall(first)
        try:
            while slow.recv(65536):
                pass
        except ConnectionResetError:
            pass


def test_a_long_body_and_several_requests_on_a_connection_pass(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 60.0)
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 2, "user": "' + b"u" * 200_000 + b'"}'
    with connected(port) as kept:
        for _ in range(3):
            kept.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode())
            for at in range(0, len(body), 10_000):
                kept.sendall(body[at : at + 10_000])
            answer = http.client.HTTPResponse(kept)
            answer.begin()
            assert answer.status == 200
            assert answer.read(), "whole, so that the next one begins where it ends"


def test_http_1_0_gets_a_stream_that_ends_with_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no chunks; nginx speaks it with what is behind it."""
    monkeypatch.setattr(protocol, "HEAD_S", 60.0)
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 3, "stream": true}'
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    with connected(port) as old:
        old.sendall(head + body)
        answer = b"".join(iter(lambda: old.recv(1 << 16), b""))
        head, _, stream = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert b"connection: close" in head.lower()
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"data: [DONE]\n\n")
    with connected(port) as old:
        old.sendall(GET.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n")
        head, _, text = b"".join(iter(lambda: old.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(text) in head.lower()
