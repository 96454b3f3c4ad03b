"""Connections between an engine's process and its clients: how they end, and what does not end them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from raytide.actors.engine import FakeEngine
from raytide.actors.engine.backends.remote import client, server, wire
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Engine, Prompt
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import PLAIN_PROMPT, GenChunk, GenRequest, Message, PromptOptions, TokenLogprobs
from raytide.core.errors import ConflictError, EngineError, OverloadedError

TIMEOUT_S = 120.0


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[EngineServer, int]]:
    """Yields the server of an engine and its port."""
    found = EngineServer(engine, await engine.start(), "secret", problem=_no_problem)
    port = await found.listen("127.0.0.1")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield found, port
    finally:
        await found.close()
        await engine.shutdown()


async def _no_problem() -> None:
    return None


async def test_a_closed_server_ends_connections_that_have_not_said_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OPEN_TIMEOUT_S", 600.0)
    async with served(FakeEngine()) as (closed, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        other = RemoteEngine("127.0.0.1", port, "secret")
        await other.start()  # the server accepts in order
        await closed.close()
        assert await reader.read() == b""
        writer.close()


async def test_a_start_that_is_cancelled_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SILENCE_S", 600.0)
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            received.put_nowait(data)
        received.put_nowait(b"")
        writer.close()

    async with asyncio.timeout(TIMEOUT_S), await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listening:
        starting = asyncio.create_task(RemoteEngine("127.0.0.1", _port(listening), "secret").start())
        assert await received.get() != b""
        starting.cancel()
        assert await received.get() == b""


async def test_a_silence_that_is_found_once_may_be_of_this_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has stood still looks at its clock before it has read the statuses that came meanwhile."""
    monkeypatch.setattr(client, "_SILENCE_S", 50.0)
    async with served(FakeEngine()) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        connection = remote._connection
        assert connection is not None
        connection.status.at_s -= 100.0
        connection._watch()
        assert remote.is_connected
        while time.monotonic() - remote.status.at_s > 50.0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        connection._watch(was_silent=True)
        assert remote.is_connected
        await remote.shutdown()


async def test_a_process_that_stays_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SILENCE_S", 0.5)
    async with served(FakeEngine()) as (silent, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        assert silent._reporting is not None
        silent._reporting.cancel()
        while remote.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class _Engine(FakeEngine):
    """Records the tools and options of prompts, and has large embeddings."""

    tools: Sequence[Mapping[str, Any]] = ()
    options = PLAIN_PROMPT

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        self.tools, self.options = tools, options
        return await super().chat_prompt(messages)

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        return [[float(place)] * 64 for place, _ in enumerate(batch)]


async def test_numbers_of_tools_may_be_large() -> None:
    engine, tools = _Engine(), [{"parameters": {"properties": {"n": {"type": "integer", "maximum": 2**70}}}}]
    async with served(engine) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        await remote.chat_prompt([Message("user", "hello")], tools)
        await remote.shutdown()
    assert (engine.tools, engine.options) == (tools, PLAIN_PROMPT)


async def test_options_of_a_prompt_arrive() -> None:
    engine, options = _Engine(), PromptOptions({"documents": [{"n": 2**70}], "enable_thinking": False}, "open")
    async with served(engine) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        await remote.chat_prompt([Message("assistant", "hello")], (), options)
        await remote.shutdown()
    assert engine.options == options


async def test_many_embeddings_do_not_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1 << 17)
    async with served(_Engine()) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        vectors = await remote.embed([[1, 2]] * 1000)
        assert remote.is_connected
        await remote.shutdown()
    assert [len(vector) for vector in vectors] == [64] * 1000


async def test_a_call_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async with served(FakeEngine()) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        with pytest.raises(OverflowError):
            await remote.embed([[2**70]])
        assert remote._connected()._calls == {}
        await remote.shutdown()


@pytest.mark.parametrize("end", ["refused", "cancelled", "unreadable"])
async def test_a_prefill_that_gives_no_token_is_not_counted_as_unanswered(end: str) -> None:
    engine = FakeEngine()
    request = GenRequest(request_id="r", prompt="hello", sampling=SamplingParams(max_tokens=2))
    async with served(engine) as (counting, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        if end == "refused":
            await counting.admission.drain(0)
            with pytest.raises(OverloadedError):
                await remote.prefill(request)
        elif end == "cancelled":
            await engine.pause()
            asking = asyncio.create_task(remote.prefill(request))
            while not counting.counters._unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asking.cancel()
            while counting.counters._unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        else:
            with pytest.raises(EngineError):
                await remote._call("prefill", {})
        load = counting.counters.load(await counting.stats())
        assert counting.counters._unanswered == set()
        assert (load["requests"], load["late"]) == (float(end != "unreadable"), float(end == "refused"))
        await remote.shutdown()


def _port(listening: asyncio.Server) -> int:
    return int(listening.sockets[0].getsockname()[1])


async def test_a_client_hears_of_another_ones_request_before_the_next_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would choose the same replica until then. Its new tokens count until its first token."""
    monkeypatch.setattr(wire, "STATUS_PERIOD_S", 600.0)
    engine = FakeEngine()
    async with served(engine) as (_, port):
        sender, other = (RemoteEngine("127.0.0.1", port, "secret") for _ in range(2))
        await sender.start()
        await other.start()
        await engine.pause()
        request = GenRequest(request_id="r", prompt="hello", sampling=SamplingParams(max_tokens=2))
        stream = sender.generate(request, new_tokens=5)
        answering = asyncio.ensure_future(anext(stream))
        while other.status.pending_tokens != 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.resume()
        await answering
        await stream.aclose()  # type: ignore[attr-defined]
        async for _ in sender.generate(GenRequest(request_id="s", prompt="hi", sampling=SamplingParams(max_tokens=1))):
            pass
        while other.status.pending_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for each in (sender, other):
            await each.shutdown()


@pytest.mark.asyncio
async def test_an_adapter_stays_while_a_request_for_it_waits_for_its_turn() -> None:
    engine = FakeEngine(max_running=1, max_waiting=8)
    async with served(engine) as (serving, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        await remote.load_lora("a", "path")
        await engine.pause()

        async def answer(name: str, lora: str | None) -> str | None:
            sampling = SamplingParams(temperature=0, max_tokens=2)
            asked = GenRequest(request_id=name, prompt="hi", sampling=sampling, lora=lora)
            return [chunk async for chunk in remote.generate(asked)][-1].finish_reason

        asked = (("1", None), ("2", None), ("3", "a"))  # two go into the engine, the third waits
        answers = [asyncio.create_task(answer(*each)) for each in asked]
        while not serving.admission.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(ConflictError, match="adapter a"):
            await remote.unload_lora("a")
        await engine.resume()
        assert await asyncio.gather(*answers) == ["length"] * 3
        await remote.unload_lora("a")
        await remote.shutdown()


class ScoringEngine(FakeEngine):
    """Its answers have log probabilities of the prompt. As everywhere, the first token has none."""

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        scores = (None, *(TokenLogprobs(token, -1.0, 1, ()) for token in request.prompt[1:]))
        plain = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        async for chunk in super().generate(plain):
            yield replace(chunk, prompt_logprobs=scores)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_the_first_token_of_a_prompt_is_known_where_the_prompt_is_echoed() -> None:
    engine = ScoringEngine()
    async with served(engine) as (_, port):
        remote = RemoteEngine("127.0.0.1", port, "secret")
        await remote.start()
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        async for _ in remote.generate(GenRequest(request_id="1", prompt=[7, 8, 9], sampling=sampling)):
            pass
        assert [remote.token_bytes(token) for token in (7, 8, 9)] == [engine.token_bytes(token) for token in (7, 8, 9)]
        await remote.shutdown()
