"""Keeps a replica's adapters those of its endpoint's spec, while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from raytide.actors.engine.base import Engine
from raytide.actors.models.model_cache import StagedModel, staged_model
from raytide.core.errors import ConflictError, EngineDeadError, RaytideError
from raytide.core.objects.endpoint import adapter_id
from raytide.core.objects.endpoint_load import LOADING

UNLOAD_AFTER_S = 3.0
"""The time after which an adapter that left the spec is unloaded: gateways have stopped to send requests for it."""
RETRY_S = 30.0
"""The time after which a load that failed is tried again."""


class AdapterSync:
    """Loads and unloads adapters of one engine. A load that fails leaves the others, and the base model, as they
    are.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stage: Callable[[str], StagedModel] = staged_model,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stage, self._now_s = engine, stage, now_s
        self._loaded: dict[str, StagedModel] = {}
        self._unwanted_s: dict[str, float] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._wanted: dict[str, str] = {}

    def states(self) -> dict[str, str]:
        """Returns the state of each wanted adapter by its name: "" if it is loaded, `loading`, or the error."""
        return {name: self._state(adapter_id(name, at)) for name, at in sorted(self._wanted.items())}

    async def sync(self, wanted: Mapping[str, str]) -> None:
        """Loads what is missing, and unloads what is not wanted once no request uses it. `wanted` has the location of
        each adapter by name.
        """
        self._wanted = dict(wanted)
        ids = {adapter_id(name, location): location for name, location in wanted.items()}
        for adapter, location in ids.items():
            self._unwanted_s.pop(adapter, None)
            failed_s, _ = self._failed.get(adapter, (-RETRY_S, ""))
            if adapter not in self._loaded and self._now_s() - failed_s >= RETRY_S:
                await self._load(adapter, location)
        for adapter in self._loaded.keys() - ids.keys():
            if self._now_s() - self._unwanted_s.setdefault(adapter, self._now_s()) >= UNLOAD_AFTER_S:
                await self._unload(adapter)
        self._failed = {adapter: failure for adapter, failure in self._failed.items() if adapter in ids}

    def _state(self, adapter: str) -> str:
        if adapter in self._loaded:
            return ""
        return self._failed[adapter][1] if adapter in self._failed else LOADING

    async def _load(self, adapter: str, location: str) -> None:
        staged = StagedModel("")
        try:
            staged = await asyncio.to_thread(self._stage, location)
            await self._engine.load_lora(adapter, staged.path)
        except RaytideError as error:
            staged.close()
            if isinstance(error, EngineDeadError):
                raise
            self._failed[adapter] = self._now_s(), str(error)
            return
        self._failed.pop(adapter, None)
        self._loaded[adapter] = staged

    async def _unload(self, adapter: str) -> None:
        try:
            await self._engine.unload_lora(adapter)
        except ConflictError:  # a request uses it: the next round tries again
            return
        self._loaded.pop(adapter).close()
        self._unwanted_s.pop(adapter, None)
