"""An exchange of vLLM's weights, on a core that only records its calls. The tests need no vLLM."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.actors.engine.backends.vllm.config import VllmConfig
from raytide.actors.engine.backends.vllm.engine import VllmEngine
from raytide.actors.engine.backends.vllm.launch import VllmCore
from raytide.actors.engine.backends.vllm.weights import ServedWeights
from raytide.core.errors import EngineError


class Llm:
    """Records its calls. A reload waits for `may_read`, and fails for the directory `broken`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_reading, self.may_read = asyncio.Event(), asyncio.Event()

    async def pause_generation(self, **_: object) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self, **_: object) -> None:
        self.calls.append("reset")

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.is_reading.set()
        await self.may_read.wait()
        name = Path(kwargs["weights_path"]).name
        self.calls.append(f"read {name}")
        if name == "broken":
            raise OSError(name)


def core_of(llm: Llm) -> VllmCore:
    core = object.__new__(VllmCore)
    object.__setattr__(core, "llm", llm)
    return core


async def test_a_swap_whose_caller_leaves_goes_on_to_its_end(model_dir: Path, tmp_path: Path) -> None:
    llm, other = Llm(), shutil.copytree(model_dir, tmp_path / "other")
    weights = ServedWeights(core_of(llm), model_dir)
    leaving = asyncio.create_task(weights.swap(str(other), "step-1", stays_paused=False))
    await llm.is_reading.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    assert leaving.cancelled() and llm.calls == ["pause"], "it does not serve weights that are half read"
    llm.may_read.set()
    assert await weights.swap(str(model_dir), "step-2", stays_paused=True) == "step-2"
    first = ["pause", "read other", "reset", "resume"]
    assert llm.calls == [*first, "pause", f"read {model_dir.name}", "reset"]


async def test_weights_that_vllm_cannot_read_are_replaced_by_those_before(model_dir: Path, tmp_path: Path) -> None:
    llm, broken = Llm(), shutil.copytree(model_dir, tmp_path / "broken")
    llm.may_read.set()
    weights = ServedWeights(core_of(llm), model_dir)
    before = weights.version
    with pytest.raises(EngineError, match="cannot read the weights"):
        await weights.swap(str(broken), None, stays_paused=False)
    assert llm.calls == ["pause", "read broken", f"read {model_dir.name}", "resume"]
    assert weights.version == before


@pytest.mark.asyncio
async def test_an_adapter_that_is_loaded_again_shares_no_cached_blocks(tmp_path: Path) -> None:
    """vLLM's prefix cache knows adapters by name and path, and this one was trained again into its folder."""
    added: list[tuple[str, str]] = []

    class Loras:
        async def add_lora(self, adapter: Any) -> bool:
            added.append((adapter.lora_name, adapter.lora_path))
            return True

        async def remove_lora(self, number: int) -> bool:
            return True

    def lora_request(name: str, number: int, path: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

    core = object.__new__(VllmCore)
    object.__setattr__(core, "llm", Loras())
    object.__setattr__(core, "features", frozenset({"lora"}))
    object.__setattr__(core, "modules", {"lora": SimpleNamespace(LoRARequest=lora_request)})
    engine = VllmEngine(VllmConfig(model_dir=str(tmp_path), max_loras=1))
    engine._core = core
    (tmp_path / "adapter_config.json").write_text("{}")
    for _ in range(2):
        await engine.load_lora("poet", str(tmp_path))
        await engine.unload_lora("poet")
    assert len(set(added)) == 2
