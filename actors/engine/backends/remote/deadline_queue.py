"""Orders waiting requests so that as many first tokens as possible are in time.

Requests that can still be in time go first, the earliest due time first. Late requests go after them, because
serving late requests first would only make more requests late. Every twentieth start is reserved for a late request,
so that no request waits for ever. Requests without a due time keep the order of their arrival.

With one server and the same time allowance for every request, each request that would be in time under
first-come-first-served is in time here as well. The reason is that only requests with an earlier due time go before
such a request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

LATE_EVERY = 20
"""While late requests wait, every LATE_EVERY-th start goes to the oldest late request."""


class DeadlineQueue(Generic[T]):
    """A queue of requests, ordered so that as many first tokens as possible are in time. All times are in seconds on
    one clock of the caller's choice.
    """

    __slots__ = ("_late", "_passed_over", "_pushed", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, float, T]] = []
        """A heap of (due time, arrival number, latest start that is still in time, request)."""
        self._late: deque[T] = deque()
        self._passed_over = 0
        """The number of starts since the last start of a late request, counted while late requests wait."""
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late)

    def push(self, request: T, *, due_s: float = math.inf, needs_s: float = 0.0, first: bool = False) -> None:
        """Queues a request. Its first token is due at `due_s`, and comes `needs_s` seconds after the request starts. If
        `first` is true, the request goes before all others and never counts as late.
        """
        self._pushed += 1
        if first:
            heappush(self._waiting, (-math.inf, -self._pushed, math.inf, request))
        else:
            heappush(self._waiting, (due_s, self._pushed, due_s - needs_s, request))

    def head(self, now_s: float = -math.inf) -> T:
        """Returns the request that would start next at the time `now_s`. Raises IndexError if no request waits."""
        waiting, late = self._waiting, self._late
        while waiting and waiting[0][2] < now_s:
            late.append(heappop(waiting)[3])
        if late and (self._passed_over >= LATE_EVERY - 1 or not waiting):
            return late[0]
        return waiting[0][3]

    def pop(self, now_s: float = -math.inf) -> T:
        """Removes and returns the next request to start, as of the time `now_s`. Raises IndexError if no request
        waits.
        """
        request = self.head(now_s)
        if self._late and self._late[0] is request:
            self._passed_over = 0
            return self._late.popleft()
        self._passed_over = self._passed_over + 1 if self._late else 0
        return heappop(self._waiting)[3]

    def remove(self, is_wanted: Callable[[T], bool]) -> bool:
        """Removes one request for which `is_wanted` is true. Returns whether there was such a request."""
        for at, entry in enumerate(self._waiting):
            if is_wanted(entry[3]):
                self._waiting[at] = self._waiting[-1]
                self._waiting.pop()
                heapify(self._waiting)
                return True
        for at, each in enumerate(self._late):
            if is_wanted(each):
                del self._late[at]
                return True
        return False
