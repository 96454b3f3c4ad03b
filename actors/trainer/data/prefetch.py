"""Read the next step's sequences while this one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Prefetch"]

T = TypeVar("T")


class Prefetch(Generic[T]):
    """`read(step)` on a thread of its own, one step ahead and never more. `read` depends on the step alone."""

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self._read, self._last = read, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[T]] | None = None

    def take(self, step: int) -> T:
        """What `read(step)` gives, or raises; from now on the step after it is on its way."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == step else self._thread.submit(self._read, step)
        value = future.result()
        if step + 1 < self._last:
            self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return value

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
