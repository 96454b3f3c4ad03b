"""Sends copies of requests to a challenger. Users never get the challenger's answers.

The answers to greedy requests are compared with the champion's answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from copy import copy
from typing import Any, cast

from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.actors.serving.openai_api.admission import Anybody, RequestCaller
from raytide.actors.serving.openai_api.respond import failed
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest
from raytide.gateway.rollouts.counting import RevisionTally

_MOST_COPIES = 32
"""The most copies that run at once in a gateway; further requests are not copied."""
_LONGEST_S = 300.0


class RecordedEngine:
    """A wrapper of an engine that records the output of one HTTP request.

    `on_begin` is called once, at the first call of `generate`. The server makes that call only after it has admitted
    the request.
    """

    def __init__(self, engine: Engine, on_begin: Callable[[RecordedEngine], None]) -> None:
        self._engine, self._on_begin = engine, on_begin
        self._has_begun = False
        self.texts: defaultdict[int, str] = defaultdict(str)
        """The text of each choice, by its number in the response."""
        self.is_greedy = self.is_whole = True
        self.is_over = asyncio.Event()
        self._open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        if not self._has_begun:
            self._has_begun = True
            self._on_begin(self)
        self._open += 1
        self.is_greedy &= request.sampling.is_greedy
        first = int(request.request_id.rpartition("-")[2]) * request.sampling.n
        is_whole = False
        try:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    self.texts[first + chunk.index] += chunk.text
                    is_whole = chunk.usage is not None
                    yield chunk
        finally:
            self._open -= 1
            self.is_whole &= is_whole
            if not self._open:
                self.is_over.set()


class ShadowTraffic:
    """Sends copies of one gateway process's requests to challengers, and compares the answers with the champions'
    answers.
    """

    def __init__(self) -> None:
        self._copies: set[asyncio.Task[None]] = set()

    def copied(
        self,
        champion: Server,
        challenger: Server,
        body: CompletionRequest | ChatRequest,
        caller: RequestCaller,
        tally: RevisionTally,
    ) -> Server:
        """Returns a server that answers the request as `champion` does. Once the request has been admitted, the server
        also starts a copy of the request on the challenger.

        The returned server is the champion's, with an engine that records the answer for the comparison. If too many
        copies run already, no copy starts.
        """

        def begin(recorded: RecordedEngine) -> None:
            if len(self._copies) < _MOST_COPIES:
                self._copies.add(task := asyncio.create_task(_run(challenger, body, _Copier(caller), recorded, tally)))
                task.add_done_callback(self._copies.discard)

        server = copy(champion)
        server.engine = cast(Engine, RecordedEngine(champion.engine, begin))
        return server

    async def close(self) -> None:
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)


class _Copier(Anybody):
    """The caller of a copied request. It pays nothing, and its prompts are cached separately, under the team of the
    original request's sender.
    """

    def __init__(self, caller: RequestCaller) -> None:
        self.team, self.is_known = caller.team, caller.is_known


async def _run(
    server: Server,
    body: CompletionRequest | ChatRequest,
    caller: RequestCaller,
    original: RecordedEngine,
    tally: RevisionTally,
) -> None:
    track = server.metrics.track("shadow")
    texts: defaultdict[int, str] = defaultdict(str)
    try:
        async with asyncio.timeout(_LONGEST_S):
            generation = await server.generate(body, caller)
            try:
                async for batch in generation.batches():
                    for delta in batch:
                        texts[delta.index] += delta.text
                        track.tokens(delta.index, len(delta.token_ids))
            finally:
                generation.cancel()
            track.finish("ok")
            await original.is_over.wait()
    except Exception as error:  # its own failures are what it is there to find
        failed(error, track)
        return
    if original.is_greedy and original.is_whole and not getattr(body, "echo", False):
        is_equal = texts == original.texts
        tally.compared += 1
        tally.equal += is_equal
        server.metrics.shadowed.add("true" if is_equal else "false")
