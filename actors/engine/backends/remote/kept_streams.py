"""Keeps the streams of requests with a `rejoin_key`. A client that lost its connection can get the same answer again,
and the engine need not compute it twice.

Such a request runs on when its connection is lost, and its answer is kept here for a while. A later request with the
same key gets the same stream from its beginning, whether the engine still computes the answer or has finished. Answers
that failed, were aborted or have more than MAX_ENTRIES tokens and log probabilities are not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from raytide.actors.engine.backends.remote.shared_stream import SharedStream, joined
from raytide.actors.engine.backends.remote.wire import scores_of
from raytide.actors.engine.limits import MAX_PENDING_ENTRIES
from raytide.actors.engine.types import GenChunk, GenRequest

KEPT_S = 900.0
"""The seconds for which a finished answer is kept: longer than a gateway or a head takes to be replaced."""
MAX_BYTES = 64 << 20
"""The most memory of finished answers; the oldest go first."""
MAX_ENTRIES = MAX_PENDING_ENTRIES // 2
"""The most tokens and log probabilities of an answer that is given to a second client. More of them at once would
arrive faster than a client reads.
"""
_CHUNK_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 1000, 40, 200


class KeptStreams:
    """The kept streams of one engine. Use it from one event loop."""

    def __init__(
        self,
        generate: Callable[[GenRequest, float], AsyncIterator[GenChunk]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generate, self._now_s = generate, now_s
        self._running: dict[str, SharedStream] = {}
        self._finished: dict[str, tuple[float, int, SharedStream]] = {}
        """The finished streams by their keys, oldest first, each with its time and its size in bytes."""
        self._num_bytes = 0

    def holds(self, key: str) -> bool:
        """Returns whether a stream with this key runs or is kept."""
        self._evict()
        return key in self._running or key in self._finished

    async def generate(
        self, request: GenRequest, waited_s: float, is_lost: Callable[[], bool]
    ) -> AsyncGenerator[GenChunk]:
        """Streams the answer to a request. If a stream with the request's key exists, yields that stream from its
        beginning. If that stream has become too long to be read from its beginning, stops it and computes the request
        again.

        When the last reader leaves on purpose, the request is aborted. When the last reader's connection was lost
        (`is_lost()`), the request continues.
        """
        stream = self._stream(request.rejoin_key)
        if stream is not None and not _can_be_joined(stream, request):
            await stream.stop()
            stream = None
        if stream is None:
            stream = self._begin(request, waited_s)
        stream.readers += 1
        try:
            async for chunk in stream.read():
                yield chunk
        finally:
            stream.readers -= 1
            if not (stream.readers or is_lost()):
                await stream.stop()

    async def stop(self, key: str) -> None:
        """Stops the running stream with this key, if there is one. The server calls this method when a client has lost
        the stream and now requests the remaining output.
        """
        if (stream := self._running.get(key)) is not None:
            await stream.stop()

    async def close(self) -> None:
        for stream in list(self._running.values()):
            await stream.stop()

    def _stream(self, key: str) -> SharedStream | None:
        self._evict()
        if key in self._running:
            return self._running[key]
        return self._finished[key][2] if key in self._finished else None

    def _begin(self, request: GenRequest, waited_s: float) -> SharedStream:
        key, stream = request.rejoin_key, SharedStream()

        async def fill() -> None:
            async with aclosing(self._generate(request, waited_s)) as source:  # type: ignore[type-var]
                await stream.fill(source)

        self._running[key] = stream
        stream.task = asyncio.create_task(fill())
        stream.task.add_done_callback(lambda _: self._end(request, stream))
        return stream

    def _end(self, request: GenRequest, stream: SharedStream) -> None:
        key = request.rejoin_key
        if self._running.get(key) is not stream:
            return
        del self._running[key]
        is_whole = stream.is_complete and stream.failure is None and stream.chunks and not _is_cut_off(stream)
        if not (is_whole and _can_be_joined(stream, request)):
            return
        chunks = joined(stream.chunks)
        size = sum(map(_size, chunks))
        self._num_bytes += size - self._finished.pop(key, (0.0, 0, stream))[1]
        self._finished[key] = self._now_s(), size, SharedStream(chunks, is_complete=True)
        self._evict()

    def _evict(self) -> None:
        while self._finished:
            key, (ended_s, size, _) = next(iter(self._finished.items()))
            if self._num_bytes <= MAX_BYTES and self._now_s() - ended_s < KEPT_S:
                return
            del self._finished[key]
            self._num_bytes -= size


def _can_be_joined(stream: SharedStream, request: GenRequest) -> bool:
    return not stream.first and stream.tokens * (1 + (request.sampling.logprobs or 0)) <= MAX_ENTRIES


def _is_cut_off(stream: SharedStream) -> bool:
    """Returns whether the engine has ended the request before its answer was whole."""
    return any(chunk.finish_reason in ("abort", "error") for chunk in stream.chunks)


def _size(chunk: GenChunk) -> int:
    entries = sum(1 + len(each.top) for each in scores_of(chunk))
    return _CHUNK_BYTES + _TOKEN_BYTES * len(chunk.token_ids) + 4 * len(chunk.text) + _LOGPROB_BYTES * entries
