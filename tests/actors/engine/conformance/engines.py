"""What the conformance suite knows of each engine: how to make a small one, with one place and little room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raytide.actors.engine import EngineConfig, FakeEngine, NativeEngine
from raytide.actors.engine.base import Engine

MAX_LEN = 128


def fake(model_dir: Path, max_running: int, max_waiting: int) -> Engine:
    return FakeEngine(max_model_len=MAX_LEN, max_running=max_running, max_waiting=max_waiting)


def native(model_dir: Path, max_running: int, max_waiting: int) -> Engine:
    return NativeEngine(
        EngineConfig(
            model_dir=str(model_dir),
            max_model_len=MAX_LEN,
            block_size=8,
            max_running=max_running,
            max_waiting=max_waiting,
            max_batch_tokens=max(64, max_running),
        )
    )


# vLLM, which tests share, is made by a fixture of its own.
ENGINES: dict[str, Callable[[Path, int, int], Engine]] = {"fake": fake, "native": native, "native-ref": native}
ENVIRONMENT: dict[str, dict[str, str]] = {"native-ref": {"RAYTIDE_OPS": "ref"}}  # while an engine starts
