"""Computes equal requests only once: equal requests that are in flight share one stream. If the endpoint's spec asks
for it, answers are also cached for a while, for later equal requests.

Only requests whose answer is determined can be equal. They are greedy or seeded, and have the same prompt, parameters,
adapter, salt and weights. The salt contains the caller's team, so teams share nothing. Requests with tools may share an
answer as well, because the model only writes the tool calls and the client makes them.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from raytide.actors.engine.backends.remote.shared_stream import SharedStream, joined
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.actors.serving.openai_api.respond import KEPT
from raytide.core.objects.endpoint import AnswerCachePolicy

Reuse = Literal["in_flight", "cache"]
Generate = Callable[[GenRequest], AsyncIterator[GenChunk]]
MAX_TOKENS = 4096
"""The most tokens of a cached answer. A longer one, replayed at once, would arrive faster than a client reads."""
_TOKEN_BYTES, _CHUNK_BYTES = 40, 1000


class AnswerCache:
    """The cached answers of one endpoint, with the least recently used answer first. A policy of None turns the cache
    off."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._now_s = now_s
        self._policy: AnswerCachePolicy | None = None
        self._answers: OrderedDict[bytes, tuple[float, int, list[GenChunk]]] = OrderedDict()

    def set_policy(self, policy: AnswerCachePolicy | None) -> None:
        self._policy = policy
        self._evict()

    def find(self, key: bytes) -> list[GenChunk] | None:
        """Returns the chunks of a cached answer, one for each sample. Returns None if the answer is not in the cache or
        has expired."""
        if self._policy is None or (found := self._answers.get(key)) is None:
            return None
        at_s, _, chunks = found
        if self._now_s() - at_s >= self._policy.ttl_s:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        return chunks

    def add(self, key: bytes, chunks: Sequence[GenChunk]) -> None:
        """Adds a complete answer to the cache, unless it has more than `MAX_TOKENS` tokens or the cache is off. Evicts
        the least recently used answers beyond the cache's size.
        """
        if self._policy is None or key in self._answers or sum(len(chunk.token_ids) for chunk in chunks) > MAX_TOKENS:
            return
        kept = [replace(chunk, replica=KEPT) for chunk in joined(chunks)]
        size = sum(_CHUNK_BYTES + _TOKEN_BYTES * len(each.token_ids) + 4 * len(each.text) for each in kept)
        self._answers[key] = self._now_s(), size, kept
        self.num_bytes += size
        self._evict()

    def _evict(self) -> None:
        most = 0 if self._policy is None else self._policy.max_mb << 20
        while self.num_bytes > most:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: bytes) -> None:
        _, size, _ = self._answers.pop(key)
        self.num_bytes -= size


def answer_key(request: GenRequest, version: str) -> bytes | None:
    """Returns a key that is equal for requests with the same answer. Returns None if a repeated request may get another
    answer. Returns None for answers with log probabilities as well, because these would take much more memory than the
    tokens.
    """
    params = request.sampling
    if not (params.is_greedy or params.seed is not None) or request.resume:
        return None
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return None
    how = (version, params, request.lora, request.salt, request.priority, request.deadline_s)
    try:
        prompt = request.prompt if isinstance(request.prompt, str) else array("q", request.prompt).tobytes()
    except (OverflowError, TypeError):
        return None
    return blake2b(repr((how, prompt)).encode(errors="backslashreplace"), digest_size=32).digest()


@dataclass(slots=True)
class _Stream(SharedStream):
    is_kept: bool = False
    """True once a reader's answer is to be cached."""

    @property
    def is_joinable(self) -> bool:
        """False once the stream is complete, or so long that a new reader would get too much at once."""
        return self.tokens <= MAX_TOKENS and not self.is_complete


class SharedAnswers:
    """Lets equal requests to one endpoint share answers. A request joins a running stream, or takes its answer from the
    cache. `version` returns the version of the weights and of an adapter. Use this object from a single event loop
    only.
    """

    def __init__(
        self, generate: Generate, version: Callable[[str | None], str], on_reuse: Callable[[Reuse], None]
    ) -> None:
        self.cache = AnswerCache()
        self._generate, self._version, self._on_reuse = generate, version, on_reuse
        self._streams: dict[bytes, _Stream] = {}

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        key = answer_key(request, self._version(request.lora))
        return self._generate(request) if key is None else self._answer(key, request)

    async def _answer(self, key: bytes, request: GenRequest) -> AsyncIterator[GenChunk]:
        if request.keep_answer and (kept := self.cache.find(key)) is not None:
            self._on_reuse("cache")
            for chunk in kept:
                yield replace(chunk, request_id=request.request_id, token_ids=list(chunk.token_ids))
            return
        stream = self._streams.get(key)
        if stream is None or not stream.is_joinable:
            stream = self._streams[key] = _Stream()
            stream.task = asyncio.create_task(self._compute(key, stream, request))
        else:
            self._on_reuse("in_flight")
        stream.readers += 1
        stream.is_kept |= request.keep_answer
        try:
            async for chunk in stream.read():
                is_own = chunk.request_id == request.request_id
                yield chunk if is_own else replace(chunk, request_id=request.request_id)
        finally:
            stream.readers -= 1
            if not stream.readers:
                await self._end(key, stream)

    async def _end(self, key: bytes, stream: _Stream) -> None:
        """Ends a stream without readers; the engine has freed the stream's blocks when this returns."""
        if self._streams.get(key) is stream:
            del self._streams[key]
        await stream.stop()

    async def _compute(self, key: bytes, stream: _Stream, request: GenRequest) -> None:
        try:
            async with aclosing(self._generate(request)) as chunks:  # type: ignore[type-var]
                await stream.fill(chunks)
            if stream.is_kept and not stream.first and stream.failure is None:
                self.cache.add(key, stream.chunks)
        finally:
            if self._streams.get(key) is stream:
                del self._streams[key]
