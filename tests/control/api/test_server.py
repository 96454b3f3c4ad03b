"""The API as it listens: connections that send nothing, little by little or without end hold nothing for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.control.api.test_routes import clock, desk

from raytide.control.api import server as module
from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService

__all__ = ["clock", "desk"]

GET = b"GET /health HTTP/1.1\r\nHost: api\r\n"


@pytest.fixture
def port(desk: ApiService, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    monkeypatch.setattr(module, "MOST_HEADLESS", 4)
    (desk._live_path.parent / "tokens.json").write_text('{"secret": {"user": "ana", "team": "default"}}')
    (desk._live_path.parent / "tokens.json").chmod(0o600)
    running = module.server(create_app(desk, Tokens(desk._live_path.parent / "tokens.json")), "127.0.0.1", 0)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = True
    thread.join(30.0)
    assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60.0)


def rest(connection: socket.socket) -> bytes:
    """Returns all that arrives until the server closes the connection."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def test_a_connection_that_sends_nothing_is_closed(port: int) -> None:
    with connected(port) as silent:
        assert rest(silent) == b""


def test_a_head_that_comes_little_by_little_is_not_waited_for(port: int) -> None:
    with connected(port) as slow:
        try:
            for byte in GET + b"X: " + b"x" * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.01)
        except (ConnectionResetError, BrokenPipeError):
            return
        assert rest(slow) == b""


def test_the_second_head_of_a_connection_has_a_limit_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 3.0)  # the first one is in time, on a busy machine too
    with connected(port) as kept:
        kept.sendall(GET + b"\r\n")
        while b'"ok"' not in (part := kept.recv(65536)):
            assert part, "closed before its answer"
        kept.sendall(b"GET /hea")
        assert rest(kept) == b""


def test_a_head_without_end_is_refused(port: int) -> None:
    with connected(port) as endless:
        try:
            endless.sendall(GET + b"X: " + b"x" * 4 * module.HEAD_BYTES)
        except (ConnectionResetError, BrokenPipeError):
            return
        assert b" 200 " not in rest(endless)


def test_many_silent_connections_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 600.0)
    silent = [connected(port) for _ in range(8)]
    try:
        with connected(port) as client:
            client.sendall(GET + b"Connection: close\r\n\r\n")
            assert b'"ok"' in rest(client)
        assert rest(silent[0]) == b"", "the oldest are closed"
    finally:
        for connection in silent:
            connection.close()


def test_a_stranger_with_a_huge_body_is_answered_before_it_is_sent(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 60.0)
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: api\r\nContent-Length: 419430400\r\n"
    for token in (b"", b"Authorization: Bearer wrong\r\n"):
        with connected(port) as stranger:
            stranger.sendall(head + token + b"\r\n")
            assert rest(stranger).startswith(b"HTTP/1.1 401")
    with connected(port) as known:
        known.sendall(head + b"Authorization: Bearer secret\r\n\r\n")
        assert rest(known).startswith(b"HTTP/1.1 413")


def test_a_web_socket_is_no_way_in(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 60.0)
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with connected(port) as socket_:
        socket_.sendall(b"GET /v1/status HTTP/1.1\r\nHost: api\r\n" + upgrade)
        assert rest(socket_).startswith(b"HTTP/1.1 401")
