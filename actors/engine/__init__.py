"""raytide's inference engine: paged KV, continuous batching, streaming. `docs/engine.md` follows a token through it.

Names load on first use, so that `raytide.actors.engine.scheduler` and the nouns need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytide.actors.engine.base import Engine
    from raytide.actors.engine.config import EngineConfig
    from raytide.actors.engine.core import (
        Completion,
        EngineInfo,
        EngineStats,
        GenChunk,
        GenRequest,
        Message,
        RequestOutput,
        TokenLogprobs,
    )
    from raytide.actors.engine.fake import FakeEngine
    from raytide.actors.engine.llm import LLM
    from raytide.actors.engine.native import NativeEngine
    from raytide.actors.engine.sampling_params import SamplingParams, Structured

__all__ = [
    "LLM",
    "Completion",
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
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "Structured": "sampling_params",
    "Engine": "base",
    "EngineConfig": "config",
    "FakeEngine": "fake",
    "NativeEngine": "native",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'core')}"), name)
