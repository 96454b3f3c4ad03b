"""Requests that outlive their client's connection, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from raytide.actors.engine import FakeEngine
from raytide.actors.engine.backends.remote import kept_streams
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.kept_streams import KEPT_S, KeptStreams
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.backends.remote.shared_stream import joined
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenChunk, GenRequest, SampleProgress, TokenLogprobs, TokenUsage
from raytide.core.errors import EngineError


class SteppedEngine(FakeEngine):
    """Gives a token of each request when the test opens its gate, and counts the requests that it has got."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[str] = []
        self.closed: list[str] = []
        self.gate = asyncio.Event()

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:  # type: ignore[override]
        name = bytes(request.prompt).decode()
        self.began.append(name)
        try:
            yield GenChunk(request.request_id, [1], "a")
            await self.gate.wait()
            if name == "bad":
                raise EngineError("it failed.", hint="Retry.")
            usage = TokenUsage(len(request.prompt), 2)
            yield GenChunk(request.request_id, [2], "b", "length", usage=usage)
        finally:
            self.closed.append(name)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[SteppedEngine, Callable[[], RemoteEngine], EngineServer]]:
    engine = SteppedEngine()
    server = EngineServer(engine, await engine.start(), "secret", problem=no_problem)
    port = await server.listen("127.0.0.1")
    try:
        async with asyncio.timeout(60):
            yield engine, lambda: RemoteEngine("127.0.0.1", port, "secret"), server
    finally:
        await server.close()
        await engine.shutdown()


async def no_problem() -> None:
    return None


def ask(prompt: str, key: str = "row-1", *, id: str = "q", logprobs: int | None = None) -> GenRequest:
    sampling = SamplingParams(max_tokens=2, logprobs=logprobs)
    return GenRequest(request_id=id, prompt=list(prompt.encode()), sampling=sampling, rejoin_key=key)


async def text(engine: RemoteEngine, request: GenRequest) -> str:
    return "".join([chunk.text async for chunk in engine.generate(request)])


async def begun(client: RemoteEngine, request: GenRequest) -> AsyncIterator[GenChunk]:
    """Starts the client and the request, and returns the stream after its first chunk."""
    await client.start()
    stream = client.generate(request)
    assert (await anext(stream)).text == "a"
    return stream


async def test_the_next_client_gets_what_a_lost_one_has_begun_and_the_engine_computes_it_once() -> None:
    async with served() as (engine, client, _):
        first, second, third = client(), client(), client()
        await begun(first, ask("row", id="q1"))
        await first.shutdown()  # as when its process is killed: nothing says that the answer is unwanted
        await second.start()
        assert await second.holds("row-1") and not await second.holds("row-2")
        rest = asyncio.create_task(text(second, ask("row", id="q2")))
        await asyncio.sleep(0.05)
        assert not engine.closed, "it runs without a client"
        engine.gate.set()
        assert await rest == "ab"
        await third.start()
        assert await third.holds("row-1")
        chunks = [chunk async for chunk in third.generate(ask("row", id="q3"))]
        assert [(each.request_id, each.text, each.token_ids) for each in chunks] == [("q3", "ab", [1, 2])]
        assert chunks[-1].usage == TokenUsage(3, 2) and chunks[-1].finish_reason == "length"
        assert engine.began == ["row"]


async def test_a_client_that_gives_a_request_up_ends_it() -> None:
    async with served() as (engine, client, _):
        first, second = client(), client()
        stream = await begun(first, ask("row"))
        await stream.aclose()  # type: ignore[attr-defined]
        assert engine.closed == ["row"]
        engine.gate.set()
        await second.start()
        assert not await second.holds("row-1")
        assert await text(second, ask("row")) == "ab"
        assert engine.began == ["row", "row"]


async def test_requests_without_a_key_end_with_their_connection() -> None:
    async with served() as (engine, client, _):
        first = client()
        await begun(first, ask("row", ""))
        await first.shutdown()
        while engine.closed != ["row"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_failure_is_not_kept() -> None:
    async with served() as (engine, client, _):
        engine.gate.set()
        first = client()
        await first.start()
        for _ in range(2):
            with pytest.raises(EngineError, match="it failed"):
                await text(first, ask("bad"))
        assert engine.began == ["bad", "bad"] and not await first.holds("row-1")


async def test_a_closed_server_ends_what_has_no_client() -> None:
    async with served() as (engine, client, server):
        first = client()
        await begun(first, ask("row"))
        await first.shutdown()
        await server.close()
        assert engine.closed == ["row"]


class Source:
    """Answers at once, with a text of the prompt's length in bytes."""

    def __init__(self) -> None:
        self.began = 0

    async def generate(self, request: GenRequest, waited_s: float) -> AsyncIterator[GenChunk]:
        self.began += 1
        size = len(request.prompt)
        yield GenChunk(request.request_id, [1] * size, "x" * size, "length", usage=TokenUsage(size, size))


async def taken(kept: KeptStreams, request: GenRequest) -> int:
    """Returns the length of the answer's text, once the engine's stream has ended, which it does after its last
    chunk.
    """
    async with aclosing(kept.generate(request, 0.0, lambda: False)) as stream:
        length = sum([len(chunk.text) async for chunk in stream])
    while kept._running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return length


async def test_answers_are_kept_for_a_time_and_within_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    source = Source()
    kept = KeptStreams(source.generate, lambda: now_s)
    for name in ("a", "b"):
        await taken(kept, ask("x" * 100, name))
        now_s += 10
    assert kept.holds("a") and kept.holds("b")
    now_s = KEPT_S
    assert not kept.holds("a") and kept.holds("b")
    monkeypatch.setattr(kept_streams, "MAX_BYTES", 40 * 1000)
    for name in ("c", "d"):
        await taken(kept, ask("x" * 600, name))
    assert [kept.holds(name) for name in ("b", "c", "d")] == [False, False, True]


@pytest.mark.parametrize("logprobs", [None, 3])
async def test_an_answer_that_is_too_long_to_be_replayed_at_once_is_not(
    monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_ENTRIES", 100)
    source = Source()
    kept = KeptStreams(source.generate)
    for length, runs in ((25, 1), (26, 2 if logprobs else 1), (101, 2)):
        source.began = 0
        for _ in range(2):
            assert await taken(kept, ask("x" * length, f"row-{length}", logprobs=logprobs)) == length
        assert source.began == runs


def test_the_chunks_of_a_sample_are_joined_with_their_log_probabilities() -> None:
    marks = [(TokenLogprobs(token, -1.0, 1),) for token in (1, 2)]
    prompt = (None, TokenLogprobs(7, -2.0, 3))
    usage = TokenUsage(2, 4)
    chunks = [
        GenChunk("q", [1], "a", index=0, logprobs=marks[0], prompt_logprobs=prompt),
        GenChunk("q", [5], "x", "stop", index=1, usage=None),
        GenChunk("q", [2], "b", "length", index=0, logprobs=marks[1], usage=usage),
    ]
    last = GenChunk("q", [1, 2], "ab", "length", usage, None, 0, (*marks[0], *marks[1]), prompt)
    assert joined(chunks) == [chunks[1], last]


async def test_a_client_that_asks_for_the_rest_of_a_lost_stream_gets_it() -> None:
    """The lost stream still runs under the same id."""
    async with served() as (engine, client, _):
        first, second = client(), client()
        await begun(first, ask("row"))
        await first.shutdown()
        await second.start()
        rest = asyncio.create_task(text(second, replace(ask("row"), resume=(SampleProgress((1,)),))))
        while engine.began != ["row", "row"]:  # noqa: ASYNC110  # the engine is not told
            await asyncio.sleep(0.01)
        engine.gate.set()
        assert await rest == "ab"  # the engine of this test always says both
