"""An engine without a model: it says the same words over and over, at once or at a fixed rate. For router and
platform tests.

One token is one byte of UTF-8, so that token counts and texts can be predicted by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from raytide.actors.engine.core import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenChunk,
    GenRequest,
    Message,
    Timing,
    Usage,
)
from raytide.actors.engine.stops import StopScanner
from raytide.core.errors import ConflictError, EngineError, OverloadedError, UsageError

__all__ = ["FakeEngine"]


class FakeEngine:
    """`tokens_per_s` None answers as fast as the event loop turns. A prompt that contains `fail_on` fails with
    EngineError.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        reply: str = "tide ",
        tokens_per_s: float | None = None,
        max_model_len: int = 4096,
        max_running: int = 64,
        max_waiting: int = 256,
        fail_on: str | None = None,
    ) -> None:
        self._model = model
        self._reply = reply.encode("ascii")
        self._pause_s = 1.0 / tokens_per_s if tokens_per_s else 0.0
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._fail_on = fail_on
        self._places = asyncio.Semaphore(max_running)
        self._stats = EngineStats(num_blocks=max_running, free_blocks=max_running)
        self._aborts: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting = False

    async def start(self) -> EngineInfo:
        self._accepting = True
        return EngineInfo(
            model=self._model,
            backend="fake",
            max_model_len=self._max_model_len,
            block_size=self._max_model_len,
            num_blocks=self._stats.num_blocks,
            features=frozenset({"stop_strings"}),
        )

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        prompt = self._admit(request)
        aborted = self._aborts[request.request_id] = asyncio.Event()
        self._idle.clear()
        self._stats.waiting += 1
        queued = True
        try:
            async with self._places:
                self._stats.waiting -= 1
                queued = False
                self._stats.running += 1
                self._stats.free_blocks -= 1
                try:
                    async for chunk in self._speak(request, prompt, aborted):
                        yield chunk
                finally:
                    self._stats.running -= 1
                    self._stats.free_blocks += 1
        finally:
            self._stats.waiting -= queued
            self._stats.finished += 1
            del self._aborts[request.request_id]
            if not self._aborts:
                self._idle.set()

    def _admit(self, request: GenRequest) -> bytes:
        if not self._accepting or self._stats.waiting >= self._max_waiting:
            raise OverloadedError(f"engine {self._model} takes no more requests now.", hint="Retry later.")
        if request.request_id in self._aborts:
            raise ConflictError(
                f"request {request.request_id} is already running.", hint="Give each request its own id."
            )
        if isinstance(request.prompt, str):
            prompt = request.prompt.encode()
        else:
            prompt = bytes(token % 256 for token in request.prompt)
        if not 0 < len(prompt) < self._max_model_len:
            raise UsageError(
                f"request {request.request_id}: prompt of {len(prompt)} tokens; the model takes 1 to "
                f"{self._max_model_len - 1}.",
                hint="Send a shorter prompt, but not an empty one.",
            )
        return prompt

    async def _speak(self, request: GenRequest, prompt: bytes, aborted: asyncio.Event) -> AsyncIterator[GenChunk]:
        if self._fail_on and self._fail_on.encode() in prompt:
            self._stats.failed += 1
            raise EngineError(f"request {request.request_id} failed: its prompt holds {self._fail_on!r}.")
        params, loop = request.sampling, asyncio.get_running_loop()
        room = self._max_model_len - len(prompt)
        limit = min(params.max_tokens or room, room)
        scanner, started = StopScanner(params.stop), loop.time()
        reason: FinishReason | None = None
        count = 0
        while reason is None:
            await asyncio.sleep(self._pause_s)
            self._stats.steps += 1
            text, tokens = "", []
            if aborted.is_set():
                reason = "abort"
            else:
                token = self._reply[count % len(self._reply)]
                count += 1
                self._stats.generated_tokens += 1
                tokens, text = [token], scanner.push(chr(token))
                if scanner.stopped or token in params.stop_token_ids:
                    reason = "stop"
                elif count == limit:
                    reason = "length"
            if reason is None:
                yield GenChunk(request.request_id, tokens, text)
                continue
            self._stats.prompt_tokens += len(prompt)
            yield GenChunk(
                request.request_id,
                tokens,
                text + scanner.flush(),
                reason,
                Usage(len(prompt), count),
                Timing(0.0, 0.0, loop.time() - started),
            )

    async def abort(self, request_id: str) -> bool:
        event = self._aborts.get(request_id)
        if event is None:
            return False
        event.set()
        return True

    async def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    async def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        return list("\n".join(f"{message.role}: {message.content}" for message in messages).encode())

    async def stats(self) -> EngineStats:
        return self._stats

    async def drain(self, timeout_s: float) -> bool:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            await self.shutdown()
            return False
        return True

    async def shutdown(self) -> None:
        self._accepting = False
        for event in self._aborts.values():
            event.set()
