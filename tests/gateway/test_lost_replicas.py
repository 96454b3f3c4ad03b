"""Requests live on when their replica dies, refuses or drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.gateway.conftest import Gateway, running_gateway, until

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.backends.remote.load_counters import LoadCounters, TrackedRequest
from raytide.actors.engine.types import GenChunk
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.replicas.replica_set import Replica
from raytide.gateway.replicas.routed_engine import RoutedEngine
from raytide.gateway.replicas.routing.router import Route

TOKENS = 100
TEXT = "tide " * (TOKENS // 5)


async def ask(gateway: Gateway, **more: Any) -> tuple[int, str, dict[str, Any]]:
    """Returns the status, the text and the usage of one stream."""
    body = {"model": "m", "prompt": "once", "max_tokens": TOKENS, "stream": True, **more}
    body["stream_options"] = {"include_usage": True}
    answer = await gateway.http.post("/v1/completions", json=body, timeout=60)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["code"], {}
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    if "error" in events[-1]:
        return 200, events[-1]["error"]["code"], {}
    assert answer.text.endswith("data: [DONE]\n\n")
    return 200, "".join(c["text"] for event in events for c in event["choices"]), events[-1]["usage"]


async def until_running(engine: FakeEngine, count: int) -> None:
    async def are_running() -> bool:
        return (await engine.stats()).running == count

    await until(are_running)


@pytest.mark.asyncio
async def test_streams_go_on_when_one_replica_after_the_other_dies() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("m", *(FakeEngine(tokens_per_s=100) for _ in range(3)))
        streams = [asyncio.create_task(ask(gateway, n=1 + number % 3)) for number in range(12)]
        for replica in ("m-0", "m-1"):
            await asyncio.sleep(0.25)
            await gateway.kill(replica)
        for number, (status, text, usage) in enumerate(await asyncio.gather(*streams)):
            samples = 1 + number % 3
            assert (status, sorted(text)) == (200, sorted(TEXT * samples))
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, TOKENS * samples)


@pytest.mark.asyncio
async def test_a_resumed_stream_is_not_counted_as_one_that_waited_for_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    track, waited = LoadCounters.track, []
    first_token, has_begun = Route.first_token, asyncio.Event()

    def noted(counters: LoadCounters, waited_s: float, new_tokens: int) -> TrackedRequest:
        waited.append(waited_s)
        return track(counters, waited_s, new_tokens)

    def received(route: Route) -> None:
        has_begun.set()
        first_token(route)

    monkeypatch.setattr(LoadCounters, "track", noted)
    monkeypatch.setattr(Route, "first_token", received)
    async with running_gateway() as gateway:
        await gateway.deploy("m", FakeEngine(tokens_per_s=100))
        stream = asyncio.create_task(ask(gateway))
        await asyncio.wait_for(has_begun.wait(), 60)
        await gateway.kill("m-0")
        await gateway.deploy("m", FakeEngine())
        assert (await stream)[:2] == (200, TEXT)
    assert len(waited) == 2
    assert waited[0] > 0.0 == waited[1]


@pytest.mark.asyncio
async def test_requests_wait_for_a_replacement_when_the_last_replica_dies() -> None:
    async with running_gateway() as gateway:
        engine = FakeEngine(tokens_per_s=50)
        await gateway.deploy("m", engine)
        streams = [asyncio.create_task(ask(gateway)) for _ in range(4)]
        await until_running(engine, 4)
        await gateway.kill("m-0")
        replicas = gateway.models.endpoint("m")[1]

        async def are_waiting() -> bool:
            return replicas.waiting == 4

        await until(are_waiting)
        await gateway.deploy("m", FakeEngine(tokens_per_s=100))
        assert {text for _, text, _ in await asyncio.gather(*streams)} == {TEXT}


@pytest.mark.asyncio
async def test_streams_that_have_begun_wait_for_a_replacement_however_many_they_are() -> None:
    """A replica may hold more requests than may wait: its engine's own limits count there."""
    async with running_gateway() as gateway:
        engine = FakeEngine(tokens_per_s=50)
        await gateway.deploy("m", engine, max_ongoing=1)
        streams = [asyncio.create_task(ask(gateway)) for _ in range(4)]

        async def have_begun() -> bool:
            return (await engine.stats()).generated_tokens >= 40

        await until(have_begun)
        await gateway.kill("m-0")
        replicas = gateway.models.endpoint("m")[1]

        async def is_full() -> bool:
            return replicas.waiting >= 1

        await until(is_full)
        assert (await ask(gateway))[0] == 429, "a new request does not wait"
        await gateway.deploy("m", FakeEngine(tokens_per_s=100), max_ongoing=1)
        assert [text for _, text, _ in await asyncio.gather(*streams)] == [TEXT] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("is_recreated", [False, True])
async def test_streams_of_a_deleted_endpoint_finish_and_end_with_its_replicas(is_recreated: bool) -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("m", FakeEngine(tokens_per_s=100), FakeEngine(tokens_per_s=1))
        replicas, servers = gateway.models.endpoint("m")[1], dict(gateway.servers)
        streams = [asyncio.create_task(ask(gateway, prompt=f"{number}", max_tokens=20)) for number in range(8)]

        async def are_on_both() -> bool:
            return all([(await server.engine.stats()).steps > 0 for server in servers.values()])

        await until(are_on_both)
        if is_recreated:
            gateway.listing["m"] = EndpointEntry(gateway.listing["m"].spec, 2.0, {})
        else:
            gateway.listing.clear()
        gateway.models.update(gateway.listing)
        await asyncio.wait(streams, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for server in servers.values():
            await server.close()
        answers = {(await asyncio.wait_for(stream, 60))[1] for stream in streams}
        assert answers == {TEXT[:20], "not_found"}

        async def are_gone() -> bool:
            return not replicas.connected

        await until(are_gone)


@pytest.mark.asyncio
async def test_requests_that_wait_for_a_replica_are_refused_when_their_endpoint_is_deleted() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("m", FakeEngine())
        replicas = gateway.models.endpoint("m")[1]
        await gateway.kill("m-0")
        waiting = asyncio.create_task(ask(gateway))

        async def is_waiting() -> bool:
            return replicas.waiting == 1

        await until(is_waiting)
        gateway.listing.clear()
        gateway.models.update(gateway.listing)
        assert (await asyncio.wait_for(waiting, 60))[:2] == (404, "not_found")


@pytest.mark.asyncio
async def test_a_full_replica_s_requests_go_to_another_and_are_refused_when_all_are_full() -> None:
    async with running_gateway() as gateway:
        engines = [FakeEngine(tokens_per_s=50, max_running=1, max_waiting=1) for _ in range(2)]
        await gateway.deploy("m", *engines)
        streams = [asyncio.create_task(ask(gateway)) for _ in range(8)]
        results = await asyncio.gather(*streams)
        assert sorted(status for status, _, _ in results) == [200] * 4 + [429] * 4
        assert {text for status, text, _ in results if status == 429} == {"rate_limit_exceeded"}


@pytest.mark.asyncio
async def test_a_draining_replica_gets_no_more_and_what_it_cannot_finish_goes_on_elsewhere() -> None:
    async with running_gateway() as gateway:
        engines = [FakeEngine(tokens_per_s=50) for _ in range(2)]
        await gateway.deploy("m", *engines)
        streams = [asyncio.create_task(ask(gateway)) for _ in range(6)]
        await until_running(engines[0], 3)
        draining = asyncio.create_task(gateway.servers["m-0"].drain(0.5))
        replicas = gateway.models.endpoint("m")[1]

        async def is_known() -> bool:
            return [replica.name for replica in replicas.ready] == ["m-1"]

        await until(is_known)
        late = asyncio.create_task(ask(gateway, max_tokens=5))
        assert (await late)[1] == "tide "
        assert (await engines[0].stats()).running + (await engines[0].stats()).waiting <= 3
        assert {text for _, text, _ in await asyncio.gather(*streams)} == {TEXT}
        assert not await draining


@pytest.mark.asyncio
async def test_the_request_that_kills_engines_is_refused_and_takes_no_other_with_it() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("m", *(FakeEngine(tokens_per_s=100, die_on="poison") for _ in range(4)))
        streams = [asyncio.create_task(ask(gateway)) for _ in range(12)]
        await asyncio.sleep(0.2)
        assert (await ask(gateway, prompt="poison"))[:2] == (503, "engine_dead")
        assert {text for _, text, _ in await asyncio.gather(*streams)} == {TEXT}


@pytest.mark.asyncio
async def test_a_request_that_waits_for_its_turn_is_not_blamed_for_a_death_it_had_no_part_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The suspects of one death have chosen the next replica already when the one that goes first kills it."""
    choose, generate = RoutedEngine._choose, Replica.generate
    chosen: list[str] = []
    asked: list[str] = []

    async def noted(engine: RoutedEngine, *args: Any, **options: Any) -> tuple[Replica, Route]:
        replica, route = await choose(engine, *args, **options)
        chosen.append(replica.name)
        return replica, route

    def counted(replica: Replica, *args: Any, **options: Any) -> AsyncIterator[GenChunk]:
        asked.append(replica.name)
        return generate(replica, *args, **options)

    async def until_chosen(replica: str) -> None:
        async def is_chosen() -> bool:
            return chosen[-1:] == [replica]

        await until(is_chosen)

    monkeypatch.setattr(RoutedEngine, "_choose", noted)
    monkeypatch.setattr(Replica, "generate", counted)
    async with running_gateway() as gateway:
        await gateway.deploy("m", FakeEngine(tokens_per_s=0.01))
        stream = asyncio.create_task(ask(gateway, max_tokens=5))
        await until_chosen("m-0")
        server, replicas = gateway.models.endpoint("m")

        async def is_lost() -> bool:
            return not replicas.connected

        async with server.engine._suspects:
            await gateway.kill("m-0")
            await gateway.deploy("m", FakeEngine())
            await until_chosen("m-1")
            await gateway.kill("m-1")
            await until(is_lost)
        await gateway.deploy("m", FakeEngine())
        assert (await stream)[:2] == (200, "tide ")
        assert asked == ["m-0", "m-2"]


@pytest.mark.asyncio
async def test_a_request_that_fails_alone_is_not_repeated() -> None:
    async with running_gateway() as gateway:
        engines = [FakeEngine(fail_on="bad") for _ in range(2)]
        await gateway.deploy("m", *engines)
        assert (await ask(gateway, prompt="bad"))[:2] == (500, "engine")
        assert sum([(await engine.stats()).failed for engine in engines]) == 1


@pytest.mark.asyncio
async def test_a_client_that_leaves_frees_its_place() -> None:
    engine = FakeEngine(tokens_per_s=50)
    async with running_gateway() as gateway:
        await gateway.deploy("m", engine)
        leaving = asyncio.create_task(ask(gateway, max_tokens=4000))
        await until_running(engine, 1)
        leaving.cancel()
        await until_running(engine, 0)
