"""Teams that share replicas through two gateways, which know nothing of each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.tenancy.conftest import Line

from raytide.actors.engine.backends.fake import FakeEngine

SecretOf = Callable[..., str]
PLACES = 4


@asynccontextmanager
async def two_gateways(line: Line, *engines: FakeEngine) -> AsyncIterator[tuple[Gateway, Gateway]]:
    async with running_gateway(requires_keys=True, api=line.api("g1")) as one:
        await one.deploy("m", *engines)
        async with running_gateway(requires_keys=True, api=line.api("g2"), beside=one) as other:

            async def is_connected() -> bool:
                return len(other.models.endpoint("m")[1].ready) == len(engines)

            await until(is_connected)
            yield one, other


async def ask(gateway: Gateway, secret: str, tokens: int, number: int = 0) -> httpx.Response:
    body: dict[str, Any] = {"model": "m", "prompt": f"once {number}", "max_tokens": tokens}
    headers = {"authorization": f"Bearer {secret}"}
    return await gateway.http.post("/v1/completions", json=body, headers=headers, timeout=60)


async def until_held(engines: tuple[FakeEngine, ...], gateway: Gateway, count: int) -> None:
    async def are_there() -> bool:
        stats = [server.admission.waiting for server in gateway.servers.values()]
        running = [(await engine.stats()).running for engine in engines]
        return sum(stats) + sum(running) >= count - len(engines)

    await until(are_there)


@pytest.mark.asyncio
async def test_a_light_team_is_answered_while_a_heavy_one_holds_all_places_through_both_gateways(
    line: Line, secret_of: SecretOf
) -> None:
    heavy, light = secret_of(team="heavy"), secret_of(team="light")
    engines = tuple(FakeEngine(tokens_per_s=20, max_running=PLACES) for _ in range(2))
    async with two_gateways(line, *engines) as gateways:
        flood = [asyncio.create_task(ask(gateways[n % 2], heavy, 4000, n)) for n in range(32)]
        await until_held(engines, gateways[0], 32)
        for number in range(8):
            answer = await ask(gateways[number % 2], light, 10, 100 + number)
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "tide tide ")
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()


@pytest.mark.asyncio
async def test_a_full_queue_refuses_the_team_that_fills_it(line: Line, secret_of: SecretOf) -> None:
    heavy, light = secret_of(team="heavy"), secret_of(team="light")
    engine = FakeEngine(tokens_per_s=20, max_running=PLACES, max_waiting=4)
    async with two_gateways(line, engine) as gateways:
        flood = [asyncio.create_task(ask(gateways[n % 2], heavy, 4000, n)) for n in range(40)]
        await until_held((engine,), gateways[0], PLACES + 4)
        lights = [asyncio.create_task(ask(gateways[n % 2], light, 10, 100 + n)) for n in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*lights)] == [200] * 3

        async def are_refused() -> bool:
            return sum(task.done() for task in flood) >= 40 - PLACES - 4

        await until(are_refused)
        refused = [task.result().json()["error"]["code"] for task in flood if task.done()]
        assert set(refused) == {"rate_limit_exceeded"}
        for task in flood:
            task.cancel()


@pytest.mark.asyncio
async def test_requests_that_wait_count_as_the_replica_s(line: Line, secret_of: SecretOf) -> None:
    """The controller scales by them, and routers choose by them."""
    secret = secret_of(team="a")
    async with two_gateways(line, FakeEngine(tokens_per_s=20, max_running=1)) as (gateway, _):
        asked = [asyncio.create_task(ask(gateway, secret, 1000, n)) for n in range(6)]

        async def are_reported() -> bool:
            (replica,) = gateway.models.endpoint("m")[1].connected
            status = replica.engine.status
            return status.stats is not None and status.stats.waiting == 5 and status.load["waiting"] == 5.0

        await until(are_reported)
        for task in asked:
            task.cancel()
