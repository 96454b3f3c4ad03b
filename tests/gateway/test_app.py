"""One address for every endpoint: which model answers, who may ask, and what errors look like."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.actors.serving.asgi import ask
from tests.gateway.conftest import running_gateway, until

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.gateway.batches.service import BatchService


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **more}


@pytest.mark.asyncio
async def test_the_model_chooses_the_endpoint() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine(reply="tide "))
        await gateway.deploy("ebb", FakeEngine(reply="ebb "))
        for name, text in (("tide", "tide "), ("ebb", "ebb e")):
            answer = await gateway.http.post("/v1/chat/completions", json=chat(name))
            assert answer.json()["choices"][0]["message"]["content"] == text
            assert answer.json()["model"] == name
            assert answer.headers["x-raytide-replica"] == f"{name}-0"
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["ebb", "tide"]
        assert (await gateway.http.get("/v1/models/ebb")).json()["id"] == "ebb"


@pytest.mark.asyncio
async def test_an_unknown_model_is_a_404_as_at_openai() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        for answer in (
            await gateway.http.post("/v1/chat/completions", json=chat("none")),
            await gateway.http.get("/v1/models/none"),
            await gateway.http.post("/v1/embeddings", json={"model": "none", "input": "x"}),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        unknown = await gateway.http.get("/v1/nothing")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.asyncio
async def test_a_path_with_a_name_serves_that_endpoint_alone() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        await gateway.deploy("ebb", FakeEngine())
        own = await gateway.http.post("/tide/v1/chat/completions", json=chat("tide"))
        assert own.status_code == 200
        assert [model["id"] for model in (await gateway.http.get("/tide/v1/models")).json()["data"]] == ["tide"]
        other = await gateway.http.post("/tide/v1/chat/completions", json=chat("ebb"))
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        nowhere = await gateway.http.get("/flood/v1/models")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.asyncio
async def test_health_and_metrics_are_of_the_gateway_and_of_each_endpoint() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        await gateway.deploy("ebb", FakeEngine())
        await gateway.http.post("/v1/chat/completions", json=chat("tide"))
        assert (await gateway.http.get("/health")).json() == {"status": "ok"}
        assert (await gateway.http.get("/ebb/health")).status_code == 200
        everything = (await gateway.http.get("/metrics")).text
        assert everything.count("# HELP raytide_requests_total ") == 1
        assert 'raytide_requests_total{api="chat",code="",endpoint="tide",outcome="ok",revision=""} 1.0' in everything
        assert 'raytide_requests_running{endpoint="ebb",replica="",revision=""}' in everything
        assert 'endpoint="tide"' not in (await gateway.http.get("/ebb/metrics")).text
        await gateway.kill("ebb-0")
        assert (await gateway.http.get("/ebb/health")).status_code == 503


@pytest.mark.asyncio
async def test_without_a_key_nothing_is_answered_where_keys_are_demanded() -> None:
    async with running_gateway(requires_keys=True) as gateway:
        await gateway.deploy("tide", FakeEngine())
        for answer in (
            await gateway.http.post("/v1/chat/completions", json=chat("tide")),
            await gateway.http.get("/v1/models"),
            await gateway.http.post("/tide/v1/completions", json={"model": "tide", "prompt": "x"}),
            await gateway.http.post("/v2/rerank", json={"model": "tide", "query": "x", "documents": ["y"]}),
            await gateway.http.post("/tide/v2/rerank", json={"model": "tide", "query": "x", "documents": ["y"]}),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
        assert (await gateway.http.get("/health")).status_code == 200


@pytest.mark.asyncio
async def test_a_request_ends_at_its_timeout_and_leaves_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(tokens_per_s=20)
    async with running_gateway() as gateway:
        await gateway.deploy("tide", engine)
        field = await gateway.http.post("/v1/chat/completions", json=chat("tide", max_tokens=4000, timeout=0.2))
        header = await gateway.http.post(
            "/v1/chat/completions", json=chat("tide", max_tokens=4000), headers={"x-raytide-timeout-s": "0.2"}
        )
        for answer in (field, header):
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            assert answer.headers["x-should-retry"] == "false"
        assert "a request failed" not in caplog.text
        stream = await gateway.http.post(
            "/v1/chat/completions", json=chat("tide", max_tokens=4000, timeout=0.3, stream=True)
        )
        assert '"code":"timeout"' in stream.text
        assert "[DONE]" not in stream.text

        async def is_idle() -> bool:
            return (await engine.stats()).running == 0

        await until(is_idle)
        for bad in ("soon", "-1", "nan", "1e9"):
            refused = await gateway.http.post(
                "/v1/chat/completions", json=chat("tide"), headers={"x-raytide-timeout-s": bad}
            )
            assert refused.status_code == 400


@pytest.mark.asyncio
async def test_the_timeout_of_a_request_covers_its_wait_for_a_replica() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        await gateway.kill("tide-0")
        for body in (chat("tide", timeout=0.2), chat("tide", timeout=0.2, stream=True)):
            answer = await asyncio.wait_for(gateway.http.post("/v1/chat/completions", json=body), 60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert gateway.models.endpoint("tide")[1].waiting == 0


@pytest.mark.asyncio
async def test_the_wait_for_a_first_replica_ends_with_the_request() -> None:
    """Before a model's first replica its tokenizer is not known either, so nothing of the request is read yet."""
    async with running_gateway() as gateway:
        await gateway.deploy("tide")
        replicas = gateway.models.endpoint("tide")[1]
        for more in ({"timeout": 0.2}, {"timeout": 0.2, "stream": True}):
            answer = await asyncio.wait_for(gateway.http.post("/v1/chat/completions", json=chat("tide", **more)), 60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        body = json.dumps(chat("tide")).encode()
        asked = asyncio.create_task(ask(gateway.app, "/v1/chat/completions", body, leaves_after_body=True))
        await asyncio.wait_for(asked, 60)
        assert replicas.waiting == 0


@pytest.mark.asyncio
async def test_a_message_ends_at_its_timeout_while_it_waits_for_a_first_replica() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide")
        answer = await asyncio.wait_for(gateway.http.post("/v1/messages", json=chat("tide", timeout=0.2)), 60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        assert gateway.models.endpoint("tide")[1].waiting == 0


@pytest.mark.asyncio
async def test_a_changed_least_priority_holds_from_then_on() -> None:
    priorities: list[int] = []

    class Noting(FakeEngine):
        def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
            priorities.append(request.priority)
            return super().generate(request)

    async with running_gateway() as gateway:
        await gateway.deploy("tide", Noting())
        for least in (0, -5):
            entry = gateway.listing["tide"]
            spec = entry.spec.model_copy(update={"min_request_priority": least})
            gateway.listing["tide"] = dataclasses.replace(entry, spec=spec)
            gateway.models.update(gateway.listing)
            await gateway.http.post("/v1/chat/completions", json=chat("tide", priority=-9))
    assert priorities == [0, -5]


@pytest.mark.asyncio
async def test_a_deleted_endpoint_is_gone_and_a_new_one_of_its_name_is_another() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("tide", FakeEngine())
        gateway.listing.clear()
        gateway.models.update(gateway.listing)
        assert (await gateway.http.post("/v1/chat/completions", json=chat("tide"))).status_code == 404
        await gateway.deploy("tide", FakeEngine(reply="neap "))
        again = await gateway.http.post("/v1/chat/completions", json=chat("tide"))
        assert again.json()["choices"][0]["message"]["content"] == "neap "


async def test_a_kept_answer_says_so_and_is_counted() -> None:
    body = {"model": "kept", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 5}
    async with running_gateway() as gateway:
        await gateway.deploy("kept", FakeEngine(), answer_cache={"ttl_s": 60})
        first, second = [await gateway.http.post("/v1/chat/completions", json=body) for _ in range(2)]
        text = (await gateway.http.get("/metrics")).text
    assert "x-raytide-cache" not in first.headers
    assert second.headers["x-raytide-cache"] == "hit"
    assert first.json()["choices"] == second.json()["choices"]
    assert first.json()["usage"] == second.json()["usage"]
    assert 'raytide_reused_answers_total{endpoint="kept",how="cache",revision=""} 1.0' in text


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize(
    ("origin", "requires_keys", "is_allowed"),
    [
        ("https://chat.example.com", True, True),
        ("https://chat.example.com", False, False),
        ("http://localhost.example.com", False, False),
        ("http://localhost:3000", False, True),
        ("http://[::1]:3000", False, True),
        ("app://obsidian.md", False, True),
    ],
)
async def test_pages_may_use_a_gateway_with_keys_and_local_ones_any(
    origin: str, requires_keys: bool, is_allowed: bool
) -> None:
    """Otherwise any page that a user of this machine visits could use its models."""
    async with running_gateway(requires_keys=requires_keys) as gateway:
        asked = {"origin": origin, **PREFLIGHT}
        preflight = await gateway.http.options("/v1/chat/completions", headers=asked)
        answer = await gateway.http.get("/v1/models", headers={"origin": origin})
    assert preflight.status_code == (200 if is_allowed else 400)
    for each in (preflight, answer):
        assert (each.headers.get("access-control-allow-origin") in ("*", origin)) == is_allowed
    if is_allowed:
        assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]


async def test_a_refused_method_names_those_of_all_routes_with_the_path(tmp_path: Path) -> None:
    async with running_gateway() as gateway:
        BatchService(gateway.app, gateway.models, gateway.tenancy, tmp_path)
        for path, allowed in (("/v1/files", "GET, HEAD, POST"), ("/tide/v1/files/file-1", "DELETE, GET, HEAD")):
            refused = await gateway.http.put(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
