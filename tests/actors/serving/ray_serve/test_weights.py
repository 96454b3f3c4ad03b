"""Replicas swap weights one after the other, and keep those that they have if that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine import EngineConfig, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.models.model_cache import StagedModel
from raytide.actors.serving.ray_serve.live_fields import RETRY_S, WeightsSync, is_its_turn
from raytide.core.errors import DataError


def test_a_replica_waits_for_those_before_it() -> None:
    replicas = ["a", "b", "c"]
    assert is_its_turn("a", "/new", {}, replicas)
    assert not is_its_turn("b", "/new", {}, replicas)
    assert not is_its_turn("b", "/new", {"a": "/old"}, replicas), "it has failed, or is not there yet"
    assert is_its_turn("b", "/new", {"a": "/new"}, replicas)
    assert not is_its_turn("c", "/new", {"a": "/new"}, replicas)
    assert is_its_turn("c", "/new", {"a": "/new"}, ["a", "c"]), "a replica that has gone is not waited for"


@pytest.mark.asyncio
async def test_weights_follow_the_spec_and_a_failed_swap_changes_nothing() -> None:
    engine, now_s, asked = FakeEngine(), [0.0], list[str]()
    await engine.start()

    def stage(location: str) -> StagedModel:
        asked.append(location)
        if location == "/broken":
            raise DataError("/broken is broken.")
        return StagedModel(location)

    async def version() -> str:
        return (await engine.stats()).weights_version

    sync = WeightsSync(engine, "/model", stage=stage, now_s=lambda: now_s[0])
    await sync.sync("")
    assert await version() == "fake-1"
    await sync.sync("/new")
    assert (await version(), sync.location, sync.error) == ("/new", "/new", "")
    for _ in range(3):
        await sync.sync("/broken")
    assert (await version(), sync.location, sync.asked) == ("/new", "/new", "/broken")
    assert (sync.error, asked) == ("/broken is broken.", ["/new", "/broken"])
    now_s[0] = RETRY_S
    await sync.sync("/broken")
    assert asked[-2:] == ["/broken", "/broken"]
    await sync.sync("/new")
    assert (sync.location, sync.error, len(asked)) == ("/new", "", 3)
    await sync.sync("")
    assert (await version(), sync.location) == ("/model", "")


@pytest.mark.asyncio
async def test_the_native_engine_refuses_another_architecture_and_serves_on(tmp_path: Path) -> None:
    for name, shape in {"model": {}, "tuned": {}, "deeper": {"num_hidden_layers": 4}}.items():
        save_llama(tmp_path / name, **shape)
    engine = NativeEngine(EngineConfig(model_dir=str(tmp_path / "model"), num_blocks=32))
    info = await engine.start()
    sync = WeightsSync(engine, str(tmp_path / "model"))
    await sync.sync(str(tmp_path / "deeper"))
    assert "another architecture" in sync.error
    assert (await engine.stats()).weights_version == info.weights_version
    stream = engine.generate(GenRequest(request_id="1", prompt=[5] * 20, sampling=SamplingParams(max_tokens=30)))
    chunks = [await anext(stream)]
    await sync.sync(str(tmp_path / "tuned"))
    chunks += [chunk async for chunk in stream]
    assert (sync.location, sync.error) == (str(tmp_path / "tuned"), "")
    assert chunks[-1].finish_reason in ("length", "stop"), "a running request continues"
    await engine.shutdown()
