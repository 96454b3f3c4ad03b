"""Clients that leave their answers unread: the API and the gateway end their connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import MagicMock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from raytide.actors.serving.http import unread_answers
from raytide.actors.serving.http.protocol import BoundedHttpTools
from raytide.actors.serving.http.unread_answers import LEAST_BYTES, ReadersLimit
from raytide.control.api.server import BoundedProtocol

ANSWER = b"x" * (32 << 20)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(ANSWER))]})
    await send({"type": "http.response.body", "body": ANSWER})


@pytest.fixture(params=[BoundedProtocol, BoundedHttpTools])
def server(request: pytest.FixtureRequest) -> Iterator[uvicorn.Server]:
    config = uvicorn.Config(app, port=0, log_level="critical", http=request.param, lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield running
    running.should_exit = running.force_exit = True
    thread.join(60.0)
    assert not thread.is_alive()


def asking(server: uvicorn.Server, *headers: bytes) -> socket.socket:
    reader = socket.socket()
    reader.settimeout(60.0)
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(server.servers[0].sockets[0].getsockname())
    reader.sendall(b"\r\n".join([b"GET / HTTP/1.1", b"Host: x", *headers, b"", b""]))
    return reader


@pytest.mark.parametrize("headers", [(), (b"Connection: close",)])
def test_a_whole_answer_that_is_not_read_is_given_up(
    server: uvicorn.Server, headers: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_answers, "UNREAD_S", 0.3)
    with asking(server, *headers):
        deadline = time.monotonic() + 15.0  # keep-alive connections are told to close after 5 s
        while not server.server_state.total_requests or server.server_state.connections:
            assert time.monotonic() < deadline, "the answer is still in memory"
            time.sleep(0.05)


def test_an_answer_that_is_read_comes_whole(server: uvicorn.Server) -> None:
    with asking(server, b"Connection: close") as reader:
        got = b"".join(iter(lambda: reader.recv(1 << 20), b""))
    assert got.endswith(ANSWER)


@pytest.mark.parametrize(("read", "is_ended"), [(LEAST_BYTES, False), (LEAST_BYTES - 1, True)])
def test_a_slow_reader_is_waited_for_as_long_as_it_reads(read: int, is_ended: bool) -> None:
    due: list[Callable[[], None]] = []

    def call_later(_: float, check: Callable[[], None]) -> MagicMock:
        due.append(check)
        return MagicMock()

    limit, loop, transport = ReadersLimit(), MagicMock(), MagicMock()
    limit.loop, limit.transport = loop, transport
    loop.call_later = call_later
    transport.get_write_buffer_size.return_value = 2 * LEAST_BYTES
    limit.pause_writing()
    transport.get_write_buffer_size.return_value -= read
    due.pop()()
    assert (transport.abort.called, bool(due)) == (is_ended, not is_ended)
    limit.resume_writing()
    assert limit._late_reader is None
