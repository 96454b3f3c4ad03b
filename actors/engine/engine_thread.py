"""The thread that an engine loop lives in. Commands reach it through one queue and run between two steps; each step's
outputs come back in one call, so that neither side ever waits for the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.loop import EngineLoop
from raytide.actors.engine.outputs import Output
from raytide.core.errors import EngineError, RaytideError

__all__ = ["EngineThread"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    command: Callable[[EngineLoop], Any]
    done: asyncio.Future[Any]


class EngineThread:
    """Use it from the event loop that calls `start`; `deliver` and `ended` are called there."""

    def __init__(
        self, config: EngineConfig, deliver: Callable[[list[Output]], None], ended: Callable[[], None]
    ) -> None:
        self._config, self._deliver, self._on_end = config, deliver, ended
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._has_ended = False
        self._thread: threading.Thread | None = None
        self._events: asyncio.AbstractEventLoop

    async def start(self) -> EngineLoop:
        self._events = asyncio.get_running_loop()
        loaded: concurrent.futures.Future[EngineLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(loaded,), name="raytide-engine", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(loaded)

    def call(self, command: Callable[[EngineLoop], T]) -> asyncio.Future[T]:
        """Have a command run between two steps. What it adds to the loop's outputs is delivered before the future is
        done; EngineError when the thread has ended.
        """
        done: asyncio.Future[T] = self._events.create_future()
        if self._has_ended:
            done.set_exception(_stopped())
        else:
            self._calls.put(_Call(command, done))
        return done

    async def stop(self) -> None:
        """Abort what runs and end the thread. Idempotent."""
        if self._thread is not None and self._thread.is_alive():
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)

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
        while not loop.has_work or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                for request_id in loop.request_ids:
                    loop.abort(request_id)
                self._tell(self._deliver, loop.take())
                return False
            if not self._obey(loop, call):
                return False
        try:
            outputs = loop.step()
        except Exception as error:  # a defect of the engine: its requests end, it does not
            _log.exception("engine step failed")
            loop.fail_all(error)
            outputs = loop.take()
        return self._tell(self._deliver, outputs)

    def _obey(self, loop: EngineLoop, call: _Call) -> bool:
        try:
            result, error = call.command(loop), None
        except RaytideError as raised:
            result, error = None, raised
        except Exception as raised:
            _log.exception("engine command failed")
            result, error = None, EngineError(f"the engine could not do this: {raised!r}.")
        return self._tell(self._report, loop.take(), call.done, result, error)

    def _tell(self, callback: Callable[..., None], *args: object) -> bool:
        """Call back on the event loop; False when that is closed, so that nobody is left to serve."""
        try:
            self._events.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if self._events.is_closed():
                return False
            raise
        return True

    def _report(
        self, outputs: list[Output], done: asyncio.Future[Any], result: object, error: RaytideError | None
    ) -> None:
        self._deliver(outputs)
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _end(self) -> None:
        """The thread has ended: nobody may go on waiting for it."""
        self._has_ended = True
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None and not call.done.done():
                call.done.set_exception(_stopped())
        self._on_end()


def _stopped() -> EngineError:
    return EngineError("the engine has stopped.", hint="Retry elsewhere.")
