"""Clients that do not read what they asked for: what waits for them is bounded, in amount and in time."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.base import Engine
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenChunk, GenRequest, TokenLogprobs
from raytide.actors.serving.http import headers
from raytide.actors.serving.http.headers import ResponseHeaders
from raytide.actors.serving.openai_api.generation import GenerationStream
from raytide.core.errors import EngineError

READERS = 3
REQUEST = GenRequest(request_id="r", prompt="x", sampling=SamplingParams())


class Talker(FakeEngine):
    """Says a token with 20 log probabilities as often as the loop turns, for ever; notes when it is let go."""

    said = 0
    is_open = False

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        self.is_open = True
        try:
            while True:
                top = tuple((token, -1.0) for token in range(20))
                self.said += 1
                yield GenChunk(request.request_id, [1], "x", logprobs=(TokenLogprobs(1, -1.0, 1, top),))
                await asyncio.sleep(0)
        finally:
            self.is_open = False


async def test_what_waits_for_a_reader_is_bounded_and_then_its_generation_ends() -> None:
    engine = Talker()
    await engine.start()
    generation = GenerationStream(engine, [REQUEST], [""], max_pending=2100)
    await asyncio.wait(generation._tasks, timeout=120)
    assert (engine.said, engine.is_open) == (101, False)
    batches = generation.batches()
    assert [len(piece.token_ids) for piece in await anext(batches)] == [101], "what was said is joined"
    with pytest.raises(EngineError, match="read more slowly"):
        await anext(batches)


async def test_a_reader_that_keeps_up_is_never_cut_off() -> None:
    engine = Talker()
    await engine.start()
    generation = GenerationStream(engine, [REQUEST], [""], max_pending=200)
    pieces = 0
    async for _ in generation.batches():
        pieces += 1
        if pieces == 500:
            break
    assert generation._failure is None
    generation.cancel()
    await asyncio.gather(*generation._tasks, return_exceptions=True)
    assert not engine.is_open


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "SEND_TIMEOUT_S", 0.05)
    closed = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            closed.append(True)

    sent: list[Message] = []

    async def full(message: Message) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    await ResponseHeaders(app, "r")({"type": "http", "method": "GET", "headers": []}, _nothing, full)
    assert (closed, len(sent)) == ([True], 4)


async def _nothing() -> Message:
    raise AssertionError


def test_many_readers_that_stop_reading_free_their_places(
    serve: Callable[[Engine], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through real sockets: their buffers fill, and after the timeout each one's generation ends."""
    monkeypatch.setattr(headers, "SEND_TIMEOUT_S", 0.5)
    url = serve(FakeEngine(max_model_len=10_000_000))
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 9_000_000, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    readers = []
    for _ in range(READERS):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(head + body)
        readers.append(reader)
    deadline = time.monotonic() + 240
    labels = 'api="completions",code="",endpoint="fake",outcome="aborted",revision=""'
    given_up = f"raytide_requests_total{{{labels}}} {READERS}.0"
    none_runs = 'raytide_requests_running{endpoint="fake",replica="",revision=""} 0.0'
    while given_up not in (text := httpx.get(f"{url}/metrics", timeout=120).text) or none_runs not in text:
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)
    for reader in readers:
        reader.close()
