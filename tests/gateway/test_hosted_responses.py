"""The Responses API where a hosted API answers, and streams of hosted APIs that outlast their request's timeout."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.conftest import running_gateway
from tests.gateway.test_hosted import BACKEND, HOSTED, KEY, URL, Endless, chat, hosted_gateway

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.gateway.hosted import HostedApis

pytestmark = pytest.mark.asyncio


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "input": text, "max_output_tokens": 5, **more}


async def test_a_fallback_answers_a_response_while_all_replicas_are_full() -> None:
    async with hosted_gateway() as (gateway, _):
        await gateway.deploy("chat", FakeEngine(max_running=1, max_waiting=0), fallback=BACKEND)
        answer = await gateway.http.post("/v1/responses", json=asked("hi"))
        assert (answer.status_code, answer.headers["x-raytide-replica"]) == (200, "hosted")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_conversation_goes_on_with_a_hosted_api(stream: bool) -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        first = await gateway.http.post("/v1/responses", json=asked("one", stream=stream))
        body = json.loads(first.text.split("data: ")[-1])["response"] if stream else first.json()
        kept = await gateway.http.get(f"/v1/responses/{body['id']}")
        assert (kept.status_code, kept.json()) == (200, body)
        again = asked("two", previous_response_id=body["id"], store=False)
        second = await gateway.http.post("/v1/responses", json=again)
        assert second.status_code == 200, second.text
        assert (await gateway.http.get(f"/v1/responses/{second.json()['id']}")).status_code == 404
        sent = hosted.bodies()[-1]
        assert "previous_response_id" not in sent
        assert [(item["role"], item["content"][0]["text"]) for item in sent["input"]] == [
            ("user", "one"), ("assistant", "far f"), ("user", "two"),
        ]  # fmt: skip
        assert not any("id" in item for item in sent["input"])


async def test_a_fallback_continues_what_a_replica_has_begun() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", FakeEngine(reply="near "), fallback=BACKEND)
        first = (await gateway.http.post("/v1/responses", json=asked("one"))).json()
        await gateway.kill("chat-0")
        second = await gateway.http.post("/v1/responses", json=asked("two", previous_response_id=first["id"]))
        assert (second.status_code, second.headers["x-raytide-replica"]) == (200, "hosted")
        texts = [item["content"][0]["text"] for item in hosted.bodies()[-1]["input"]]
        assert texts == ["one", "near ", "two"]


async def test_a_hosted_stream_ends_at_the_timeout_of_its_request() -> None:
    hosted = Endless()
    async with running_gateway(hosted=HostedApis({URL: KEY}, hosted)) as gateway:
        await gateway.deploy("chat", **HOSTED)
        body = chat("chat", stream=True, timeout=0.3)
        answer = await asyncio.wait_for(gateway.http.post("/v1/chat/completions", json=body), 60)
        assert json.loads(answer.text.split("data: ")[-1])["error"]["code"] == "timeout"
        assert hosted.is_closed
