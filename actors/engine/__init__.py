"""raytide's inference engine: paged KV cache, continuous batching, streaming. `docs/engine.md` follows a token through
the engine.

Names are imported at first use, so that importing the scheduler or the shared types does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.actors.engine.backends.fake import FakeEngine
    from raytide.actors.engine.backends.native.engine import NativeEngine
    from raytide.actors.engine.backends.native.llm import LLM
    from raytide.actors.engine.base import Engine
    from raytide.actors.engine.config import EngineConfig
    from raytide.actors.engine.sampling_params import SamplingParams, Structured
    from raytide.actors.engine.types import (
        CompletionOutput,
        EngineInfo,
        EngineStats,
        GenChunk,
        GenRequest,
        Message,
        RequestOutput,
        TokenLogprobs,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineStats",
    "FakeEngine",
    "GenChunk",
    "GenRequest",
    "Message",
    "NativeEngine",
    "RequestOutput",
    "SamplingParams",
    "Structured",
    "TokenLogprobs",
]

_HOME = {
    "LLM": "backends.native.llm",
    "SamplingParams": "sampling_params",
    "Structured": "sampling_params",
    "Engine": "base",
    "EngineConfig": "config",
    "FakeEngine": "backends.fake",
    "NativeEngine": "backends.native.engine",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'types')}"), name)
