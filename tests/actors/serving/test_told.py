"""What a replica tells raytide's controller, from the engine's counters to the load that is decided on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.metrics import ServingMetrics
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.ray_serve import policy
from raytide.actors.serving.ray_serve.application import Application
from raytide.actors.serving.ray_serve.control import _load
from raytide.core.objects.endpoint import Counters, EndpointLoad, ReplicaLoad

HELLO = [{"role": "user", "content": "hello"}]


def told(metrics: ServingMetrics, tokens: int) -> dict[str, float]:
    """While one request has said so many tokens."""

    async def run() -> dict[str, float]:
        engine = FakeEngine(kv_tokens=100)
        await engine.start()
        speaking = engine.generate(
            GenRequest(request_id="a", prompt="ten bytes!", sampling=SamplingParams(max_tokens=50))
        )
        for _ in range(tokens):
            await anext(speaking)
        said = metrics.load_counters(await engine.stats())
        await engine.shutdown()
        return said

    return asyncio.run(run())


def heard(words: dict[str, float], at_s: float, queued: float = 0.0, serve_counts: float = 0.0) -> EndpointLoad:
    """What the controller makes of it after Serve has passed it on."""
    point = SimpleNamespace(timestamp=at_s)
    series = {
        name: {SimpleReplica("r1"): [SimpleNamespace(**vars(point), value=value)]} for name, value in words.items()
    }
    ctx: Any = SimpleNamespace(raw_metrics={**series, "running_requests": {SimpleReplica("r2"): []}})
    load = {"at_s": at_s + 1, "ongoing": serve_counts, "queued": queued, "replicas": policy._replica_stats(ctx)}
    return _load(Application(ready=1, ready_on={"r1": "ray-1"}), json.dumps(load).encode())


class SimpleReplica:
    def __init__(self, unique_id: str) -> None:
        self.unique_id = unique_id


def test_the_cache_of_the_fake_engine_fills_with_every_token() -> None:
    assert [told(ServingMetrics("m"), n)["kv_use"] for n in (1, 31)] == pytest.approx([0.11, 0.41])


def test_what_is_told_arrives_by_name_with_its_time() -> None:
    metrics = ServingMetrics("m")
    track = metrics.track("chat")
    track.set_prompts(1)
    track.tokens(0, 1)
    (replica,) = heard(told(metrics, 5), at_s=100.0).replicas
    assert (replica.id, replica.node, replica.at_s) == ("r1", "ray-1", 100.0)
    assert (replica.running, replica.waiting) == (1.0, 0.0)
    assert replica.kv_use == pytest.approx(0.15)
    assert (replica.counters.requests, replica.counters.first_tokens, replica.counters.output_tokens) == (1.0, 1.0, 5.0)
    names = {field.name for kind in (ReplicaLoad, Counters) for field in fields(kind)} - {
        "id",
        "at_s",
        "counters",
        "node",
    }
    assert told(metrics, 1).keys() == names


def test_requests_of_which_serve_has_forgotten_are_those_of_the_engines_and_the_queue() -> None:
    load = heard(told(ServingMetrics("m"), 1), 1.0, queued=3.0, serve_counts=0.0)
    assert (load.ongoing, load.queued) == (4.0, 3.0)
    assert heard(told(ServingMetrics("m"), 1), 1.0, serve_counts=7.0).ongoing == 7.0


def test_late_is_a_first_token_after_the_slo_a_request_that_never_got_one_in_that_time_and_one_that_was_refused() -> (
    None
):
    metrics = ServingMetrics("m", slo_ttft_s=5.0)
    metrics.record_first_token(4.9, 1)
    metrics.record_unanswered(1.0, "aborted", 1)
    assert told(metrics, 1)["late"] == 0.0
    metrics.record_first_token(5.1, 1)
    metrics.record_unanswered(6.0, "aborted", 1)
    metrics.record_unanswered(0.1, "rejected", 1)
    assert told(metrics, 1)["late"] == 3.0
    metrics.record_first_token(5.1, 4)
    metrics.record_unanswered(6.0, "ok", 0)
    assert told(metrics, 1)["late"] == 7.0


def test_what_the_controller_hears_of_requests_is_what_the_engine_gets_each_prompt_one_and_embeddings_none() -> None:
    async def run() -> dict[str, float]:
        engine = FakeEngine()
        server = Server(engine, model="fake", drain_s=1.0)
        transport = httpx.ASGITransport(app=create_app(server))
        await server.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://a/v1") as client:
            one = {"model": "fake", "prompt": "x", "max_tokens": 1}
            for path, body in (
                ("completions", one),
                ("completions", {**one, "prompt": ["a", "b", "c"]}),
                ("completions", {**one, "model": "other"}),
                (
                    "chat/completions",
                    {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
                ),
                ("embeddings", {"model": "fake", "input": ["a", "b"]}),
            ):
                await client.post(f"/{path}", json=body)
        said = server.metrics.load_counters(await engine.stats())
        await engine.shutdown()
        return said

    said = asyncio.run(run())
    assert (said["requests"], said["finished"]) == (5.0, 5.0)


def test_a_request_that_said_something_is_judged_once_and_without_an_slo_nothing_is_late() -> None:
    metrics = ServingMetrics("m", slo_ttft_s=1e-9)
    track = metrics.track("chat")
    track.set_prompts(1)
    track.tokens(0, 1)
    track.finish("ok")
    assert told(metrics, 1)["late"] == 1.0
    free = ServingMetrics("m")
    free.record_first_token(1e6, 1)
    assert told(free, 1)["late"] == 0.0
