"""Fair sharing among teams of what no replica has room for yet.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tokens: each team has its own queue, and the team
whose next request has the earliest virtual start goes first. A team that asks for little starts at the present virtual
time, and so waits for at most one request of each other team, however many these have queued.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


@dataclass(slots=True)
class _Team(Generic[T]):
    finish: float = 0.0
    """The virtual time at which all that it was served is paid for."""
    start: float = 0.0
    """The virtual start of its next request."""
    arrived: int = 0
    """The number of the request that made it wait, which decides between equal starts."""
    waiting: list[tuple[int, int, float, T]] = field(default_factory=list)
    """A heap of (priority, number, virtual length, request)."""


class FairQueue(Generic[T]):
    """Requests of many teams. Within a team, the lowest priority value goes first, then the oldest request."""

    def __init__(self) -> None:
        self._teams: dict[str, _Team[T]] = {}
        self._now = 0.0
        self._pushed = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, request: T, team: str, tokens: int, *, weight: float = 1.0, priority: int = 0) -> None:
        """Queues a request that is expected to cost this many tokens. A team of twice the weight gets twice as many."""
        queue = self._teams.setdefault(team, _Team())
        self._pushed += 1
        self._length += 1
        if not queue.waiting:
            queue.start, queue.arrived = max(self._now, queue.finish), self._pushed
        heapq.heappush(queue.waiting, (priority, self._pushed, max(1, tokens) / weight, request))

    def pop(self) -> T:
        """Removes and returns the request that goes next. Raises IndexError if there is none."""
        waiting = [(queue.start, queue.arrived, name) for name, queue in self._teams.items() if queue.waiting]
        if not waiting:
            raise IndexError("the queue is empty")
        start, _, name = min(waiting)
        queue = self._teams[name]
        _, _, length, request = heapq.heappop(queue.waiting)
        self._now = start
        queue.finish = queue.start = start + length
        queue.arrived = queue.waiting[0][1] if queue.waiting else 0
        self._length -= 1
        if self._length == 0:  # nobody waits any more: what teams owe each other is forgotten
            self._teams.clear()
        return request

    def remove(self, request: T) -> bool:
        """Removes a request that nobody waits for any more; returns whether it was there."""
        for queue in self._teams.values():
            for place, waiting in enumerate(queue.waiting):
                if waiting[3] is request:
                    del queue.waiting[place]
                    heapq.heapify(queue.waiting)
                    self._length -= 1
                    if self._length == 0:
                        self._teams.clear()
                    return True
        return False

    def correct(self, team: str, tokens: int, *, weight: float = 1.0) -> None:
        """Charges a team for tokens beyond what its served requests were expected to cost, or gives some back."""
        if (queue := self._teams.get(team)) is not None:
            queue.finish = max(0.0, queue.finish + tokens / weight)
            queue.start = max(self._now, queue.finish)
