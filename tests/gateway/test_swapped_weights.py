"""The gateway notices that a replica serves other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_adapter, save_llama
from tests.gateway.conftest import running_gateway, until

from raytide.actors.engine import EngineConfig, NativeEngine
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.core.objects.endpoint import adapter_id


@pytest.mark.asyncio
async def test_answers_of_other_weights_are_not_reused_and_prefixes_are_forgotten() -> None:
    async with running_gateway() as gateway:
        engine = FakeEngine()
        await gateway.deploy("tide", engine, answer_cache={"ttl_s": 300.0})
        ask = {"model": "tide", "prompt": "the tide " * 20, "max_tokens": 5, "temperature": 0}

        async def how() -> str:
            answer = await gateway.http.post("/v1/completions", json=ask)
            assert answer.status_code == 200
            return answer.headers["x-raytide-replica"]

        assert [await how(), await how()] == ["tide-0", "cache"]
        await engine.load_weights("/new")
        server, replicas = gateway.models.endpoint("tide")

        async def is_noticed() -> bool:
            return server.info.weights_version == "/new"

        await until(is_noticed)
        assert [replica.info.weights_version for replica in replicas.ready] == ["/new"]
        assert [await how(), await how()] == ["tide-0", "cache"]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_native", [False, True])
async def test_answers_of_an_adapter_that_was_trained_again_in_its_place_are_not_reused(
    tmp_path: Path, is_native: bool
) -> None:
    place = tmp_path / "mine"
    save_adapter(place, seed=1)
    save_llama(tmp_path / "model")
    async with running_gateway() as gateway:
        engine = NativeEngine(EngineConfig(model_dir=str(tmp_path / "model"))) if is_native else FakeEngine()
        await gateway.deploy("tide", engine, adapters={"mine": str(place)}, answer_cache={"ttl_s": 300.0})
        ask = {"model": "tide:mine", "prompt": "the tide " * 20, "max_tokens": 5, "temperature": 0}
        name, (_, replicas) = adapter_id("mine", str(place)), gateway.models.endpoint("tide")

        async def how() -> str:
            answer = await gateway.http.post("/v1/completions", json=ask)
            assert answer.status_code == 200
            return answer.headers["x-raytide-replica"]

        async def is_noticed() -> bool:
            stats = replicas.ready[0].engine.status.stats
            return stats is not None and stats.adapters == (await engine.stats()).adapters

        for seed in (1, 2):
            save_adapter(place, seed=seed)
            await engine.load_lora(name, str(place))
            await until(is_noticed)
            assert [await how(), await how()] == ["tide-0", "cache"]
            await engine.unload_lora(name)
        await engine.shutdown()
