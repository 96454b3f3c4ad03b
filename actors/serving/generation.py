"""The choices of one HTTP request, generated side by side and merged into batches in the order they come.

Each choice is drained by a task of its own, so that `cancel()` needs no await: it works inside a cancelled request too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from raytide.actors.engine.base import Engine
from raytide.actors.engine.core import FinishReason, GenChunk, GenRequest, Usage
from raytide.core.errors import EngineError

__all__ = ["Generation", "Piece"]


@dataclass(slots=True)
class Piece:
    """New text of one choice; what came while the client was slow is joined."""

    index: int
    text: str
    tokens: int
    finish_reason: FinishReason | None
    usage: Usage | None


class Generation:
    def __init__(self, engine: Engine, requests: Sequence[GenRequest]) -> None:
        self._queue: asyncio.Queue[tuple[int, GenChunk | Exception]] = asyncio.Queue()
        self.choices = self._open = len(requests)
        self._tasks = [asyncio.create_task(self._drain(engine, i, request)) for i, request in enumerate(requests)]

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Until every choice has finished: all that came since the last batch, one piece for each choice that moved.

        Raises what the engine raised; a choice that the engine gave up (drain, failure) is an EngineError.
        """
        while self._open:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            pieces, failure = self._merge(items)
            if pieces:
                yield pieces
            if failure is not None:
                raise failure

    def cancel(self) -> None:
        """Abort what still runs. The engine frees its blocks as the iterators close."""
        for task in self._tasks:
            task.cancel()

    def _merge(self, items: Sequence[tuple[int, GenChunk | Exception]]) -> tuple[list[Piece], Exception | None]:
        """The pieces up to the first failure, and that failure: what was said before it still reaches the client."""
        pieces: dict[int, Piece] = {}
        for index, item in items:
            if isinstance(item, Exception):
                return list(pieces.values()), item
            if item.finish_reason in ("abort", "error"):
                failure = EngineError(f"request {item.request_id} was ended by the server.", hint="Send it again.")
                return list(pieces.values()), failure
            self._open -= item.finish_reason is not None
            piece = pieces.setdefault(index, Piece(index, "", 0, None, None))
            piece.text += item.text
            piece.tokens += len(item.token_ids)
            piece.finish_reason, piece.usage = item.finish_reason, item.usage
        return list(pieces.values()), None

    async def _drain(self, engine: Engine, index: int, request: GenRequest) -> None:
        try:
            async for chunk in engine.generate(request):
                self._queue.put_nowait((index, chunk))
        except Exception as error:
            self._queue.put_nowait((index, error))
