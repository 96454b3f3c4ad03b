import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from tests.actors.engine.conformance.asking import Start
from tests.actors.engine.conformance.engines import ENGINES, ENVIRONMENT
from tests.actors.engine.vllm_cores import SharedCores, needs_vllm

from raytide.actors.engine import EngineInfo
from raytide.actors.engine.base import Engine


@pytest.fixture(scope="session")
def model_dir(wide_model_dir: Path) -> Path:
    """One that every engine computes."""
    return wide_model_dir


@pytest.fixture(params=[*sorted(ENGINES), pytest.param("vllm", marks=needs_vllm)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def start(
    kind: str, model_dir: Path, vllm_cores: SharedCores, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts engines of one kind, and ends them after the test."""
    engines: list[Engine] = []
    for name, value in ENVIRONMENT.get(kind, {}).items():
        monkeypatch.setenv(name, value)

    async def make(max_running: int = 8, max_waiting: int = 64) -> tuple[Engine, EngineInfo]:
        if kind == "vllm":
            engine: Engine = vllm_cores.engine(max_running, max_waiting)
        else:
            engine = ENGINES[kind](model_dir, max_running, max_waiting)
        engines.append(engine)
        return engine, await engine.start()

    yield make
    for engine in engines:
        await engine.shutdown()


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny model, in PEFT's format."""
    path = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(3):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{at}.lora_A.weight"] = torch.randn(4, 128, generator=generator)
        weights[f"{at}.lora_B.weight"] = torch.randn(128, 4, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    body = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(body))
    return path
