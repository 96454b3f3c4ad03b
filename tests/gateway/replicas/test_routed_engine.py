"""Requests through a gateway's engine to replicas behind real sockets: which replica answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from raytide.actors.engine import FakeEngine, SamplingParams
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Prompt
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.errors import OverloadedError
from raytide.gateway.replicas.replica_set import ReplicaSet
from raytide.gateway.replicas.routed_engine import RoutedEngine

TIMEOUT_S = 60.0
PROMPT = list(range(64))


async def _no_problem() -> None:
    return None


@asynccontextmanager
async def replicas(count: int = 3, **options: object) -> AsyncIterator[dict[str, ReplicaAddress]]:
    engines = [FakeEngine(**{"max_running": 8, **options}) for _ in range(count)]  # type: ignore[arg-type]
    servers = [EngineServer(engine, await engine.start(), "secret", problem=_no_problem) for engine in engines]
    addresses = {}
    for at, server in enumerate(servers):
        addresses[f"r{at}"] = ReplicaAddress("127.0.0.1", await server.listen("127.0.0.1"), "secret")
    try:
        yield addresses
    finally:
        for server, engine in zip(servers, engines, strict=True):
            await server.close()
            await engine.shutdown()


@asynccontextmanager
async def gateway(addresses: dict[str, ReplicaAddress]) -> AsyncIterator[RoutedEngine]:
    found = ReplicaSet("e")
    found.update(addresses)
    try:
        await until(lambda: len(found.ready) == len(addresses))
        yield RoutedEngine(found)
    finally:
        await found.close()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(int(100 * TIMEOUT_S)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited {TIMEOUT_S:g} s")


def ask(name: str, prompt: list[int], *, session: str = "", max_tokens: int = 4) -> GenRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return GenRequest(request_id=name, prompt=prompt, sampling=sampling, session=session)


async def answer(engine: RoutedEngine, request: GenRequest) -> list[GenChunk]:
    async with asyncio.timeout(TIMEOUT_S):
        return [chunk async for chunk in engine.generate(request)]


async def test_the_next_turn_of_a_chat_goes_where_the_last_one_was() -> None:
    async with replicas() as addresses, gateway(addresses) as engine:
        for chat in range(6):
            prompt, homes = [chat] * 64, set()
            for turn in range(4):
                chunks = await answer(engine, ask(f"{chat}-{turn}", prompt))
                homes.add(chunks[-1].replica)
                prompt = prompt + [token for chunk in chunks for token in chunk.token_ids] + [turn] * 20
            assert len(homes) == 1
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.cached_tokens > 64


async def test_another_gateway_learns_where_a_prefix_is_cached() -> None:
    async with replicas() as addresses, gateway(addresses) as one, gateway(addresses) as other:
        await answer(other, ask("a", [9] * 64))
        home = (await answer(one, ask("b", PROMPT)))[-1].replica
        states = [each.routing_state() for each in other._replicas.ready]

        def is_known() -> bool:
            route = other._replicas.router.route([*PROMPT, 1], states)
            route.end()
            return (route.replica, route.cached_tokens) == (home, len(PROMPT))

        await until(is_known)


async def test_a_burst_of_one_prompt_spreads() -> None:
    async with replicas(tokens_per_s=50.0) as addresses, gateway(addresses) as engine:
        await answer(engine, ask("first", PROMPT))
        sent = [answer(engine, ask(f"{at}", [*PROMPT, at])) for at in range(24)]
        homes = Counter(chunks[-1].replica for chunks in await asyncio.gather(*sent))
        assert min(homes[name] for name in addresses) >= 4


async def test_a_session_stays_on_its_replica() -> None:
    async with replicas() as addresses, gateway(addresses) as engine:
        homes = {
            session: {
                (await answer(engine, ask(f"{session}{at}", [at, ord(session)] * 32, session=session)))[-1].replica
            }
            for session in "abcdef"
            for at in range(3)
        }
        assert all(len(each) == 1 for each in homes.values())
        assert len(set.union(*homes.values())) > 1


async def test_a_replica_that_is_silent_gets_nothing_while_others_answer() -> None:
    async with replicas() as addresses, gateway(addresses) as engine:
        found = engine._replicas
        silent = (await answer(engine, ask("a", PROMPT)))[-1].replica
        for each in found.connected:
            each.engine.status.at_s = time.monotonic() - 2.0 * (each.name == silent)
        assert silent not in {each.name for each in found.ready}
        for each in found.ready:
            each.engine.status.at_s -= 2.0
        assert len(found.ready) == 3


async def test_a_replica_that_is_back_at_another_address_is_found_there() -> None:
    engines = [FakeEngine(), FakeEngine()]
    servers = [EngineServer(engine, await engine.start(), "secret", problem=_no_problem) for engine in engines]
    addresses = [ReplicaAddress("127.0.0.1", await server.listen("127.0.0.1"), "secret") for server in servers]
    async with gateway({"r0": addresses[0]}) as engine:
        await servers[0].close()
        engine._replicas.update({"r0": addresses[1]})
        await until(lambda: [each.engine._address[1] for each in engine._replicas.ready] == [addresses[1].port])
        engine._replicas.update({})
        await servers[1].close()
        await until(lambda: not engine._replicas._keepers)


@pytest.mark.parametrize("leaves", [False, True])
async def test_no_request_stays_counted(leaves: bool) -> None:
    async with replicas(tokens_per_s=200.0) as addresses, gateway(addresses) as engine:
        stream = engine.generate(ask("a", PROMPT, max_tokens=8))
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in stream:
                if leaves:
                    break
        await stream.aclose()  # type: ignore[attr-defined]
        for assigned in engine._replicas.router._assigned.values():
            assert (assigned.pending_tokens, len(assigned.in_flight), len(assigned.unanswered)) == (0, 0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_that_is_closed_has_left_its_engine(temperature: float) -> None:
    """Otherwise the id would still be in use there when the request is sent again."""
    async with replicas(count=1, tokens_per_s=50.0) as addresses, gateway(addresses) as engine:
        sampling = SamplingParams(temperature=temperature, max_tokens=1000)
        request = GenRequest(request_id="a", prompt=PROMPT, sampling=sampling)
        for _ in range(3):
            async with asyncio.timeout(TIMEOUT_S), aclosing(engine.generate(request)) as stream:  # type: ignore[type-var]
                assert await anext(stream)


async def test_equal_greedy_requests_are_computed_once_by_all_replicas_together() -> None:
    async with replicas(tokens_per_s=100.0) as addresses, gateway(addresses) as engine:
        sent = [answer(engine, ask(f"{at}", PROMPT, max_tokens=20)) for at in range(12)]
        texts = {"".join(chunk.text for chunk in chunks) for chunks in await asyncio.gather(*sent)}
        stats = [await each.engine.stats() for each in engine._replicas.ready]
        assert len(texts) == 1
        assert sum(each.generated_tokens for each in stats) == 20


class _Held(FakeEngine):
    """An engine that notes the requests that it has got."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=20.0)
        self.began: list[str] = []

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:  # type: ignore[override]
        self.began.append(request.rejoin_key)
        async for chunk in super().generate(request):
            yield chunk


async def test_a_row_that_a_killed_gateway_has_begun_goes_to_the_replica_that_has_it() -> None:
    """The next gateway asks for it before it has connections to all replicas."""
    engines = [_Held() for _ in range(4)]
    servers = [EngineServer(engine, await engine.start(), "secret", problem=_no_problem) for engine in engines]
    addresses = {}
    for at, server in enumerate(servers):
        addresses[f"r{at}"] = ReplicaAddress("127.0.0.1", await server.listen("127.0.0.1"), "secret")
    rows = [replace(ask(f"q{at}", [at] * 8), rejoin_key=f"row-{at}") for at in range(8)]
    async with gateway(addresses) as engine:
        running = [asyncio.create_task(answer(engine, row)) for row in rows]
        await until(lambda: sum(len(each.began) for each in engines) == len(rows))
        assert sum(bool(each.began) for each in engines) > 1
        await engine._replicas.close()  # the kill
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    found = ReplicaSet("e")
    found.update(addresses)
    routed = RoutedEngine(found)
    answers = await asyncio.gather(*(answer(routed, replace(row, may_be_running=True)) for row in rows))
    assert all(chunks[-1].usage is not None for chunks in answers)
    assert sorted(key for each in engines for key in each.began) == [row.rejoin_key for row in rows]
    await found.close()
    for server, held in zip(servers, engines, strict=True):
        await server.close()
        await held.shutdown()


@pytest.mark.asyncio
async def test_vectors_that_a_draining_replica_leaves_undone_come_from_another() -> None:
    servers: dict[FakeEngine, EngineServer] = {}
    drained: list[FakeEngine] = []

    class Draining(FakeEngine):
        """Drains in the middle of its first vectors, and refuses the rest as a native engine does."""

        async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
            if not drained:
                drained.append(self)
                await servers[self].drain(1.0)
                raise OverloadedError("the engine is draining or stopped.", hint="Retry on another replica.")
            assert self not in drained
            return await super().embed(batch, lora=lora)

    addresses = {}
    for at in range(2):
        engine = Draining()
        servers[engine] = EngineServer(engine, await engine.start(), "secret", problem=_no_problem)
        addresses[f"r{at}"] = ReplicaAddress("127.0.0.1", await servers[engine].listen("127.0.0.1"), "secret")
    try:
        async with gateway(addresses) as routed:
            assert len(await routed.embed([[1, 2], [3]])) == 2
    finally:
        for engine, server in servers.items():
            await server.close()
            await engine.shutdown()
