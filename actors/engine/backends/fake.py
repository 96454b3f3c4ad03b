"""An engine without a model, for tests of the router and the platform. Its text comes from `fake_generator.py`.

It answers at once or at a fixed rate. Its queue, priorities, prefix cache, pauses and KV transfers behave like those of
the native engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raytide.actors.engine.backends.fake_generator import (
    VOCAB_SIZE,
    CannedGenerator,
    PrioritySemaphore,
    Prompts,
    direction,
)
from raytide.actors.engine.base import Engine, Prompt, aborted_chunks, check_features, check_resume
from raytide.actors.engine.kv_cache.handle import KvHandle, KvHeader
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    Feature,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
    SampleProgress,
    Timing,
    TokenUsage,
)
from raytide.core.errors import ConflictError, EngineDeadError, EngineError, NotFoundError, OverloadedError, UsageError

_FEATURES: frozenset[Feature] = frozenset(
    (
        "embeddings",
        "kv_transfer",
        "logprobs",
        "lora",
        "min_tokens",
        "n",
        "pause",
        "prefix_cache",
        "priority",
        "resume",
        "sleep",
        "stop_strings",
        "weights_swap",
    )
)


@dataclass(slots=True)
class _Live:
    request: GenRequest
    prompt: bytes
    voices: list[CannedGenerator]
    place: asyncio.Future[bool]
    """The future's result is False if the request was aborted while it waited for a place."""
    aborted: bool = False


class FakeEngine(Engine):
    """An engine without a model, for tests: it generates canned tokens at a set speed.

    If `tokens_per_s` is None, it generates as fast as the event loop runs. A prompt that contains `fail_on` fails with
    EngineError. A prompt that contains `die_on` ends the engine, as the death of a real engine's thread would.

    `kv_tokens` is the number of KV blocks that the engine reports. A block holds one token. Each generated token takes
    a block, so the cache fills even if no new requests arrive. A full cache stops no request. If `kv_tokens` is 0, the
    engine reports `max_running` blocks, and each running request takes one.
    """

    backend = "fake"

    def __init__(
        self,
        *,
        model: str = "fake",
        reply: str = "tide ",
        tokens_per_s: float | None = None,
        max_model_len: int = 4096,
        max_running: int = 64,
        max_waiting: int = 256,
        kv_tokens: int = 0,
        fail_on: str | None = None,
        die_on: str | None = None,
    ) -> None:
        self._model = model
        self._reply = reply.encode("ascii")
        self._pause_s = 1.0 / tokens_per_s if tokens_per_s else 0.0
        self._max_model_len = max_model_len
        self._max_running, self._max_waiting = max_running, max_waiting
        self._fail_on, self._die_on = fail_on, die_on
        self._is_dead = False
        self._kv_tokens = kv_tokens
        self._places = PrioritySemaphore(max_running)
        self._stats = EngineStats(num_blocks=max_running, free_blocks=max_running)
        self._live: dict[str, _Live] = {}
        self._served = Prompts(max_running)
        self._loras: dict[str, str] = {}
        self._loaded = 0
        self._version = "fake-1"
        self._going, self._idle = asyncio.Event(), asyncio.Event()
        self._going.set()
        self._idle.set()
        self._accepting = False

    async def start(self) -> EngineInfo:
        self._accepting = True
        return EngineInfo(
            model=self._model,
            backend=self.backend,
            max_model_len=self._max_model_len,
            block_size=1 if self._kv_tokens else self._max_model_len,
            num_blocks=self._kv_tokens or self._stats.num_blocks,
            features=_FEATURES,
            weights_version=self._version,
            max_running=self._max_running,
            max_waiting=self._max_waiting,
        )

    def import_kv(self, handle: KvHandle, request: GenRequest) -> AsyncIterator[GenChunk]:
        handle.check_fits(self._header(request, [], 0))
        tokens = tuple(handle.header.tokens[handle.header.prompt_len :])
        return self.generate(replace(request, resume=(SampleProgress(tokens),)))

    async def export_kv(self, request_id: str) -> KvHandle:
        live = self._live.get(request_id)
        if live is None or len(live.voices) > 1:
            raise NotFoundError(f"no request {request_id} of one sample is here.", hint="It may have ended.")
        self._end(live)
        tokens = [*live.prompt, *live.voices[0].tokens]
        return KvHandle(self._header(live.request, tokens, len(live.prompt)), ())

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        live = self._live[request.request_id] = self._admit(request)
        self._idle.clear()
        queued_s = asyncio.get_running_loop().time()
        self._stats.waiting += 1
        try:
            try:
                has_place = await self._places.take(request.priority, live.place)
            finally:
                self._stats.waiting -= 1
            if not has_place:
                for chunk in aborted_chunks(request, len(live.prompt)):
                    yield chunk
                return
            self._stats.running += 1
            self._stats.free_blocks -= 1
            try:
                async for chunk in self._speak(live, queued_s):
                    yield chunk
            finally:
                self._stats.running -= 1
                self._stats.free_blocks += 1
                self._places.leave()
        finally:
            self._stats.finished += 1
            del self._live[request.request_id]
            if not self._live:
                self._idle.set()

    def _admit(self, request: GenRequest) -> _Live:
        self._check_alive()
        if not self._accepting or self._stats.waiting >= self._max_waiting:
            raise OverloadedError(f"engine {self._model} takes no more requests now.", hint="Retry later.")
        if request.request_id in self._live:
            raise ConflictError(
                f"request {request.request_id} is already running.", hint="Give each request its own id."
            )
        check_features(request, _FEATURES, self.backend)
        self._check_lora(request.lora)
        prompt = _bytes(request.prompt)
        room = self._max_model_len - len(prompt)
        if not 0 < len(prompt) < self._max_model_len:
            raise UsageError(
                f"request {request.request_id}: prompt of {len(prompt)} tokens; the model takes 1 to "
                f"{self._max_model_len - 1}.",
                hint="Send a shorter prompt, but not an empty one.",
            )
        check_resume(
            request, len(prompt), max_len=self._max_model_len, vocab_size=VOCAB_SIZE, stop_token_ids=frozenset()
        )
        voices = [CannedGenerator(request, i, self._reply, room) for i in range(request.sampling.n)]
        for voice, done in zip(voices, request.resume, strict=False):
            voice.replay(done)
        return _Live(request, prompt, voices, asyncio.get_running_loop().create_future())

    async def _speak(self, live: _Live, queued_s: float) -> AsyncIterator[GenChunk]:
        request, prompt, clock = live.request, live.prompt, asyncio.get_running_loop().time
        if self._fail_on and self._fail_on.encode() in prompt:
            self._stats.failed += 1
            raise EngineError(f"request {request.request_id} failed: its prompt holds {self._fail_on!r}.")
        if self._die_on and self._die_on.encode() in prompt:
            self._is_dead = True
            for other in self._live.values():
                self._end(other)
        self._check_alive()
        started_s = clock()
        cached = self._served.cached(request.lora, request.cache_salt, prompt)
        self._served.add(request.lora, request.cache_salt, prompt)
        while speaking := [voice for voice in live.voices if voice.finish_reason is None]:
            await asyncio.sleep(self._pause_s)
            while not (live.aborted or self._going.is_set()):
                await self._going.wait()
            self._check_alive()
            self._stats.steps += 1
            for voice in speaking:
                chunk = voice.abort() if live.aborted else voice.next()
                self._stats.generated_tokens += len(chunk.token_ids)
                if all(each.finish_reason for each in live.voices):
                    self._stats.prompt_tokens += len(prompt)
                    self._stats.cached_tokens += cached
                    count = sum(len(each.tokens) for each in live.voices)
                    timing = Timing(started_s - queued_s, 0.0, clock() - started_s)
                    chunk = replace(chunk, usage=TokenUsage(len(prompt), count, cached), timing=timing)
                yield chunk

    def _header(self, request: GenRequest, tokens: list[int], prompt_len: int) -> KvHeader:
        return KvHeader(
            model=self._model,
            weights_version=self._version,
            lora=request.lora,
            dtype="none",
            layout=[],
            block_size=self._max_model_len,
            tokens=tokens,
            prompt_len=prompt_len,
            num_computed=0,
            num_cached=0,
            seed=0,
        )

    async def abort(self, request_id: str) -> bool:
        live = self._live.get(request_id)
        if live is not None:
            self._end(live)
        return live is not None

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        return list((text + (pair or "")).encode())

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token % 256) for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token % 256])

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        lines = [f"{message.role}: {message.content}" for message in messages]
        shown = [f"{name}={value}" for name, value in options.template_kwargs.items()]
        return list("\n".join([*shown, *lines]).encode())

    def _check_alive(self) -> None:
        if self._is_dead:
            raise EngineDeadError(f"engine {self._model} has died.", hint="Retry elsewhere.")

    async def stats(self) -> EngineStats:
        self._check_alive()
        self._stats.adapters, self._stats.weights_version = dict(sorted(self._loras.items())), self._version
        if not self._kv_tokens:
            return replace(self._stats)
        held = sum(len(live.prompt) + sum(len(v.tokens) for v in live.voices) for live in self._live.values())
        return replace(self._stats, num_blocks=self._kv_tokens, free_blocks=max(0, self._kv_tokens - held))

    async def cached_prefix(self, token_ids: Sequence[int], *, lora: str | None = None, cache_salt: str = "") -> int:
        return self._served.cached(lora, cache_salt, _bytes(token_ids))

    async def pause(self) -> None:
        self._going.clear()
        self._stats.state = "paused"

    async def resume(self) -> None:
        if self._stats.state == "asleep":
            raise ConflictError("the engine sleeps.", hint="Wake it.")
        self._stats.state = "serving"
        self._going.set()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        self._going.clear()
        self._served.clear()
        self._stats.state = "asleep"

    async def wake(self) -> None:
        if self._stats.state == "asleep":
            self._stats.state = "serving"
            self._going.set()

    async def load_weights(self, source: str, version: str | None = None) -> str:
        self._version = version or source
        self._served.clear()
        return self._version

    async def load_lora(self, name: str, path: str) -> None:
        if name in self._loras:
            raise ConflictError(f"adapter {name} is loaded already.", hint="Unload it first.")
        self._loaded += 1
        self._loras[name] = f"{path}#{self._loaded}"

    async def unload_lora(self, name: str) -> None:
        if name not in self._loras:
            raise NotFoundError(f"adapter {name} is not loaded.")
        if any(live.request.lora == name for live in self._live.values()):
            raise ConflictError(f"requests use adapter {name}.", hint="Unload it when they have ended.")
        del self._loras[name]

    def _check_lora(self, name: str | None) -> None:
        if name is not None and name not in self._loras:
            raise NotFoundError(f"adapter {name} is not loaded.", hint="Load it first.")

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        self._check_alive()
        self._check_lora(lora)
        return [direction(_bytes(prompt)) for prompt in batch]

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
        for live in self._live.values():
            self._end(live)

    def _end(self, live: _Live) -> None:
        live.aborted = True
        if not live.place.done():
            live.place.set_result(False)
        self._going.set()  # even a paused engine lets its requests go
        if self._stats.state != "serving":
            self._going.clear()


def _bytes(prompt: Prompt) -> bytes:
    return prompt.encode() if isinstance(prompt, str) else bytes(token % 256 for token in prompt)
