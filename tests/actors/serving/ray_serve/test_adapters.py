"""A replica keeps its adapters those of the spec."""

from __future__ import annotations

import pytest

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.models.model_cache import StagedModel
from raytide.actors.serving.ray_serve.live_fields import RETRY_S, UNLOAD_AFTER_S, AdapterSync
from raytide.core.errors import ConflictError, DataError
from raytide.core.objects.endpoint import adapter_id

ONE, TWO = adapter_id("one", "/one"), adapter_id("two", "/two")


class Stager:
    """Stages what is not broken, and notes what is held."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.held: list[str] = []
        self.asked: list[str] = []

    def __call__(self, location: str) -> StagedModel:
        self.asked.append(location)
        if location in self.broken:
            raise DataError(f"{location} is broken.")
        stager = self

        class Noted(StagedModel):
            def close(self) -> None:
                stager.held.remove(self.path)

        self.held.append(location)
        return Noted(location)


@pytest.mark.asyncio
async def test_adapters_follow_the_spec() -> None:
    engine, stager, now_s = FakeEngine(), Stager(), [0.0]
    await engine.start()
    sync = AdapterSync(engine, stage=stager, now_s=lambda: now_s[0])
    await sync.sync({"one": "/one", "two": "/two"})
    assert (set((await engine.stats()).adapters), sync.states()) == ({ONE, TWO}, {"one": "", "two": ""})
    await sync.sync({"two": "/two"})
    assert set((await engine.stats()).adapters) == {ONE, TWO}, "gateways may still send requests for it"
    now_s[0] += UNLOAD_AFTER_S
    await sync.sync({"two": "/two"})
    assert (list((await engine.stats()).adapters), stager.held) == ([TWO], ["/two"])
    await sync.sync({"one": "/one", "two": "/two"})
    assert sync.states() == {"one": "", "two": ""}
    assert stager.asked == ["/one", "/two", "/one"]


@pytest.mark.asyncio
async def test_one_that_cannot_be_loaded_is_tried_again_later_and_harms_no_other() -> None:
    engine, stager, now_s = FakeEngine(), Stager(), [0.0]
    await engine.start()
    sync = AdapterSync(engine, stage=stager, now_s=lambda: now_s[0])
    stager.broken = {"/one"}
    for _ in range(3):
        await sync.sync({"one": "/one", "two": "/two"})
    assert sync.states() == {"one": "/one is broken.", "two": ""}
    assert stager.asked == ["/one", "/two"]
    stager.broken.clear()
    now_s[0] += RETRY_S
    await sync.sync({"one": "/one", "two": "/two"})
    assert sync.states() == {"one": "", "two": ""}


@pytest.mark.asyncio
async def test_an_engine_that_refuses_an_adapter_holds_no_copy_of_it() -> None:
    engine, stager = FakeEngine(), Stager()
    await engine.start()
    await engine.load_lora(ONE, "/one")
    sync = AdapterSync(engine, stage=stager)
    await sync.sync({"one": "/one"})
    assert "already" in sync.states()["one"]
    assert stager.held == []


class Narrow(FakeEngine):
    """Has room for one adapter."""

    async def load_lora(self, name: str, path: str) -> None:
        if (await self.stats()).adapters:
            raise ConflictError("1 adapters are loaded, which is max_loras.", hint="Unload one.")
        await super().load_lora(name, path)


@pytest.mark.asyncio
async def test_one_that_found_no_room_is_loaded_as_soon_as_another_one_has_left() -> None:
    engine, now_s = Narrow(), [0.0]
    await engine.start()
    sync = AdapterSync(engine, stage=Stager(), now_s=lambda: now_s[0])
    await sync.sync({"one": "/one"})
    await sync.sync({"one": "/new"})
    assert "max_loras" in sync.states()["one"]
    now_s[0] += UNLOAD_AFTER_S
    await sync.sync({"one": "/new"})  # the old one leaves
    now_s[0] += 1
    await sync.sync({"one": "/new"})
    assert sync.states() == {"one": ""}
