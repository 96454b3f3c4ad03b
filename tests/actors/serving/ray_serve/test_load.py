"""The load of replicas, from an engine's counters to what the controller decides on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.load_counters import LoadCounters
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import EngineStats, GenRequest
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.ray_serve import control, policy
from raytide.actors.serving.ray_serve.application import Application
from raytide.actors.serving.ray_serve.control import _load
from raytide.actors.serving.ray_serve.keys import load_key, queue_key, replica_key
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad

HELLO = [{"role": "user", "content": "hello"}]
STATS = EngineStats(running=1, generated_tokens=5, free_blocks=85, num_blocks=100)


def passed_on(load: dict[str, float], at_s: float, queued: float = 0.0, ids: tuple[str, ...] = ("r1",)) -> EndpointLoad:
    """Returns what the controller makes of a replica's report after Serve has passed it on."""
    point = SimpleNamespace(timestamp=at_s)
    series = {
        name: {SimpleReplica("r1"): [SimpleNamespace(**vars(point), value=value)]} for name, value in load.items()
    }
    ctx: Any = SimpleNamespace(raw_metrics={**series, "running_requests": {SimpleReplica("r2"): []}})
    published = {"at_s": at_s + 1, "replicas": policy._replica_stats(ctx)}
    application = Application(ready=1, ready_on={"r1": "ray-1"}, replica_ids=frozenset(ids))
    waiting = {"at_s": time.time(), "queued": queued}
    keys = {load_key("m"): published, queue_key("m", "gateway"): waiting}
    return _load("m", application, {key: json.dumps(value).encode() for key, value in keys.items()})


class SimpleReplica:
    def __init__(self, unique_id: str) -> None:
        self.unique_id = unique_id


def test_counters_arrive_by_name_with_their_age() -> None:
    counters = LoadCounters(None)
    counters.track(0.0).first_chunk()
    load = counters.load(STATS)
    (replica,) = passed_on({**load, "age_s": 3.0}, at_s=103.0).replicas
    assert (replica.id, replica.node, replica.at_s) == ("r1", "ray-1", 100.0)
    assert (replica.running, replica.waiting) == (1.0, 0.0)
    assert replica.kv_use == pytest.approx(0.15)
    assert (replica.counters.requests, replica.counters.first_tokens, replica.counters.output_tokens) == (1.0, 1.0, 5.0)
    names = {field.name for kind in (ReplicaLoad, Counters) for field in fields(kind)}
    assert load.keys() == names - {"id", "at_s", "counters", "node"}


def test_requests_are_those_in_engines_and_those_that_wait_in_gateways() -> None:
    load = LoadCounters(None).load(STATS)
    assert (passed_on(load, 1.0, queued=3.0).ongoing, passed_on(load, 1.0, queued=3.0).queued) == (4.0, 3.0)
    assert passed_on(load, 1.0, ids=()).ongoing == 0.0, "a replica that Serve has stopped is not counted any more"


def test_late_are_first_tokens_after_the_slo_requests_without_one_until_then_and_refused_ones() -> None:
    counters = LoadCounters(5.0)

    def late(waited_s: float, event: Callable[[Any], None]) -> float:
        before = counters.load(STATS)["late"]
        event(counters.track(waited_s))
        return counters.load(STATS)["late"] - before

    assert late(4.9, lambda request: request.first_chunk()) == 0
    assert late(5.1, lambda request: request.first_chunk()) == 1
    assert late(1.0, lambda request: request.end(is_refused=False)) == 0
    assert late(6.0, lambda request: request.end(is_refused=False)) == 1
    assert late(0.1, lambda request: request.end(is_refused=True)) == 1

    def answered_then_lost(request: Any) -> None:
        request.first_chunk()
        request.first_chunk()
        request.end(is_refused=True)

    assert late(0.1, answered_then_lost) == 0


def test_a_request_is_late_as_soon_as_it_has_waited_too_long_and_only_once() -> None:
    counters = LoadCounters(5.0)
    request = counters.track(6.0)
    assert [counters.load(STATS)["late"] for _ in range(2)] == [1.0, 1.0]
    request.first_chunk()
    assert counters.load(STATS)["late"] == 1.0
    counters.track(6.0).end(is_refused=True)
    assert counters.load(STATS)["late"] == 2.0


def test_each_prompt_is_a_request_of_the_engine_and_embeddings_are_none() -> None:
    async def run() -> dict[str, float]:
        inner = FakeEngine()
        served = EngineServer(inner, await inner.start(), "secret", problem=_none)
        engine = RemoteEngine("127.0.0.1", await served.listen("127.0.0.1"), "secret")
        server = Server(engine, model="fake", drain_s=1.0)
        transport = httpx.ASGITransport(app=create_app(server))
        await server.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://a/v1") as client:
            one = {"model": "fake", "prompt": "x", "max_tokens": 1}
            for path, body in (
                ("completions", one),
                ("completions", {**one, "prompt": ["a", "b", "c"]}),
                ("completions", {**one, "model": "other"}),
                ("chat/completions", {"model": "fake", "messages": HELLO, "max_tokens": 1}),
                ("embeddings", {"model": "fake", "input": ["a", "b"]}),
            ):
                await client.post(f"/{path}", json=body)
        load = served.counters.load(await inner.stats())
        await engine.shutdown()
        await served.close()
        return load

    load = asyncio.run(run())
    assert (load["requests"], load["finished"]) == (5.0, 5.0)


def test_the_cache_of_the_fake_engine_fills_with_every_token() -> None:
    async def kv_use(tokens: int) -> float:
        engine = FakeEngine(kv_tokens=100)
        await engine.start()
        chunks = engine.generate(
            GenRequest(request_id="a", prompt="ten bytes!", sampling=SamplingParams(max_tokens=50))
        )
        for _ in range(tokens):
            await anext(chunks)
        return LoadCounters(None).load(await engine.stats())["kv_use"]

    assert [asyncio.run(kv_use(n)) for n in (1, 31)] == pytest.approx([0.11, 0.41])


class _Keys(dict[bytes, bytes]):
    """The GCS's key-value store."""

    def internal_kv_keys(self, prefix: bytes, *_: object, **__: object) -> list[bytes]:
        return [key for key in self if key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], *_: object, **__: object) -> dict[bytes, bytes]:
        return {key: self[key] for key in keys if key in self}

    def internal_kv_del(self, key: bytes, *_: object, **__: object) -> None:
        self.pop(key, None)


def test_the_addresses_of_replicas_that_have_gone_are_forgotten_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = _Keys({load_key("e"): b'{"at_s": 1.0}', replica_key("e", "old"): b"", replica_key("e", "gone"): b""})

    def look(*_: object) -> dict[str, Application]:
        seen = Application(replica_ids=frozenset({"old"}))
        keys[replica_key("e", "new")] = b""  # it starts and registers after Serve has answered
        return {"e": seen}

    monkeypatch.setattr(control, "_applications", look)
    monkeypatch.setattr("raytide.core.ray_internals.connected_gcs", lambda: keys)
    control.ServeControl().loads(["e"])
    assert set(keys) == {load_key("e"), replica_key("e", "old"), replica_key("e", "new")}


async def _none() -> None:
    return None


def test_serves_policy_follows_the_target_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = iter([1, 2, 3])
    monkeypatch.setattr(policy, "_exchange", lambda ctx, now_s: next(targets))
    found: list[int] = []
    state: dict[str, Any] = {}
    for now_s in (7200.0, 7200.1, 3600.0, 3600.1, 3601.0):
        ctx: Any = SimpleNamespace(policy_state=state, current_time=now_s, target_num_replicas=0)
        target, state = policy.published_target(ctx)
        found.append(target)
    assert found == [1, 1, 2, 2, 3]
