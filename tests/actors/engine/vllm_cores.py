"""vLLM takes many seconds to start, so the tests share two of them: one with a single place, one with sixteen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.engine.backends.vllm.config import VllmConfig
from raytide.actors.engine.backends.vllm.engine import VllmEngine
from raytide.actors.engine.backends.vllm.launch import VllmCore, launch

MAX_LEN = 128

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: ./dev setup --vllm")


class SharedCores:
    """Launches a core once and gives it to every engine of the session that asks, as if it were new."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._events = asyncio.get_running_loop()
        self._cores: dict[int, VllmCore] = {}

    def engine(self, max_running: int = 8, max_waiting: int = 64) -> VllmEngine:
        return VllmEngine(self._config(max_running, max_waiting), launch=self._launch)

    @asynccontextmanager
    async def other_weights(self, model_dir: Path) -> AsyncIterator[None]:
        """The core with sixteen places computes another model of the same form meanwhile."""
        await self._reload(model_dir)
        try:
            yield
        finally:
            await self._reload(self._model_dir)

    async def _reload(self, model_dir: Path) -> None:
        llm = self._cores[16].llm
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_dir)})
        await llm.reset_prefix_cache()

    def shutdown(self) -> None:
        for core in self._cores.values():
            core.shutdown()
        self._cores.clear()

    def _config(self, max_running: int, max_waiting: int = 64) -> VllmConfig:
        return VllmConfig(
            model_dir=str(self._model_dir),
            max_model_len=MAX_LEN,
            block_size=32,
            kv_memory_gb=0.05,
            max_running=max_running,
            max_waiting=max_waiting,
            max_batch_tokens=MAX_LEN,
            max_loras=0 if max_running == 1 else 2,
        )

    def _launch(self, config: VllmConfig) -> VllmCore:
        places = 1 if config.max_running == 1 else 16
        if places not in self._cores:
            self._cores[places] = launch(self._config(places))
        core = self._cores[places]
        asyncio.run_coroutine_threadsafe(_renew(core), self._events).result(60)
        return replace(core, llm=_Kept(core.llm))


async def _renew(core: VllmCore) -> None:
    await core.llm.resume_generation()
    await core.llm.reset_prefix_cache()


class _Kept:
    """An AsyncLLM that outlives the engine that shuts it down."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None:
        """Other tests want it."""
