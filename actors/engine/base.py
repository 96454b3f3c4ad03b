"""The `Engine` protocol: all that replicas, the router and tests see of an engine.

Implementations: `native.NativeEngine`, `fake.FakeEngine`. The conformance suite in tests/actors/engine/conformance
runs on each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from raytide.actors.engine.core import EngineInfo, EngineStats, GenChunk, GenRequest, Message

__all__ = ["Engine"]


class Engine(Protocol):
    """One model that serves many requests at once, from one asyncio event loop."""

    async def start(self) -> EngineInfo:
        """Load the model and begin to serve. Raises ConfigError or DataError when the model directory is unusable."""
        ...

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        """Stream one request; the last chunk carries `finish_reason`.

        Raises UsageError (bad or too long prompt), ConflictError (request id in use), OverloadedError (queue full or
        draining) before the first chunk, EngineError when this request fails. Closing the iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request now with finish reason "abort"; its blocks are free when this returns. False if it is not
        known.
        """
        ...

    async def tokenize(self, text: str) -> list[int]: ...

    async def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, by the model's chat template, ready for `generate`."""
        ...

    async def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and let those in flight end. True if all ended in time; the rest were aborted."""
        ...

    async def shutdown(self) -> None:
        """Abort what runs, stop, free the memory. Idempotent."""
        ...
