"""The choices of one HTTP request, generated in parallel and merged into batches in order of arrival.

For each prompt, a separate task reads the engine's output. `cancel()` only cancels these tasks. It therefore needs
no await, and it works even in a request that has been cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from raytide.actors.engine.base import Engine
from raytide.actors.engine.limits import MAX_PENDING_ENTRIES
from raytide.actors.engine.types import FinishReason, GenChunk, GenRequest, Timing, TokenUsage, as_request_error
from raytide.actors.serving.openai_api.admission import Grant
from raytide.actors.serving.openai_api.chat.tool_choice import NO_TOOLS, ToolUse
from raytide.actors.serving.openai_api.logprobs import ScoredToken, TokenBytes
from raytide.core.errors import EngineError


@dataclass(slots=True)
class ChoiceDelta:
    """New text of one choice. Deltas that arrive while the client is slow are joined. `usage` is set on the delta that
    ends the last choice of a prompt, and covers all choices of that prompt.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""
    """The stop string that ended the choice; empty if none did."""
    usage: TokenUsage | None = None
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    """The prompt's log probabilities, if the prompt is not echoed."""


class GenerationStream:
    """The merged streams of a request's prompts. Choice i of prompt p has the index p * n + i, as in OpenAI's API.

    `echoes` has one text for each prompt. Each choice of the prompt begins with that text. `tool_use` says how to parse
    the output. `grant` is the caller's admission, which the reader of the stream must settle.

    The amount of unread output is limited. If the client reads too slowly, the generation fails.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenRequest],
        echoes: Sequence[str],
        tool_use: ToolUse = NO_TOOLS,
        grant: Grant | None = None,
        *,
        max_pending: int = MAX_PENDING_ENTRIES,
    ) -> None:
        self.token_bytes: TokenBytes = engine.token_bytes
        self.tool_use, self.grant = tool_use, grant
        self.prompts = [request.prompt for request in requests if not isinstance(request.prompt, str)]
        self.prompt_tokens = sum(map(len, self.prompts))
        self.sampling = requests[0].sampling
        self.replica = ""
        """The replica that answers; empty until a router has named it."""
        self.timings: list[Timing] = []
        """The times in the engine of the prompts that have ended."""
        self._requests = requests
        self._n = requests[0].sampling.n
        self.choices = self._n * len(requests)
        self._open = len(requests)
        self._is_echoed = any(echoes)
        self._echoes = {index: echo for index in range(self.choices) if (echo := echoes[index // self._n])}
        self._deltas: dict[int, ChoiceDelta] = {}
        self._pending = 0
        self._max_pending = max_pending
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._drain(engine, i, request)) for i, request in enumerate(requests)]

    async def batches(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yields batches until every choice has finished. A batch has one delta for each choice with new output.

        Raises the engine's error, or EngineError if the engine ended a choice (drain, failure). Text that arrived
        before a failure is yielded first.
        """
        while self._open or self._deltas or self._failure:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas, self._pending = list(self._deltas.values()), {}, 0
            failure = self._failure
            if deltas:
                yield deltas
            if failure is not None:
                raise failure

    def cancel(self) -> None:
        """Aborts the choices that still run, and thereby closes the engine's iterators. The engine then frees the KV
        cache blocks of these choices.
        """
        for task in self._tasks:
            task.cancel()

    def _add_chunk(self, place: int, chunk: GenChunk) -> None:
        if chunk.finish_reason in ("abort", "error"):
            raise EngineError(f"request {chunk.request_id} was ended by the server.", hint="Send it again.")
        if chunk.usage is not None:
            self._open -= 1
            self.timings += [chunk.timing] if chunk.timing is not None else []
        self.replica = chunk.replica or self.replica
        index = place * self._n + chunk.index
        delta = self._deltas.setdefault(index, ChoiceDelta(index))
        delta.text += self._echoes.pop(index, "") + chunk.text
        delta.token_ids += chunk.token_ids
        delta.finish_reason, delta.usage, delta.stop = chunk.finish_reason, chunk.usage, chunk.stop
        if chunk.prompt_logprobs is not None:
            scored = delta.logprobs if self._is_echoed else delta.prompt_logprobs
            scored += zip(self._requests[place].prompt, chunk.prompt_logprobs, strict=True)  # type: ignore[arg-type]
        delta.logprobs += [(each.token_id, each) for each in chunk.logprobs or ()]
        self._pending += len(chunk.token_ids) + sum(len(each.top) for each in chunk.logprobs or ())
        if self._pending > self._max_pending:
            raise EngineError("the stream was read more slowly than it was generated.", hint="Read the stream faster.")

    async def _drain(self, engine: Engine, place: int, request: GenRequest) -> None:
        try:
            async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if self._failure is not None:
                        return
                    self._add_chunk(place, chunk)
                    self._news.set()
        except BaseException as error:  # without this the client would wait for ever
            self._failure = self._failure or as_request_error(error)
            self._news.set()
