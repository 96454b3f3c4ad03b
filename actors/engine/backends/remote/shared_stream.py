"""A stream of chunks with any number of readers. Every reader gets the stream from its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from raytide.actors.engine.limits import MAX_PENDING_ENTRIES
from raytide.actors.engine.types import GenChunk, TokenLogprobs, as_request_error
from raytide.core.errors import EngineError

_TURN_CHUNKS = 256


@dataclass(slots=True)
class SharedStream:
    """A stream of chunks that several readers share. `chunks` begins with chunk number `first`; earlier chunks were
    dropped. Use it from one event loop.
    """

    chunks: list[GenChunk] = field(default_factory=list)
    first: int = 0
    tokens: int = 0
    readers: int = 0
    failure: Exception | None = None
    is_complete: bool = False
    task: asyncio.Task[None] | None = None
    """The task that fills the stream."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def fill(self, source: AsyncIterator[GenChunk]) -> None:
        """Adds the chunks of `source` until `source` ends. If `source` fails, readers get the chunks before the
        failure, then the error.
        """
        try:
            async for chunk in source:
                self._add(chunk)
                if len(self.chunks) % _TURN_CHUNKS == 0:
                    await asyncio.sleep(0)  # what waits in the connection must not outrun the readers
        except asyncio.CancelledError:
            self.failure = EngineError("the stream was ended by the server.", hint="Send the request again.")
            raise
        except BaseException as error:
            self.failure = as_request_error(error)
        finally:
            self.is_complete = True
            self._wake()

    async def read(self) -> AsyncIterator[GenChunk]:
        """Yields all chunks of the stream, then raises the stream's failure, if any. Raises EngineError if chunks were
        dropped before this reader read them.
        """
        at = 0
        while True:
            while at < self.first + len(self.chunks):
                if at < self.first:
                    raise EngineError("the stream was read more slowly than it was generated.", hint="Read faster.")
                at += 1
                yield self.chunks[at - 1 - self.first]
            if self.failure is not None:
                raise self.failure
            if self.is_complete:
                return
            self._waiting.append(waiter := asyncio.get_running_loop().create_future())
            await waiter

    async def stop(self) -> None:
        """Ends a stream that is not complete. The source is closed when this call returns."""
        if self.task is not None and not self.is_complete:
            self.task.cancel()
            await asyncio.wait({self.task})

    def _add(self, chunk: GenChunk) -> None:
        self.chunks.append(chunk)
        self.tokens += len(chunk.token_ids)
        if len(self.chunks) > MAX_PENDING_ENTRIES:
            del self.chunks[: MAX_PENDING_ENTRIES // 2]
            self.first += MAX_PENDING_ENTRIES // 2
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def joined(chunks: Sequence[GenChunk]) -> list[GenChunk]:
    """Joins the chunks of a complete answer into one chunk for each sample. The last of these chunks has the usage."""
    samples: dict[int, list[GenChunk]] = {}
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
    found = [
        replace(
            each[-1],
            token_ids=[token for chunk in each for token in chunk.token_ids],
            text="".join(chunk.text for chunk in each),
            logprobs=_joined_logprobs(each),
            prompt_logprobs=next((chunk.prompt_logprobs for chunk in each if chunk.prompt_logprobs is not None), None),
        )
        for each in samples.values()
    ]
    return sorted(found, key=lambda chunk: chunk.usage is not None)


def _joined_logprobs(chunks: Sequence[GenChunk]) -> tuple[TokenLogprobs, ...] | None:
    scored = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return tuple(each for logprobs in scored for each in logprobs) if scored else None
