"""A thread pool that tokenizes texts and renders chat templates, so that neither blocks the event loop or the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from raytide.actors.engine.limits import MAX_TEXT_JOBS
from raytide.actors.engine.types import as_request_error
from raytide.core.errors import EngineError, OverloadedError, RaytideError

T = TypeVar("T")

_THREADS = 2


class TextPool:
    """A thread pool with a bounded queue. Use it from one event loop. Its threads start with the first text."""

    def __init__(self, max_jobs: int = MAX_TEXT_JOBS) -> None:
        self._max_jobs = max_jobs
        self._jobs = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="raytide-text")

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread and returns its result. Raises OverloadedError if too many texts wait. If `work`
        fails with an error that is not raytide's own, such as a panic in a Rust library, raises EngineError. If the
        call is cancelled, `work` still runs to its end.
        """
        if self._jobs >= self._max_jobs:
            raise OverloadedError(f"{self._jobs} texts wait for the tokenizer already.", hint="Retry later.")
        self._jobs += 1
        job = asyncio.wrap_future(self._threads.submit(_guarded, work))
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)  # a thread cannot be stopped: the job counts until it is done

    def _ended(self, job: asyncio.Future[T]) -> None:
        self._jobs -= 1
        if not job.cancelled():
            job.exception()  # retrieved, since the caller may be gone


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except RaytideError:
        raise
    except BaseException as error:
        raise EngineError(f"the text could not be prepared: {as_request_error(error)!r}.") from None
