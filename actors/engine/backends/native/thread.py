"""The thread in which an engine core runs. Commands wait in one queue and run between two steps. The outputs of a step
reach the event loop in one call. Neither the thread nor the event loop waits for the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import Output
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.types import as_request_error
from raytide.core.errors import EngineDeadError, EngineError, RaytideError

if TYPE_CHECKING:
    from raytide.actors.engine.model.parallel.launcher import LocalMembers

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FAILED_STEPS = 3
"""The number of consecutive steps that fail as a whole after which the engine counts as dead."""
_JOIN_S = 30.0
"""The seconds for which `stop` waits for the thread, which may hang in a library."""


@dataclass(slots=True)
class _Call:
    command: Callable[[EngineCore], Any]
    done: asyncio.Future[Any]


class EngineThread:
    """Runs an EngineCore in its own thread and exchanges commands and outputs with an event loop.

    Use it from the event loop that calls `start`. On that loop, the callback `deliver` gets the outputs of each step.
    When the thread ends, the callback `ended` gets the error for the requests that were still running.
    """

    def __init__(
        self,
        config: EngineConfig,
        deliver: Callable[[list[Output]], None],
        ended: Callable[[EngineError], None],
        launcher: LocalMembers | None = None,
    ) -> None:
        self._config, self._deliver, self._on_end, self._launcher = config, deliver, ended, launcher
        self._core: EngineCore | None = None
        self.tap: Callable[[list[Output]], list[Output]] = list
        """A function that the core's thread calls with the outputs of each step. It returns those to deliver to the
        event loop.
        """
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._end_error: EngineError | None = None
        self._is_stopping = False
        self._failed_steps = 0
        self._asked = 0  # counted on the event loop
        self.commands_done = 0  # counted on the thread
        self._thread: threading.Thread | None = None
        self._events: asyncio.AbstractEventLoop

    @property
    def pending_commands(self) -> int:
        """The number of queued commands."""
        return self._asked - self.commands_done

    @property
    def death(self) -> EngineError | None:
        """The error with which the thread died. None while the thread lives, and after `stop`."""
        if self._is_stopping or self._thread is None:
            return None
        if self._end_error is None and not self._thread.is_alive():
            return _died("it ended without a word")
        if self._end_error is None and self._core is not None:
            return self._core.runner.death
        return self._end_error

    async def start(self) -> EngineCore:
        self._events = asyncio.get_running_loop()
        loaded: concurrent.futures.Future[EngineCore] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(loaded,), name="raytide-engine", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(loaded)

    def call(self, command: Callable[[EngineCore], T]) -> asyncio.Future[T]:
        """Runs a command between two steps and returns a future for its result. Outputs that the command causes are
        delivered before the result. If the thread has ended, the future raises EngineError.
        """
        done: asyncio.Future[T] = self._events.create_future()
        ended = self._end_error or self.death
        if ended is not None:
            done.set_exception(ended)
        else:
            self._asked += 1
            self._calls.put(_Call(command, done))
        return done

    async def stop(self) -> None:
        """Aborts all requests and ends the thread. Idempotent. If the thread hangs, `stop` gives up after 30 s."""
        if self._thread is not None and self._thread.is_alive():
            self._is_stopping = True
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join, _JOIN_S)
            if self._thread.is_alive():
                _log.error("the engine's thread did not stop within %g s", _JOIN_S)

    def _serve(self, loaded: concurrent.futures.Future[EngineCore]) -> None:
        """Runs the thread's main loop: commands, then a step while there is work."""
        try:
            core = self._core = EngineCore(self._config, self._launcher)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(core)
        ended: EngineError = EngineError("the engine has stopped.", hint="Retry elsewhere.")
        try:
            while self._turn(core):
                pass
        except BaseException as error:  # no caller would see it
            _log.critical("the engine's thread has died", exc_info=error)
            ended = core.runner.death or _died(repr(error))
        finally:
            core.close()
            self._publish(self._end, ended)

    def _turn(self, core: EngineCore) -> bool:
        """Runs the queued commands, waiting for one only when there is no other work, then takes a step. Returns False
        to stop.

        Commands that arrive during the call wait for the next one, since a long series of them would otherwise delay
        the step without end.
        """
        left: int | None = None
        while True:
            if core.has_work:  # false after a command that pauses the engine
                left = self._calls.qsize() if left is None else left
                if left <= 0:
                    break
            call = self._calls.get()
            left = left and left - 1  # also of commands that find no work: the last may bring some
            if call is None:
                for request_id in core.request_ids:
                    core.abort(request_id)
                self._publish(self._deliver, self.tap(core.drain_outputs()))
                operations.flush_to_disk(core)
                return False
            if not self._run_command(core, call):
                return False
        try:
            outputs = core.step()
            self._failed_steps = 0
        except EngineDeadError:
            raise
        except BaseException as raised:  # a bug in the engine ends its requests, not the engine
            error = as_request_error(raised)
            self._failed_steps += 1
            if self._failed_steps >= _FAILED_STEPS:
                raise
            _log.exception("engine step failed")
            core.fail_all(error)
            outputs = core.drain_outputs()
        left_over = self.tap(outputs)
        return not left_over or self._publish(self._deliver, left_over)

    def _run_command(self, core: EngineCore, call: _Call) -> bool:
        result: Any = None
        error: RaytideError | None = None
        try:
            result = call.command(core)
        except RaytideError as raised:
            error = raised
        except BaseException as raised:
            fault = as_request_error(raised)
            _log.exception("engine command failed")
            error = EngineError(f"the engine could not do this: {fault!r}.")
        self.commands_done += 1
        return self._publish(self._report, self.tap(core.drain_outputs()), call.done, result, error)

    def _publish(self, callback: Callable[..., None], *args: object) -> bool:
        """Schedules a callback on the event loop. Returns False when the loop is closed: nothing waits for outputs
        then.
        """
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
        if done.done():  # the caller has been cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _end(self, error: EngineError) -> None:
        """Fails the commands and requests that wait for an ended thread."""
        self._end_error = error
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None and not call.done.done():
                call.done.set_exception(error)
        self._on_end(error)


def _died(why: str) -> EngineDeadError:
    return EngineDeadError(
        f"the engine's thread has died: {why}.", hint="Retry elsewhere; this replica is to be replaced."
    )
