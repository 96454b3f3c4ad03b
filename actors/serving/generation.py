"""The choices of one HTTP request, generated side by side and merged into batches in the order they come.

Each prompt is drained by a task of its own, so that `cancel()` needs no await: it works inside a cancelled request too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from raytide.actors.engine.base import Engine
from raytide.actors.engine.core import FinishReason, GenChunk, GenRequest, Usage
from raytide.actors.engine.faults import contained
from raytide.actors.serving.logprobs import ScoredToken, TokenBytes
from raytide.core.errors import EngineError

__all__ = ["Generation", "Piece"]


@dataclass(slots=True)
class Piece:
    """New text of one choice; what came while the client was slow is joined. `usage` is of its prompt's choices
    together, with the last of them.
    """

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[ScoredToken] = field(default_factory=list)


class Generation:
    """Choice i of prompt p is number p * n + i, as OpenAI counts them. `echoes`: what the choices of each prompt begin
    with.
    """

    def __init__(self, engine: Engine, requests: Sequence[GenRequest], echoes: Sequence[str]) -> None:
        self.token_bytes: TokenBytes = engine.token_bytes
        self._queue: asyncio.Queue[tuple[int, GenChunk | Exception]] = asyncio.Queue()
        self._requests = requests
        self._n = requests[0].sampling.n
        self.prompts = len(requests)
        self.choices = self._n * len(requests)
        self._open = len(requests)
        self._echoes = {index: echo for index in range(self.choices) if (echo := echoes[index // self._n])}
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
        for place, item in items:
            if isinstance(item, Exception):
                return list(pieces.values()), item
            if item.finish_reason in ("abort", "error"):
                failure = EngineError(f"request {item.request_id} was ended by the server.", hint="Send it again.")
                return list(pieces.values()), failure
            self._open -= item.usage is not None
            index = place * self._n + item.index
            piece = pieces.setdefault(index, Piece(index))
            piece.text += self._echoes.pop(index, "") + item.text
            piece.tokens += len(item.token_ids)
            piece.finish_reason, piece.usage = item.finish_reason, item.usage
            if item.prompt_logprobs is not None:
                piece.logprobs += zip(self._requests[place].prompt, item.prompt_logprobs, strict=True)  # type: ignore[arg-type]
            piece.logprobs += [(each.token_id, each) for each in item.logprobs or ()]
        return list(pieces.values()), None

    async def _drain(self, engine: Engine, place: int, request: GenRequest) -> None:
        try:
            async for chunk in engine.generate(request):
                self._queue.put_nowait((place, chunk))
        except BaseException as error:  # a task that ends without a word would leave its client waiting for ever
            self._queue.put_nowait((place, contained(error)))
