"""Chunks that the engine's thread sends itself arrive whole and in order, however slowly the client reads."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.actors.engine.conformance.asking import slow_steps

from raytide.actors.engine import EngineConfig, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.remote import server as server_module
from raytide.actors.engine.backends.remote import wire
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.direct_output import DirectOutput, DirectStream
from raytide.actors.engine.backends.remote.fair_admission import FairAdmission
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.backends.remote.wire import Kind
from raytide.actors.engine.types import GenChunk, TokenUsage

TIMEOUT_S = 120.0
TOKENS = 100
LONG = 240
"""Tokens of a request that has not ended when a command reaches the engine."""


async def no_problem() -> None:
    return None


async def served(model_dir: Path, **options: Any) -> tuple[NativeEngine, EngineServer, int]:
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir), **options))
    server = EngineServer(engine, await engine.start(), "secret", problem=no_problem)
    return engine, server, await server.listen("127.0.0.1")


def request(name: str, tokens: int = TOKENS) -> GenRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenRequest(request_id=name, prompt=[1, 2, 3, len(name)], sampling=sampling)


async def text_of(engine: Any, asked: GenRequest) -> tuple[list[int], str]:
    tokens, text = [], ""
    async for chunk in engine.generate(asked):
        tokens += chunk.token_ids
        text += chunk.text
    return tokens, text


async def test_only_the_ends_of_a_request_pass_the_event_loop(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, server, port = await served(model_dir)
    client = RemoteEngine("127.0.0.1", port, "secret")
    await client.start()
    looped: list[GenChunk] = []
    add = server_module._Connection._add
    monkeypatch.setattr(
        server_module._Connection, "_add", lambda self, stream, chunk: (looped.append(chunk), add(self, stream, chunk))
    )
    step = EngineCore.step

    def paced(core: EngineCore) -> object:
        """Begins once the loop has written what is its own; it would write the next chunks too while it is late."""
        until_s = time.monotonic() + TIMEOUT_S
        while any(each.given != each.written for each in list(server.direct._streams.values())):
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", paced)
    async with asyncio.timeout(TIMEOUT_S):
        asked = [request("a" * count, LONG) for count in (1, 2, 3)]
        answers = await asyncio.gather(*(text_of(client, each) for each in asked))
        assert len(looped) < 3 * LONG / 2
        assert answers == [await text_of(engine, request("b" * count, LONG)) for count in (1, 2, 3)]
    await client.shutdown()
    await server.close()
    await engine.shutdown()


async def test_a_slow_reader_gets_every_message_whole(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receive buffer holds less than a message, and the event loop writes statuses between the engine's chunks."""
    monkeypatch.setattr(wire, "STATUS_PERIOD_S", 0.001)
    monkeypatch.setattr(wire, "NEWS_PERIOD_S", 0.001)
    made = server_module._Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        made(self, transport)

    cut = []
    send_now = server_module._Connection.send_now

    def counting(self: Any, packed: bytes) -> bool:
        sent = send_now(self, packed)
        cut.append(bool(self._cut_off) or not sent)
        return sent

    monkeypatch.setattr(server_module._Connection, "connection_made", connection_made)
    monkeypatch.setattr(server_module._Connection, "send_now", counting)
    engine, server, port = await served(model_dir, max_running=64)
    names = [f"{number:>{number + 1}}" for number in range(40)]
    expected = {name: await text_of(engine, request(name)) for name in names}
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.sendall(wire.pack([Kind.OPEN, wire.VERSION, "secret"]))
    for key, name in enumerate(names):
        client.sendall(wire.pack([Kind.GENERATE, key, wire.pack_request(request(name)), 0.0, b"", None]))
    unpacker, answers, ended = wire.unpacker(), {name: ([], "") for name in names}, 0
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        while not any(cut):  # noqa: ASYNC110 (until the buffers are full)
            await asyncio.sleep(0.01)
        while ended < len(names):
            unpacker.feed(await loop.sock_recv(client, 700))
            for kind, *rest in unpacker:
                assert kind in (Kind.HELLO, Kind.STATUS, Kind.CHUNKS), (kind, rest)
                for key, packed in rest[0] if kind == Kind.CHUNKS else []:
                    chunk = wire.unpack_chunk("", packed)
                    tokens, text = answers[names[key]]
                    answers[names[key]] = tokens + chunk.token_ids, text + chunk.text
                    ended += chunk.usage is not None
    client.close()
    await server.close()
    await engine.shutdown()
    assert answers == expected


class AnyTiming(RuleBasedStateMachine):
    """The engine's thread and the event loop take turns in any order; each chunk is numbered by its text."""

    def __init__(self) -> None:
        super().__init__()
        self.output = DirectOutput()
        self.sent: dict[int, list[int]] = {}
        self.accepts = True
        self.queued: list[tuple[DirectStream, list[Any]]] = []
        self.made: dict[str, int] = {}
        self.streams: dict[str, DirectStream] = {}

    def send_now(self, packed: bytes) -> bool:
        if self.accepts:
            unpacker = wire.unpacker()
            unpacker.feed(packed)
            for _, chunks, _ in unpacker:
                self.write(chunks)
        return self.accepts

    def write(self, chunks: list[list[Any]]) -> None:
        for key, packed in chunks:
            self.sent[key].append(int(packed[2]))

    @rule()
    def open(self) -> None:
        name = str(len(self.streams))
        self.streams[name] = DirectStream(self, len(self.streams))
        self.sent[len(self.sent)], self.made[name] = [], 0
        self.output.open(name, self.streams[name])

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        outputs = []
        for name, count in self.made.items():
            if data.draw(st.booleans()):
                self.made[name] += 1
                usage = TokenUsage(1, 1) if data.draw(st.integers(0, 9)) == 0 else None
                outputs.append(GenChunk(name, [1], str(count), usage=usage))
        for chunk in self.output.take(outputs):
            self.queued.append((self.streams[chunk.request_id], wire.pack_chunk(chunk)))

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if self.streams:
            self.output.begin(data.draw(st.sampled_from(sorted(self.streams))))

    @rule(accepts=st.booleans())
    def buffer(self, accepts: bool) -> None:
        self.accepts = accepts

    @rule(count=st.integers(1, 5))
    def loop_writes(self, count: int) -> None:
        written, self.queued = self.queued[:count], self.queued[count:]
        for stream, packed in written:
            self.write([[stream.key, packed]])
            stream.written += 1

    @invariant()
    def no_chunk_overtakes_another(self) -> None:
        for numbers in self.sent.values():
            assert numbers == list(range(len(numbers)))


TestAnyTiming = AnyTiming.TestCase


def test_a_request_id_in_use_keeps_its_stream() -> None:
    output = DirectOutput()
    refuse: Callable[[bytes], bool] = lambda packed: False  # noqa: E731
    sender = type("Sender", (), {"send_now": staticmethod(refuse)})()
    first, second = DirectStream(sender, 1), DirectStream(sender, 2)
    output.open("r", first)
    output.open("r", second)
    output.close("r", second)
    output.take([GenChunk("r", [1], "x")])
    assert (first.given, second.given) == (1, 0)


async def test_a_request_taken_out_for_another_team_goes_on_and_is_counted_whole(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = asyncio.Event()
    preempt = FairAdmission._preempt
    monkeypatch.setattr(FairAdmission, "_preempt", lambda self, victim: (preempt(self, victim), preempted.set()))
    engine, server, port = await served(model_dir, max_running=4)
    client = RemoteEngine("127.0.0.1", port, "secret")
    await client.start()
    names = ("a", "bb", "ccc", "dddd", "eeeee")
    async with asyncio.timeout(TIMEOUT_S):
        expected = {name: await text_of(engine, request(name, LONG)) for name in names}
        with slow_steps():
            heavy = {name: asyncio.create_task(text_of(client, request(name, LONG))) for name in names[:4]}
            while sum(bool(stream.sent) for stream in server.direct._streams.values()) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await engine.pause()
        light = asyncio.create_task(text_of(client, replace(request("eeeee", LONG), team="light")))
        await preempted.wait()
        await engine.resume()
        assert {name: await task for name, task in heavy.items()} | {"eeeee": await light} == expected
    await client.shutdown()
    await server.close()
    await engine.shutdown()
