"""`RoutedEngine` presents all replicas of an endpoint as one engine. Its streams survive the loss of a replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.base import Engine, Prompt, StreamProgress
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
)
from raytide.core.errors import EngineDeadError, OverloadedError
from raytide.gateway.answers.answer_quality import AnswerQuality
from raytide.gateway.answers.shared_answers import Reuse, SharedAnswers
from raytide.gateway.replicas.prefill_pool import PrefillPool
from raytide.gateway.replicas.replica_set import Replica, ReplicaSet
from raytide.gateway.replicas.routing.prefix_index import join_keys
from raytide.gateway.replicas.routing.router import Route

T = TypeVar("T")

COLD_START_S = 300.0
"""The seconds for which a request waits while no replica of its endpoint takes requests, because replicas start or are
replaced.
"""
GIVES_WAY: ContextVar[bool] = ContextVar("GIVES_WAY", default=False)
"""True in a request that another API answers if no replica does; it therefore does not wait for a replica."""
_RESUME_S = 30.0
"""The least seconds for which a stream that has begun waits for a replica."""
_FULL_PAUSE_S = 0.2
_PAUSE_S = 0.02
_MAX_DEATHS = 3
"""The number of replicas that may die one after another while they serve a request, before its next token. The request
is then refused, because it may be what kills them.
"""


class _GoneError(Exception):
    """A replica died before it received a request."""


class RoutedEngine(Engine):
    """An engine that sends each request to one of an endpoint's replicas.

    If the replica refuses the request, or dies before the first token, another replica gets the request. If the replica
    dies later, another replica continues after the tokens that were already generated.
    """

    backend = "routed"

    def __init__(
        self,
        replicas: ReplicaSet,
        on_reuse: Callable[[Reuse], None] = lambda how: None,
        on_resume: Callable[[], None] = lambda: None,
        quality: AnswerQuality | None = None,
    ) -> None:
        self._replicas, self._on_resume = replicas, on_resume
        generate = self._generate if quality is None else quality.measured(self._generate, self._gives_logprobs)
        self.answers = SharedAnswers(generate, self._version, on_reuse)
        self._suspects = asyncio.Lock()
        self.prefill: PrefillPool | None = None
        """The replicas of another endpoint that compute this endpoint's long prompts; None if there are none."""
        self.patience_s = COLD_START_S
        """The time for which a request waits for a replica before its first token."""

    def _gives_logprobs(self) -> bool:
        return all("logprobs" in replica.info.features for replica in self._replicas.connected)

    async def start(self) -> EngineInfo:
        """Waits for the first replica and returns its EngineInfo."""
        return (await self._any()).info

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        return self.answers.generate(request)

    async def _generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        began_s = time.monotonic()
        progress, chunks = StreamProgress(request), 0
        full: set[str] = set()
        died_with: set[str] = set()
        is_asked = not request.may_be_running
        while True:
            resumed, before = progress.resumed(), chunks
            holder, is_asked = None if is_asked else await self._replicas.holder(request.rejoin_key), True
            replica, route = await self._choose(resumed, full, may_wait=chunks > 0, holder=holder)
            prefill: Route | None = None
            try:
                waited_s = 0.0 if chunks else time.monotonic() - began_s  # for a first token, which may have come
                if self.prefill is not None:
                    prefill = self.prefill.route(resumed, replica, route.cached_tokens)
                stream = self._generate_on(replica, route, resumed, waited_s, prefill, alone=bool(died_with))
                async with aclosing(stream):  # type: ignore[type-var]
                    async for chunk in stream:
                        progress.add(chunk)
                        chunks += 1
                        if prefill is not None and chunks == before + 1:
                            prefill.end(tokens=progress.token_ids)
                        if chunk.usage is None:
                            route.first_token()
                        else:  # what the other process found in its cache says nothing about this one's
                            found = _found(resumed, chunk) if prefill is None else None
                            route.end(cached_tokens=found, tokens=progress.token_ids)
                        yield chunk
                return
            except OverloadedError:
                full.add(replica.name)
            except _GoneError:
                pass
            except EngineDeadError:
                died_with = {*died_with, replica.name} if chunks == before else set()
                if len(died_with) >= _MAX_DEATHS or (chunks and "resume" not in replica.info.features):
                    raise
                if chunks:
                    self._on_resume()
                await asyncio.sleep(_PAUSE_S)
            finally:
                route.end()
                if prefill is not None:
                    prefill.end()

    async def _generate_on(
        self,
        replica: Replica,
        route: Route,
        request: GenRequest,
        waited_s: float,
        prefill: Route | None,
        *,
        alone: bool,
    ) -> AsyncIterator[GenChunk]:
        """Generates a request on one replica; its prompt is computed on the replica of `prefill`, if given.

        `alone` is for requests whose replica died. No other such request starts on any replica until this one has its
        first token, because one of the requests that died together may be the cause. Raises _GoneError if another
        request made the replica die meanwhile.
        """
        async with AsyncExitStack() as until_first_chunk:
            if alone:
                await until_first_chunk.enter_async_context(self._suspects)
                if not replica.takes_requests:
                    raise _GoneError
            prefill_at = self.prefill.address(prefill) if self.prefill and prefill else None
            keys = join_keys(route.keys)
            stream = replica.generate(request, waited_s, keys, prefill_at, new_tokens=route.new_tokens)
            async with aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    await until_first_chunk.aclose()
                    yield replace(chunk, replica=replica.name)

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        return await self._ask(lambda engine: engine.tokenize(text, pair, special=special))

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        return await self._ask(lambda engine: engine.pieces(tokens))

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        return await self._ask(lambda engine: engine.decode(prompts))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        return await self._ask(lambda engine: engine.chat_prompt(messages, tools, options))

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        return await self._ask(lambda engine: engine.embed(batch, lora=lora), lora)

    async def classify(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        return await self._ask(lambda engine: engine.classify(batch, lora=lora), lora)

    def token_bytes(self, token: int) -> bytes:
        return self._replicas.token_texts.get(token, b"")

    async def stats(self) -> EngineStats:
        """Returns the sums of the statistics that the replicas last reported."""
        total = EngineStats()
        for replica in self._replicas.connected:
            stats = replica.engine.status.stats
            if stats is not None:
                for name in _SUMMED:
                    setattr(total, name, getattr(total, name) + getattr(stats, name))
        return total

    async def abort(self, request_id: str) -> bool:
        return any([await replica.engine.abort(request_id) for replica in self._replicas.connected])

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def shutdown(self) -> None:
        """Closes the connections to the replicas. The replicas keep running."""
        await self._replicas.close()

    def _version(self, lora: str | None) -> str:
        """Returns a text with the versions of the weights and of the adapter of all ready replicas."""
        return " ".join(sorted({replica.version(lora) for replica in self._replicas.ready}))

    async def _any(self, lora: str | None = None) -> Replica:
        """Returns the ready replica with the adapter `lora` that has the fewest requests."""
        return min(await self._replicas.wait_ready(self._patience_s(), lora), key=lambda replica: replica.load)

    def _patience_s(self) -> float:
        """Returns how many seconds a request waits for a replica before its first token."""
        return 0.0 if GIVES_WAY.get() else self.patience_s

    async def _ask(self, question: Callable[[RemoteEngine], Awaitable[T]], lora: str | None = None) -> T:
        """Returns one replica's answer to `question`. If the replica dies or drains, another one is asked."""
        for _ in range(_MAX_DEATHS - 1):
            replica = await self._any(lora=lora)
            try:
                return await replica.ask(question)
            except EngineDeadError:
                continue
            except OverloadedError:
                if replica.takes_requests:  # it is full; one that drains has said so before it refused
                    raise
        return await (await self._any(lora=lora)).ask(question)

    async def _choose(
        self, request: GenRequest, full: set[str], *, may_wait: bool, holder: Replica | None
    ) -> tuple[Replica, Route]:
        """Returns a replica for the request and the route to it: `holder`, which has begun the request before, if it is
        given. Replicas in `full`, which refused the request, are not chosen.

        If all have refused, it waits for one if `may_wait`, because the client already has a part of the answer.
        """
        patience_s = max(self.patience_s, _RESUME_S) if may_wait else self._patience_s()
        deadline_s = time.monotonic() + patience_s
        first_output = request.resume[0].token_ids if request.resume else ()
        while True:
            if holder is not None:
                ready = [holder]
            else:
                ready = await self._replicas.wait_ready(patience_s, request.lora, has_begun=may_wait)
            open_to_it = {replica.name: replica for replica in ready if replica.name not in full}
            if open_to_it:
                route = self._replicas.router.route(
                    [] if isinstance(request.prompt, str) else [*request.prompt, *first_output],
                    [replica.routing_state() for replica in open_to_it.values()],
                    lora=request.lora,
                    cache_salt=request.salt,
                    session=request.session,
                )
                return open_to_it[route.replica], route
            if not may_wait or time.monotonic() > deadline_s:
                raise OverloadedError(f"all replicas of {self._replicas.endpoint} are full.", hint="Retry later.")
            full.clear()
            await asyncio.sleep(_FULL_PAUSE_S)


def _found(request: GenRequest, chunk: GenChunk) -> int | None:
    """Returns the number of prompt tokens that an engine found in its cache; None if it may not have looked up the
    whole prompt.
    """
    looked = not request.resume and request.sampling.prompt_logprobs is None
    return chunk.usage.cached_tokens if looked and chunk.usage is not None else None


_SUMMED = (
    "running",
    "waiting",
    "free_blocks",
    "num_blocks",
    "steps",
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "preemptions",
    "finished",
    "failed",
)
