"""`memory.compile` with inductor, which generates and builds C++ on a CPU, trains like eager execution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import metrics

from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.train import MemorySpec, TrainSpec


def losses(spec: TrainSpec, name: str, memory: MemorySpec) -> list[float]:
    found: list[float] = []
    changes = {"out": f"{spec.out}-{name}", "steps": 3, "memory": memory, "export": False}
    train_local(spec.model_copy(update=changes), on_step=lambda result: found.append(result.loss))
    return found


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor without a cache of earlier runs and without worker processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    torch._dynamo.reset()
    metrics.reset()


@pytest.mark.usefixtures("inductor")
def test_training_compiled_by_inductor_gives_the_losses_of_eager(spec: TrainSpec) -> None:
    eager = losses(spec, "eager", MemorySpec())
    compiled = losses(spec, "compiled", MemorySpec(compile=True))
    assert metrics.generated_kernel_count > 0, "inductor generated no code"
    assert len(compiled) == 3
    assert compiled == pytest.approx(eager, abs=5e-6)
