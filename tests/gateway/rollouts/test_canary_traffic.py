"""A gateway with two revisions of an endpoint: which one answers, and what a broken challenger costs users."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from fastapi import Request
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.test_hosted import BACKEND, hosted_gateway

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.base import Engine
from raytide.actors.serving.openai_api import respond
from raytide.actors.serving.openai_api.wire import CompletionRequest
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.rollout import RolloutReport
from raytide.gateway.replicas import routed_engine
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.registry.rollout.routes import RolloutRoute
from raytide.registry.rollout.traffic import TrafficSplit


async def begin(
    gateway: Gateway,
    challenger: Engine,
    *,
    percent: float = 100.0,
    shadow: float = 0.0,
    champion: Engine | None = None,
    **spec: object,
) -> None:
    """Deploys `chat` with a champion and a challenger, which has this share of the traffic."""
    await gateway.deploy("chat", champion or FakeEngine(reply="old "), **spec)
    address = await gateway.start("chat~2-0", challenger)
    second = EndpointEntry(ServeSpec(name="chat~2", model="/models/none", **spec), 1.0, {"chat~2-0": address}, 2)  # type: ignore[arg-type]
    split = TrafficSplit(endpoint="chat", champion=1, challenger=2, percent=percent, shadow_percent=shadow)
    route = RolloutRoute(number=7, challenger="chat~2", split=split)
    gateway.listing["chat"] = replace(gateway.listing["chat"], revision=1, rollout=route, challenger=second)
    gateway.models.update(gateway.listing)
    application = gateway.models._applications["chat~2"]

    async def is_ready() -> bool:
        return bool(application.replicas.ready) and application.server.is_described

    await until(is_ready)


async def ask(gateway: Gateway, prompt: str = "hello", **body: object) -> httpx.Response:
    answer = {"model": "chat", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, **body}
    return await gateway.http.post("/v1/chat/completions", json=answer)


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def counted(gateway: Gateway) -> dict[int, tuple[int, int, int, int]]:
    found = gateway.models.counted()
    return {each.revision: (each.requests, each.errors, each.started, each.late) for each in found}


async def test_the_challenger_answers_its_share_and_a_user_stays_with_a_revision() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new "), percent=30.0)
        answers = [await ask(gateway, user=f"user-{number}") for number in range(100)]
        again = [await ask(gateway, user=f"user-{number}") for number in range(100)]
        assert [text_of(each) for each in answers] == [text_of(each) for each in again]
        new = sum(text_of(each) == "new " for each in answers)
        assert 15 <= new <= 45
        assert {(text_of(each), each.headers["x-raytide-revision"]) for each in answers} == {
            ("old ", "1"),
            ("new ", "2"),
        }
        assert counted(gateway) == {1: (200 - 2 * new, 0, 200 - 2 * new, 0), 2: (2 * new, 0, 2 * new, 0)}
        names = [each["id"] for each in (await gateway.http.get("/v1/models")).json()["data"]]
        assert names == ["chat"], "a challenger is no model of its own"
        assert (await gateway.http.get("/v1/models/chat~2")).status_code == 404


async def test_the_champion_answers_what_the_challenger_fails() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", fail_on="hello"))
        assert text_of(await ask(gateway)) == "old "
        stream = await ask(gateway, stream=True)
        assert stream.headers["x-raytide-revision"] == "1"
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in stream.text
        assert text_of(await ask(gateway, "something else")) == "new "
        assert counted(gateway) == {1: (2, 0, 2, 0), 2: (3, 2, 1, 0)}


async def test_a_challenger_whose_engine_dies_fails_no_request() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", die_on="poison"))
        answers = [await ask(gateway, "poison" if number == 1 else "hello") for number in range(5)]
        assert [text_of(each) for each in answers] == ["new ", "old ", "old ", "old ", "old "]
        assert counted(gateway)[2][:2] == (5, 4), "without a replica it fails what it would have got"


async def test_what_the_challenger_wrongly_refuses_counts_against_it_and_what_both_refuse_does_not() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", max_model_len=64))
        assert text_of(await ask(gateway, "long " * 40)) == "old "
        assert counted(gateway)[2][:2] == (1, 1)
        assert (await ask(gateway, "long " * 4000)).status_code == 400
        assert counted(gateway) == {1: (1, 0, 1, 0), 2: (1, 1, 0, 0)}


async def test_a_full_challenger_is_no_broken_one() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", max_running=1, max_waiting=0, tokens_per_s=20.0))
        answers = await asyncio.gather(*(ask(gateway, f"hello {number}") for number in range(4)))
        assert {each.status_code for each in answers} == {200}
        assert counted(gateway)[2][1] == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_the_champion_answers_every_api_when_the_challenger_is_full(path: str) -> None:
    limit, prompt = ("max_tokens", "messages") if path == "/v1/messages" else ("max_output_tokens", "input")
    asked = {"model": "chat", limit: 4, prompt: [{"role": "user", "content": "hello"}]}
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", max_running=1, max_waiting=0))
        answer = await gateway.http.post(path, json=asked)
        assert (answer.status_code, answer.headers["x-raytide-revision"]) == (200, "1")
        assert counted(gateway)[2][1] == 0


async def test_late_first_tokens_count_even_before_they_come() -> None:
    async with running_gateway() as gateway:
        slow = FakeEngine(reply="new ", tokens_per_s=2.0)
        await begin(gateway, slow, replicas={"slo_ttft_s": 0.1})
        asking = asyncio.create_task(ask(gateway, max_tokens=2))

        async def is_late() -> bool:
            return counted(gateway)[2] == (0, 0, 1, 1)

        await until(is_late)
        assert (await asking).status_code == 200
        assert counted(gateway)[2] == (1, 0, 1, 1)


async def test_a_promoted_challenger_serves_without_a_gap_and_streams_of_the_old_one_end_as_they_began() -> None:
    async with running_gateway() as gateway:
        old = FakeEngine(reply="old ", tokens_per_s=20.0)
        await begin(gateway, FakeEngine(reply="new "), percent=0.0, champion=old)
        asking = asyncio.create_task(ask(gateway, max_tokens=20))

        async def runs() -> bool:
            return gateway.models._applications["chat"].replicas.connected[0].in_flight == 1

        await until(runs)
        promoted = gateway.listing["chat"].challenger
        assert promoted is not None
        gateway.listing["chat"] = replace(promoted, revision=2)
        gateway.models.update(gateway.listing)
        assert text_of(await ask(gateway, "another")) == "new "
        assert text_of(await asking) == "old " * 5
        assert gateway.models.endpoint("chat")[0].version == "r2"


async def test_requests_that_wait_for_a_dead_champion_go_to_the_promoted_one() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new "), percent=0.0)
        await gateway.kill("chat-0")
        asking = asyncio.create_task(ask(gateway))

        async def waits() -> bool:
            return gateway.models._applications["chat"].replicas.waiting == 1

        await until(waits)
        promoted = gateway.listing["chat"].challenger
        assert isinstance(promoted, EndpointEntry)
        gateway.listing["chat"] = replace(promoted, revision=2)
        gateway.models.update(gateway.listing)
        assert text_of(await asking) == "new "


async def test_a_stream_that_has_begun_stays_with_its_revision_or_ends_with_a_counted_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routed_engine, "_RESUME_S", 0.2)
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new ", tokens_per_s=20.0))
        asking = asyncio.create_task(ask(gateway, max_tokens=100, stream=True))

        async def has_begun() -> bool:
            return counted(gateway)[2][2] == 1

        await until(has_begun)
        server = gateway.servers["chat~2-0"]
        for connection in list(server._connections):
            connection._transport.abort()
        await server.close()
        answer = await asking
        assert '"error"' in answer.text
        assert answer.headers["x-raytide-revision"] == "2"
        assert counted(gateway) == {1: (0, 0, 0, 0), 2: (1, 1, 1, 0)}


async def test_the_counts_of_old_rollouts_are_forgotten_so_that_a_report_has_room_for_those_that_run() -> None:
    async with running_gateway() as gateway:
        await begin(gateway, FakeEngine(reply="new "))
        await ask(gateway)
        first = counted(gateway)
        running = gateway.listing["chat"]
        assert running.rollout is not None
        for number in range(100, 800):
            other = replace(running, spec=running.spec.model_copy(update={"name": "other"}), replicas={})
            assert running.challenger is not None
            second = running.challenger.spec.model_copy(update={"name": "other~2"})
            other = replace(other, challenger=replace(running.challenger, spec=second, replicas={}))
            rollout = running.rollout.model_copy(update={"number": number, "challenger": "other~2"})
            gateway.models.update({"chat": running, "other": replace(other, rollout=rollout)})
        found = gateway.models.counted()
        RolloutReport(gateway="g1", counted=tuple(found))
        assert {(each.rollout, each.revision) for each in found} >= {(7, 1), (7, 2), (799, 1), (799, 2)}
        assert {each.revision: each.requests for each in found if each.rollout == 7} == {
            revision: counts[0] for revision, counts in first.items()
        }


async def test_a_requests_timeout_goes_on_counting_when_the_champion_answers_it() -> None:
    request = Request({"type": "http", "headers": [(b"x-raytide-timeout-s", b"5")]})
    body = CompletionRequest(model="chat", prompt="hi")
    first = respond.deadline_of(body.timeout, request)
    await asyncio.sleep(0.01)
    assert respond.deadline_of(body.timeout, request) == first


async def test_a_challenger_answers_before_the_fallback_when_its_champion_has_no_replica() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await begin(gateway, FakeEngine(reply="new "), fallback=BACKEND)
        await gateway.kill("chat-0")
        assert text_of(await ask(gateway)) == "new "
        assert hosted.requests == []
