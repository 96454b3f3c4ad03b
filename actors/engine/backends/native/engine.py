"""raytide's own engine behind the `Engine` protocol. The core runs in a thread of its own (`thread.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from uuid import uuid4

from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.input_processor import Prepared
from raytide.actors.engine.backends.native.output_processor import Output, PooledOutput, RequestFailure
from raytide.actors.engine.backends.native.thread import EngineThread
from raytide.actors.engine.base import Engine, Prompt, aborted_chunks, check_features, refuse
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.model.pooling import pooling_of
from raytide.actors.engine.sequence import PooledPrompt
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
)
from raytide.core.errors import ConflictError, EngineDeadError, EngineError, OverloadedError, RaytideError

if TYPE_CHECKING:
    from raytide.actors.engine.model.decoder import PagedDecoder
    from raytide.actors.engine.model.parallel.launcher import LocalMembers
    from raytide.actors.models.content import WeightsSource

T = TypeVar("T")

_ABORT_S = 10.0
"""The seconds for which `drain` waits for the requests that it aborts."""


class NativeEngine(Engine):
    """raytide's engine with one model in this process. Use it from the event loop that called `start`.

    `launcher` starts the other processes that `tensor_parallel` needs. None means that they start on this machine.
    """

    backend = "native"

    def __init__(self, config: EngineConfig, launcher: LocalMembers | None = None) -> None:
        self._config, self._launcher = config, launcher
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self._preparing: dict[str, asyncio.Future[Prepared]] = {}  # of requests that have not entered
        self._pooling = asyncio.Semaphore(config.max_running + min(config.max_running, config.max_waiting))
        """Bounds the pooled prompts that all callers together have in the core, so that the core's queue has space for
        other requests.
        """
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting = False
        self._tap: Callable[[list[Output]], list[Output]] = list
        self._thread: EngineThread | None = None
        self._core: EngineCore | None = None

    async def start(self) -> EngineInfo:
        if self._thread is not None:
            raise ConflictError("this engine has been started already.", hint="Make a new one.")
        self._thread = EngineThread(self._config, self._deliver, self._end, self._launcher)
        self._thread.tap = self._tap
        self._core = await self._thread.start()
        self._accepting = True
        return self._core.info

    def tap(self, take: Callable[[list[Any]], list[Any]]) -> None:
        self._tap = take
        if self._thread is not None:
            self._thread.tap = take

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        return cast(
            AsyncIterator[GenChunk],
            self._stream(request, lambda core, prompt, prepared: core.add(request, prompt, prepared)),
        )

    def import_kv(self, handle: KvHandle, request: GenRequest) -> AsyncIterator[GenChunk]:
        def enter(core: EngineCore, prompt: Sequence[int], prepared: Prepared) -> None:
            operations.import_kv(core, handle, request, prompt, prepared)

        return cast(AsyncIterator[GenChunk], self._stream(request, enter))

    async def export_kv(self, request_id: str) -> KvHandle:
        return await self._call(lambda core: operations.export_kv(core, request_id))

    async def abort(self, request_id: str) -> bool:
        if request_id in self._preparing:
            self._preparing[request_id].cancel()
            return True
        try:
            return await self._call(lambda core: core.abort(request_id))
        except EngineError:  # it has stopped: nothing is here
            return False

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        core = self._started()
        return await core.tokenizer.encode_off_loop(text, pair, enough=core.info.max_model_len, special=special)

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._started().tokenizer.pieces(tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._started().vocabulary.token_bytes(token)

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        core = self._started()
        tokenizer, enough = core.tokenizer, core.info.max_model_len
        return await tokenizer.pool.run(lambda: tokenizer.chat_prompt(messages, tools, options, enough=enough))

    async def stats(self) -> EngineStats:
        """Returns the engine's counters. Raises EngineDeadError when the thread has died."""
        core, thread = self._started(), self._thread
        assert thread is not None
        if thread.death is not None:
            raise copy(thread.death)
        return replace(core.stats(), pending_commands=thread.pending_commands, commands_done=thread.commands_done)

    async def cached_prefix(self, token_ids: Sequence[int], *, lora: str | None = None, cache_salt: str = "") -> int:
        return await self._call(lambda core: operations.cached_prefix(core, token_ids, lora, cache_salt))

    async def pause(self) -> None:
        await self._call(operations.pause)

    async def resume(self) -> None:
        await self._call(operations.resume)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        await self._call(lambda core: operations.sleep(core, level))

    async def wake(self) -> None:
        await self._call(operations.wake)

    async def load_weights(self, source: str, version: str | None = None) -> str:
        loading = asyncio.ensure_future(asyncio.to_thread(operations.read_weights, self._started(), source, version))
        try:
            model, weights = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the thread goes on, and other members would keep the weights
            loading.add_done_callback(_discard_weights)
            raise
        await self._call(lambda core: operations.use_weights(core, model, weights))
        return weights.version

    async def load_lora(self, name: str, path: str) -> None:
        await self._call(lambda core: operations.load_lora(core, name, path))

    async def unload_lora(self, name: str) -> None:
        await self._call(lambda core: operations.unload_lora(core, name))

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        pooling = await asyncio.to_thread(pooling_of, self._started().weights.model_dir)
        return await self._pool(batch, lora, lambda: PooledPrompt(pooling))

    async def classify(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        if not self._started().info.num_labels:
            refuse(self.backend, "classification")
        return await self._pool(batch, lora, lambda: PooledPrompt("last", classify=True))

    async def drain(self, timeout_s: float) -> bool:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            aborting = [asyncio.ensure_future(self.abort(request_id)) for request_id in list(self._streams)]
            if aborting:  # a thread that hangs aborts nothing
                await asyncio.wait(aborting, timeout=_ABORT_S)
            return False
        return True

    async def shutdown(self) -> None:
        self._accepting, self._core = False, None
        if self._thread is not None:
            await self._thread.stop()

    def _started(self) -> EngineCore:
        if self._core is None:
            raise EngineError("the engine is not running.", hint="Await start() first.")
        return self._core

    def _call(self, command: Callable[[EngineCore], T]) -> asyncio.Future[T]:
        self._started()
        assert self._thread is not None
        return self._thread.call(command)

    async def _pool(
        self, batch: Sequence[Prompt], lora: str | None, pooled: Callable[[], PooledPrompt]
    ) -> list[list[float]]:
        """Returns the vector of each prompt. All prompts are checked before the first one is computed; when one fails,
        the others are aborted.
        """
        check, group = self._started().input_processor.checked, uuid4().hex
        prompts = [await self.tokenize(each) if isinstance(each, str) else each for each in batch]
        checked = [check(f"input {index}", prompt) for index, prompt in enumerate(prompts)]

        async def vector(index: int, prompt: list[int]) -> list[float]:
            request = GenRequest(request_id=f"{group}-{index}", prompt=prompt, lora=lora)
            async with self._pooling:
                stream = self._stream(request, lambda core, tokens, _: core.add_pooled(request, tokens, pooled()))
                async with aclosing(stream):  # type: ignore[type-var]
                    async for output in stream:
                        if isinstance(output, PooledOutput):
                            return output.vector
            raise EngineError(f"input {index} was aborted.", hint="Send it again.")

        tasks = [asyncio.ensure_future(vector(index, prompt)) for index, prompt in enumerate(checked)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(
        self, request: GenRequest, enter: Callable[[EngineCore, Sequence[int], Prepared], None]
    ) -> AsyncIterator[GenChunk | PooledOutput]:
        """Adds a request to the core and yields its output. Its grammar, stop strings and images are prepared outside
        the core's thread.
        """
        request_id = request.request_id
        prompt = await self.tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt
        if self._thread is not None and self._thread.death is not None:
            raise copy(self._thread.death)
        if not self._accepting:
            raise OverloadedError("the engine is draining or stopped.", hint="Retry on another replica.")
        if request_id in self._streams:
            raise ConflictError(f"request {request_id} is already running.", hint="Give each request its own id.")
        stream = self._streams[request_id] = asyncio.Queue[Output]()
        self._idle.clear()
        ended = False
        try:
            prepared = await self._prepare(request)
            if prepared == "aborted":
                ended = True
                for chunk in aborted_chunks(request, len(prompt)):
                    yield chunk
                return
            entered = self._call(lambda core: enter(core, prompt, prepared))
            entered.add_done_callback(lambda done: _refused(stream, request_id, done))
            while not ended:
                output = await stream.get()
                ended = isinstance(output, RequestFailure) or output.usage is not None
                if isinstance(output, RequestFailure):
                    raise output.error
                yield output
        finally:
            if ended:
                self._forget(request_id)
            else:  # the id stays in use until the thread has aborted it, or a late token could reach its successor
                closing = asyncio.ensure_future(self.abort(request_id))
                closing.add_done_callback(lambda _: self._forget(request_id))
                await asyncio.shield(closing)

    async def _prepare(self, request: GenRequest) -> Prepared | Literal["aborted"]:
        core, params = self._started(), request.sampling
        check_features(request, core.info.features, self.backend)
        if not (params.structured or params.bad_words or params.stop or request.images):
            return Prepared()
        preparing = asyncio.ensure_future(core.input_processor.prepare(request))
        self._preparing[request.request_id] = preparing
        try:
            await asyncio.wait({preparing})
        finally:
            del self._preparing[request.request_id]
            preparing.cancel()
        return "aborted" if preparing.cancelled() else preparing.result()

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _end(self, error: EngineError) -> None:
        """Ends all requests with this error, after the core's thread has ended."""
        self._accepting = False
        for request_id, stream in self._streams.items():
            stream.put_nowait(RequestFailure(request_id, copy(error)))


def _discard_weights(loading: asyncio.Future[tuple[PagedDecoder, WeightsSource]]) -> None:
    """Discards loaded weights whose caller was cancelled."""
    if loading.cancelled() or loading.exception() is not None:
        return
    with suppress(EngineDeadError):
        loading.result()[0].discard()


def _refused(stream: asyncio.Queue[Output], request_id: str, entered: asyncio.Future[None]) -> None:
    """Ends a request's stream with the error with which the core refused the request, if it did."""
    if entered.cancelled():
        return
    error = entered.exception()
    if isinstance(error, RaytideError):
        stream.put_nowait(RequestFailure(request_id, error))
