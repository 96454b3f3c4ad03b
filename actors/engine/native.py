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

from raytide.actors.engine.base import BasicEngine
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.core import EngineInfo, EngineStats, GenChunk, GenRequest, Message
from raytide.actors.engine.loop import EngineLoop, Failure, Output
from raytide.core.errors import ConflictError, EngineError, OverloadedError

__all__ = ["NativeEngine"]

_log = logging.getLogger(__name__)

_INLINE_CHARS = 2000  # longer texts are tokenized in a thread, not on the event loop

Command = Callable[[EngineLoop], list[Output]]
Done = asyncio.Future[bool]  # whether the command found what it was about


class NativeEngine(BasicEngine):
    """One model in this process. Use it from the event loop that called `start`."""

    backend = "native"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[tuple[Command, Done | None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting = False
        self._ended = False
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
            self._commands.put((lambda loop: _add(loop, request, prompt), None))
            while not ended:
                output = await stream.get()
                ended = isinstance(output, Failure) or output.finish_reason is not None
                if isinstance(output, Failure):
                    raise output.error
                yield output
        finally:
            if ended:
                self._forget(request.request_id)
            else:  # the id stays in use until the thread has let go, or a late token could reach a namesake
                closed = self._submit(lambda loop: _abort(loop, request.request_id))
                closed.add_done_callback(lambda _: self._forget(request.request_id))
                await asyncio.shield(closed)

    async def abort(self, request_id: str) -> bool:
        return await self._submit(lambda loop: _abort(loop, request_id))

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

    def _submit(self, command: Command) -> Done:
        """Have a command run in the engine's thread between two steps; done once its outputs are delivered."""
        done: Done = asyncio.get_running_loop().create_future()
        if self._ended or self._thread is None:
            done.set_result(False)
        else:
            self._commands.put((command, done))
        return done

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

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
            self._tell(self._end)

    def _turn(self, loop: EngineLoop) -> bool:
        """Obey what has been asked, waiting for it only when there is nothing else to do, then step. False: stop."""
        try:
            while not loop.has_work or not self._commands.empty():
                item = self._commands.get()
                if item is None:
                    self._tell(self._deliver, [loop.abort(each) for each in loop.request_ids], None)
                    return False
                command, done = item
                if not self._tell(self._deliver, command(loop), done):
                    return False
            outputs = loop.step()
        except Exception as error:  # a defect of the engine: its requests end, it does not
            _log.exception("engine step failed")
            outputs = loop.fail_all(error)
        return self._tell(self._deliver, outputs, None)

    def _tell(self, callback: Callable[..., None], *args: object) -> bool:
        """Call back on the event loop; False when that is closed, so that nobody is left to serve."""
        try:
            self._events.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if self._events.is_closed():
                return False
            raise
        return True

    def _deliver(self, outputs: list[Output], done: Done | None) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)
        if done is not None and not done.done():
            done.set_result(bool(outputs))

    def _end(self) -> None:
        """The thread has ended: nobody may go on waiting for it."""
        self._ended, self._accepting = True, False
        while not self._commands.empty():
            item = self._commands.get_nowait()
            if item is not None and item[1] is not None and not item[1].done():
                item[1].set_result(False)
        for request_id, stream in self._streams.items():
            stream.put_nowait(Failure(request_id, EngineError("the engine has stopped.", hint="Retry elsewhere.")))


def _add(loop: EngineLoop, request: GenRequest, prompt: Sequence[int]) -> list[Output]:
    try:
        loop.add(request, prompt)
    except Exception as error:
        return [Failure.of(request.request_id, error)]
    return []


def _abort(loop: EngineLoop, request_id: str) -> list[Output]:
    chunk = loop.abort(request_id)
    return [] if chunk is None else [chunk]
