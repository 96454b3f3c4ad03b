from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.actors.engine.tiny import save_llama
from tests.actors.engine.vllm_cores import SharedCores

from raytide.actors.engine.model.draft_model import DraftModel
from raytide.actors.engine.scheduler.step_cost import StepCost


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    save_llama(path)
    return path


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 32, the narrowest that vLLM computes on a CPU."""
    path = tmp_path_factory.mktemp("wide-model")
    save_llama(path, hidden_size=128, head_dim=32)
    return path


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and draft models cost next to nothing, so that engines draft whatever they find."""
    monkeypatch.setattr(StepCost, "seconds", lambda self, rows: 1.0 + 1e-6 * rows)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, rows: 1e-3)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_cores(wide_model_dir: Path) -> AsyncIterator[SharedCores]:
    cores = SharedCores(wide_model_dir)
    yield cores
    cores.shutdown()
