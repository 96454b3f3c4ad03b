"""Fair sharing among teams of what an engine has no room for yet.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tokens: each team has its own queue, and the team
whose next request has the earliest virtual start goes first. Tokens are charged as they are served, as in the virtual
token counter (Sheng et al., OSDI 2024), because nobody knows the length of an answer before its end. A team that asks
for little starts at the present virtual time, and so waits for at most one request of each other team, however many
these have queued.
"""

from __future__ import annotations

from collections import deque
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
    waiting: deque[tuple[int, float, T]] = field(default_factory=deque)
    """Requests with the number of their arrival, which decides between equal starts, and their virtual length."""


class FairQueue(Generic[T]):
    """Requests of many teams. The lowest priority value goes first; teams share what is served at each priority."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return sum(level.length for level in self._levels.values())

    def push(
        self, request: T, team: str, tokens: int, *, weight: float = 1.0, priority: int = 0, again: bool = False
    ) -> None:
        """Queues a request that costs this many tokens at once. A team of twice the weight gets twice as many.

        A request that comes `again`, because it lost its place, goes before the others of its team.
        """
        self._pushed += 1
        level = self._levels.setdefault(priority, _Level())
        level.push((self._pushed, tokens / weight, request), team, again=again)

    def head(self) -> T | None:
        """Returns the request that goes next, None if there is none."""
        return self._levels[min(self._levels)].head() if self._levels else None

    def pop(self) -> T:
        """Removes and returns the request that goes next. Raises IndexError if there is none."""
        if not self._levels:
            raise IndexError("the queue is empty")
        priority = min(self._levels)
        request = self._levels[priority].pop()
        self._forget_empty(priority)
        return request

    def remove(self, request: T) -> bool:
        """Removes a request that nobody waits for any more; returns whether it was there."""
        for priority, level in self._levels.items():
            if level.remove(request):
                self._forget_empty(priority)
                return True
        return False

    def charge(self, team: str, tokens: int, *, weight: float = 1.0, priority: int = 0) -> None:
        """Charges a team for further tokens of its served requests."""
        if (level := self._levels.get(priority)) is not None:
            level.charge(team, tokens / weight)

    def _forget_empty(self, priority: int) -> None:
        """Forgets what teams owe each other once nobody waits any more."""
        if not self._levels[priority].length:
            del self._levels[priority]


class _Level(Generic[T]):
    """The requests of one priority."""

    def __init__(self) -> None:
        self.length = 0
        self._teams: dict[str, _Team[T]] = {}
        self._now = 0.0

    def push(self, entry: tuple[int, float, T], team: str, *, again: bool) -> None:
        queue = self._teams.setdefault(team, _Team())
        self.length += 1
        if not queue.waiting:
            queue.start = max(self._now, queue.finish)
        if again:
            queue.waiting.appendleft(entry)
        else:
            queue.waiting.append(entry)

    def head(self) -> T:
        return self._next().waiting[0][2]

    def pop(self) -> T:
        queue = self._next()
        _, length, request = queue.waiting.popleft()
        self._now = queue.start
        queue.finish = queue.start = queue.start + length
        self.length -= 1
        return request

    def remove(self, request: T) -> bool:
        for queue in self._teams.values():
            for place, waiting in enumerate(queue.waiting):
                if waiting[2] is request:
                    del queue.waiting[place]
                    self.length -= 1
                    return True
        return False

    def charge(self, team: str, length: float) -> None:
        if (queue := self._teams.get(team)) is not None:
            queue.finish += length
            queue.start = max(self._now, queue.finish)

    def _next(self) -> _Team[T]:
        waiting = (queue for queue in self._teams.values() if queue.waiting)
        return min(waiting, key=lambda queue: (queue.start, queue.waiting[0][0]))
