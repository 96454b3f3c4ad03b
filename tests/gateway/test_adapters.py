"""An endpoint's adapters are models of their own: `base:adapter`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.actors.engine.tiny import save_adapter, save_llama
from tests.gateway.conftest import Gateway, running_gateway, until

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.ray_serve.live_fields import AdapterSync
from raytide.core.objects.endpoint import adapter_id
from raytide.gateway.replicas import replica_set


def ask(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the tide", "max_tokens": 8, "temperature": 0, **more}


async def load(gateway: Gateway, replica: str, adapters: dict[str, str]) -> None:
    """Does what a replica does when the adapters of its spec change."""
    await AdapterSync(gateway.servers[replica].engine).sync(adapters)


def change(gateway: Gateway, name: str, **adapters: str) -> None:
    """A new listing, as the directory reads it."""
    entry = gateway.listing[name]
    gateway.listing[name] = replace(entry, spec=entry.spec.model_copy(update={"adapters": adapters}))
    gateway.models.update(gateway.listing)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    save_llama(folder / "model")
    save_adapter(folder / "one", seed=1)
    save_adapter(folder / "two", seed=2, alpha=64)
    return folder


@pytest.mark.asyncio
async def test_an_adapter_answers_as_a_model_of_its_own(tiny: Path) -> None:
    adapters = {"one": str(tiny / "one"), "two": str(tiny / "two")}
    async with running_gateway() as gateway:
        engine = NativeEngine(EngineConfig(model_dir=str(tiny / "model"), num_blocks=64))
        await gateway.deploy("base", engine, adapters=adapters)
        await load(gateway, "base-0", adapters)
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["base", "base:one", "base:two"]
        assert (await gateway.http.get("/v1/models/base:one")).json()["id"] == "base:one"
        texts, vectors = {}, {}
        for model in ("base", "base:one", "base:two"):
            answer = (await gateway.http.post("/v1/completions", json=ask(model))).json()
            assert answer["model"] == model
            texts[model] = answer["choices"][0]["text"]
            chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            assert (await gateway.http.post("/v1/chat/completions", json=chat)).json()["model"] == model
            embedded = await gateway.http.post("/v1/embeddings", json={"model": model, "input": "the tide"})
            vectors[model] = tuple(embedded.json()["data"][0]["embedding"])
        assert len(set(texts.values())) == len(set(vectors.values())) == 3
        await engine.shutdown()


@pytest.mark.asyncio
async def test_an_unknown_adapter_is_no_model() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("base", FakeEngine(), adapters={"one": "/one"})
        for model in ("base:none", "base:", "none:one", "base:one:one"):
            answer = await gateway.http.post("/v1/completions", json=ask(model))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.asyncio
async def test_a_request_waits_for_its_adapter_and_goes_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = {"one": "/one"}
    async with running_gateway() as gateway:
        await gateway.deploy("base", FakeEngine(), FakeEngine(), adapters=adapters)
        asking = asyncio.ensure_future(gateway.http.post("/v1/completions", json=ask("base:one")))
        await asyncio.sleep(0.2)
        assert not asking.done()
        await load(gateway, "base-1", adapters)
        assert (await asking).headers["x-raytide-replica"] == "base-1"
        for _ in range(4):
            answer = await gateway.http.post("/v1/completions", json=ask("base:one"))
            assert answer.headers["x-raytide-replica"] == "base-1"
        monkeypatch.setattr(replica_set, "_ADAPTER_S", 0.2)
        change(gateway, "base", one="/one", two="/two")
        late = await gateway.http.post("/v1/completions", json=ask("base:two"))
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.asyncio
async def test_requests_finish_with_an_adapter_that_is_replaced_and_then_it_leaves() -> None:
    now_s = [0.0]
    async with running_gateway() as gateway:
        engine = FakeEngine(tokens_per_s=50.0)
        await gateway.deploy("base", engine, adapters={"one": "/old"})
        sync = AdapterSync(gateway.servers["base-0"].engine, now_s=lambda: now_s[0])
        await sync.sync({"one": "/old"})
        running = asyncio.ensure_future(gateway.http.post("/v1/completions", json=ask("base:one", max_tokens=100)))

        async def runs() -> bool:
            return (await engine.stats()).running == 1

        await until(runs)
        change(gateway, "base", one="/new")
        await sync.sync({"one": "/new"})
        old, new = adapter_id("one", "/old"), adapter_id("one", "/new")
        assert set((await engine.stats()).adapters) == {old, new}
        now_s[0] = 10.0
        await sync.sync({"one": "/new"})
        assert set((await engine.stats()).adapters) == {old, new}, "a request uses the old one"
        assert (await gateway.http.post("/v1/completions", json=ask("base:one"))).status_code == 200
        assert (await running).json()["usage"]["completion_tokens"] == 100
        await sync.sync({"one": "/new"})
        assert list((await engine.stats()).adapters) == [new]


@pytest.mark.asyncio
async def test_an_adapter_is_not_waited_for_on_its_own_path_of_another_endpoint() -> None:
    async with running_gateway() as gateway:
        await gateway.deploy("base", FakeEngine(), adapters={"one": "/one"})
        await gateway.deploy("other", FakeEngine())
        await load(gateway, "base-0", {"one": "/one"})
        own = await gateway.http.post("/base/v1/completions", json=ask("base:one"))
        assert own.status_code == 200
        other = await gateway.http.post("/other/v1/completions", json=ask("base:one"))
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
