"""Clients are billed once for what they see, while replicas and gateways are killed under their streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.tenancy.conftest import Line

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import EngineInfo, GenChunk, GenRequest, TokenUsage
from raytide.control.api.services import tenancy as tenancy_service
from raytide.core.objects.api_key import TokenPrice, UsageRow
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.state import Store
from raytide.core.state.tenancy.usage import UsageFilter
from raytide.gateway.tenancy import budgets

SecretOf = Callable[..., str]
PRICE = TokenPrice(prompt=1.5, cached=0.1, completion=2.7)
TOKENS = 80

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def endpoint(store: Store) -> None:
    store.save_endpoint(ServeSpec(name="m", model="/m", price=PRICE), "ana", 1.0)


class Client:
    """Sends requests of prompts of different lengths, by which their rows are found, and notes each whole answer."""

    def __init__(self, secrets: list[str]) -> None:
        self.usages: dict[int, dict[str, Any]] = {}
        self.asked = 0
        self._secrets = secrets

    async def ask(self, gateway: Gateway, **more: object) -> httpx.Response:
        self.asked += 1
        number, prompt = self.asked, "x" * (10 + self.asked)
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "n": 1 + number % 2, **more}
        if body.get("stream", number % 3):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {self._secrets[number % len(self._secrets)]}"}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers, timeout=60)
        if answer.status_code == 200:
            self.usages[len(prompt)] = _usage(answer.text) if body.get("stream") else answer.json()["usage"]
        return answer


def _usage(events: str) -> dict[str, Any]:
    assert events.endswith("data: [DONE]\n\n"), events[-200:]
    usage: dict[str, Any] = json.loads(events.split("data: ")[-2])["usage"]
    return usage


def rows_of(store: Store) -> list[UsageRow]:
    return list(store.tenancy.usage.rows(UsageFilter(), limit=1000)[0])


def check(store: Store, client: Client, *, unanswered: int = 0) -> None:
    """Each whole answer has one row with its tokens; the sums are those of the keys; nothing stays reserved."""
    rows = {row.prompt_tokens: row for row in rows_of(store) if row.status == 200}
    for prompt_tokens, usage in client.usages.items():
        row = rows[prompt_tokens]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        assert (row.completion_tokens, row.cached_tokens) == (usage["completion_tokens"], cached)
    others = [row for row in rows_of(store) if row.prompt_tokens not in client.usages]
    assert len(rows) + len(others) == len(rows_of(store)), "a request has two rows"
    assert len({row.prompt_tokens for row in others}) == len(others) <= unanswered
    for key in {row.key for row in rows_of(store)}:
        own = [row for row in rows_of(store) if row.key == key]
        pico = sum(PRICE.cost_pico_usd(row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in own)
        billed = sum(row.cost_micro_usd for row in own)
        assert (billed, sum(row.waived_micro_usd for row in own)) == ((pico + 500_000) // 1_000_000, 0)
        (group,) = [each for each in store.tenancy.usage.sums(UsageFilter(), "key") if each.group == key]
        assert (group.requests, group.cost_micro_usd) == (len(own), billed)
        spending = store.tenancy.spending.spent([key], own[0].at_s)[key]
        assert (spending.month, spending.life, spending.reserved) == (billed, billed, 0)
    assert store.tenancy.audit.verify().is_whole


async def test_requests_whose_replicas_are_killed_are_billed_once_for_what_the_client_got(
    line: Line, store: Store, secret_of: SecretOf
) -> None:
    client = Client([secret_of(team="a", budget={"usd": 1}), secret_of(team="b")])
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("m", *(FakeEngine(tokens_per_s=100, max_running=8) for _ in range(3)))
        asked = [asyncio.create_task(client.ask(gateway)) for _ in range(40)]
        for replica in ("m-0", "m-1"):
            await asyncio.sleep(0.3)
            await gateway.kill(replica)
        line.lost_path, line.answers_lost = "/v1/gateway/usage", True  # reports arrive twice
        answers = await asyncio.gather(*asked)
        line.answers_lost = False
    assert [answer.status_code for answer in answers] == [200] * 40
    assert len(rows_of(store)) == 40
    check(store, client)


async def test_requests_that_are_taken_out_for_another_team_are_billed_once(
    line: Line, store: Store, secret_of: SecretOf
) -> None:
    client, light = Client([secret_of(team="heavy", budget={"usd": 1})]), Client([secret_of(team="light")])
    light.asked = 100
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("m", FakeEngine(tokens_per_s=100, max_running=4))
        asked = [asyncio.create_task(client.ask(gateway)) for _ in range(12)]
        await asyncio.sleep(0.3)
        for _ in range(6):
            assert (await light.ask(gateway, max_tokens=5)).status_code == 200
        await asyncio.gather(*asked)
    client.usages |= light.usages
    assert len(client.usages) == len(rows_of(store)) == 18
    check(store, client)


def kill(gateway: Gateway, line: Line) -> None:
    """Ends a gateway as SIGKILL would, for everybody else: nothing that it still does is seen."""
    reporter = gateway.tenancy.reporter
    line.is_cut = True
    assert reporter._task is not None
    reporter._task.cancel()
    reporter.report = lambda request: None  # type: ignore[method-assign]


async def test_what_a_killed_gateway_had_answered_is_billed_by_the_next_one_and_its_reservations_end(
    line: Line, store: Store, secret_of: SecretOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client([secret_of(team="a", budget={"usd": 1}), secret_of(team="b")])
    shared, other_line = tmp_path / "shared", Line(store, tmp_path)
    shared.mkdir()
    async with running_gateway(requires_keys=True, api=other_line.api("g2"), shared=shared) as other:
        engine = FakeEngine(tokens_per_s=100, max_running=64)
        await other.deploy("m", engine)
        async with running_gateway(requires_keys=True, api=line.api("g1"), beside=other, shared=shared) as victim:

            async def is_connected() -> bool:
                return bool(victim.models.endpoint("m")[1].ready)

            async def are_running() -> bool:
                return (await engine.stats()).running == len([*broken, *beside])

            await until(is_connected)
            before = [asyncio.create_task(client.ask(victim)) for _ in range(10)]
            await asyncio.gather(*before)
            beside: list[asyncio.Task[httpx.Response]] = []
            broken = [asyncio.create_task(client.ask(victim, max_tokens=3000)) for _ in range(8)]
            await until(are_running)  # so they have their reservations
            monkeypatch.setattr(budgets, "_PATIENCE_S", 2.0)
            line.is_cut = True  # they are answered, and not all are reported yet
            unreported = [asyncio.create_task(client.ask(victim, max_tokens=5)) for _ in range(11, 21, 2)]
            await asyncio.gather(*unreported)
            beside += [asyncio.create_task(client.ask(other)) for _ in range(8)]
            await until(are_running)
            kill(victim, line)
            for task in broken:
                task.cancel()
        await asyncio.gather(*beside)
    answered = len(client.usages)
    assert store.tenancy.spending.spent(["key-1"], time.time())["key-1"].reserved > 0
    assert len(rows_of(store)) < answered
    monkeypatch.setattr(tenancy_service, "SILENCE_S", 0.0)
    monkeypatch.setattr(budgets, "_PATIENCE_S", 60.0)
    async with running_gateway(requires_keys=True, api=Line(store, tmp_path).api("g3"), shared=shared) as after:
        await after.deploy("m", FakeEngine())
        client.asked += client.asked % 2  # with the key that has a budget
        client.asked += 1
        await client.ask(after)
    assert len(client.usages) == answered + 1
    check(store, client, unanswered=8)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_full_replicas_refuse_costs_nothing(
    line: Line, store: Store, secret_of: Callable[..., str], stream: bool
) -> None:
    client = Client([secret_of(budget={"usd": 1})])
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("m", FakeEngine(max_waiting=0))
        assert (await client.ask(gateway, stream=stream)).status_code == 429
    (row,) = rows_of(store)
    assert (row.status, row.prompt_tokens, row.cost_micro_usd) == (429, 0, 0)


class Ranked(FakeEngine):
    """Sends the best of three samples of two tokens each."""

    async def start(self) -> EngineInfo:
        info = await super().start()
        return dataclasses.replace(info, features=info.features | {"best_of"})

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:  # type: ignore[override]
        yield GenChunk(request.request_id, [1, 2], "ab", "length", TokenUsage(len(request.prompt), 6))


async def test_samples_that_best_of_drops_are_billed_as_the_answers_usage_says(
    line: Line, store: Store, secret_of: Callable[..., str]
) -> None:
    client = Client([secret_of(budget={"usd": 1})])
    async with running_gateway(requires_keys=True, api=line.api()) as gateway:
        await gateway.deploy("m", Ranked())
        answer = await client.ask(gateway, n=1, best_of=3, max_tokens=2, stream=False)
        assert answer.json()["usage"]["completion_tokens"] == 6
    check(store, client)
