"""raytide's own engine behind the `Engine` protocol: the loop runs in a thread of its own, the event loop only hands
over.

Commands go to the thread through one queue, each step's outputs come back in one call, so that neither side ever
waits for the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.core import EngineInfo, EngineStats, GenChunk, GenRequest, Message
from raytide.actors.engine.loop import EngineLoop, Failure, Output
from raytide.core.errors import ConflictError, EngineError, OverloadedError, RaytideError

__all__ = ["NativeEngine"]

_log = logging.getLogger(__name__)

_INLINE_CHARS = 2000  # longer texts are tokenized in a thread, not on the event loop

Command = Callable[[EngineLoop], list[Output]]


class NativeEngine:
    """One model in this process. Use it from the event loop that called `start`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None ends the thread
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting = False
        self._thread: threading.Thread | None = None
        self._loop: EngineLoop | None = None
        self._events: asyncio.AbstractEventLoop

    async def start(self) -> EngineInfo:
        if self._thread is not None:
            raise ConflictError("this engine has been started already.", hint="Make a new one.")
        self._events = asyncio.get_running_loop()
        loaded: concurrent.futures.Future[EngineLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(loaded,), name="raytide-engine", daemon=True)
        self._thread.start()
        self._loop = await asyncio.wrap_future(loaded)
        self._accepting = True
        return self._loop.info

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        prompt = await self.tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt
        if not self._accepting:
            raise OverloadedError("the engine is draining or stopped.", hint="Retry on another replica.")
        if request.request_id in self._streams:
            raise ConflictError(
                f"request {request.request_id} is already running.", hint="Give each request its own id."
            )
        stream: asyncio.Queue[Output] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._idle.clear()
        ended = False
        try:
            self._commands.put(lambda loop: _add(loop, request, prompt))
            while not ended:
                output = await stream.get()
                ended = isinstance(output, Failure) or output.finish_reason is not None
                if isinstance(output, Failure):
                    raise output.error
                yield output
        finally:
            del self._streams[request.request_id]
            if not ended:
                self._commands.put(lambda loop: _abort(loop, request.request_id))
            if not self._streams:
                self._idle.set()

    async def abort(self, request_id: str) -> bool:
        if self._loop is None:
            return False
        return bool(await self._call(lambda loop: _abort(loop, request_id)))

    async def tokenize(self, text: str) -> list[int]:
        encode = self._started().tokenizer.encode
        return encode(text) if len(text) <= _INLINE_CHARS else await asyncio.to_thread(encode, text)

    async def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        return await asyncio.to_thread(self._started().tokenizer.chat_prompt, messages)

    async def stats(self) -> EngineStats:
        return self._started().stats()

    async def drain(self, timeout_s: float) -> bool:
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for request_id in list(self._streams):
                await self.abort(request_id)
            return False
        return True

    async def shutdown(self) -> None:
        self._accepting, self._loop = False, None
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    def _started(self) -> EngineLoop:
        if self._loop is None:
            raise EngineError("the engine is not running.", hint="Await start() first.")
        return self._loop

    async def _call(self, command: Command) -> list[Output]:
        """Run a command in the engine's thread between two steps, and return its outputs once they are delivered."""
        done: asyncio.Future[list[Output]] = self._events.create_future()

        def answer(loop: EngineLoop) -> list[Output]:
            outputs = command(loop)
            self._events.call_soon_threadsafe(lambda: done.done() or done.set_result(outputs))
            return outputs

        self._commands.put(answer)
        return await done

    def _serve(self, loaded: concurrent.futures.Future[EngineLoop]) -> None:
        """The thread: commands first, then a step, for as long as there is work."""
        try:
            loop = EngineLoop(self._config)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(loop)
        try:
            while self._turn(loop):
                pass
        finally:
            self._events.call_soon_threadsafe(self._end_streams)

    def _turn(self, loop: EngineLoop) -> bool:
        """Obey what has been asked, waiting for it only when there is nothing else to do, then step. False: stop."""
        try:
            while not loop.has_work or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    for request_id in loop.request_ids:
                        self._hand_over(_abort(loop, request_id))
                    return False
                self._hand_over(command(loop))
            self._hand_over(loop.step())
        except Exception as error:  # a defect of the engine: its requests end, it does not
            _log.exception("engine step failed")
            self._hand_over(loop.fail_all(error))
        return True

    def _hand_over(self, outputs: list[Output]) -> None:
        if outputs:
            self._events.call_soon_threadsafe(self._deliver, outputs)

    def _end_streams(self) -> None:
        """The thread has ended: nobody may wait for it."""
        while not self._commands.empty():
            self._commands.get_nowait()
        for request_id, stream in self._streams.items():
            stream.put_nowait(Failure(request_id, EngineError("the engine has stopped.", hint="Retry elsewhere.")))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)


def _add(loop: EngineLoop, request: GenRequest, prompt: Sequence[int]) -> list[Output]:
    try:
        loop.add(request, prompt)
    except Exception as error:
        known = isinstance(error, RaytideError)
        return [Failure(request.request_id, error if known else EngineError(f"{request.request_id}: {error!r}."))]
    return []


def _abort(loop: EngineLoop, request_id: str) -> list[Output]:
    chunk = loop.abort(request_id)
    return [] if chunk is None else [chunk]
