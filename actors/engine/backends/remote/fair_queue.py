"""A queue that shares an engine fairly among teams.

It uses start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tokens. Each team has its own queue, and the
team whose next request has the earliest virtual start goes first. Tokens are charged as they are served, as in the
virtual token counter (Sheng et al., OSDI 2024), because nobody knows the length of an answer before its end.

A team that asks for little starts at the present virtual time. It therefore waits for at most one request of each other
team, however many requests the other teams have queued. Each team's own requests are in the order of a DeadlineQueue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raytide.actors.engine.backends.remote.deadline_queue import DeadlineQueue

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Entry(Generic[T]):
    number: int
    """The request's arrival number, which decides between equal virtual starts."""
    length: float
    """The request's virtual length: tokens divided by its team's weight."""
    request: T


@dataclass(slots=True)
class _Team(Generic[T]):
    finish: float = 0.0
    """The virtual time at which the tokens served to the team are paid for."""
    start: float = 0.0
    """The virtual start of the team's next request."""
    waiting: DeadlineQueue[_Entry[T]] = field(default_factory=DeadlineQueue)


class FairQueue(Generic[T]):
    """The waiting requests of many teams. Requests with the lowest priority value go first. At each priority, the teams
    share the served tokens by weight.

    `now_s` is the present time, on the same clock as `due_s`. If `now_s` is not given, no request counts as late.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return sum(level.length for level in self._levels.values())

    def push(
        self,
        request: T,
        team: str,
        tokens: int,
        *,
        weight: float = 1.0,
        priority: int = 0,
        again: bool = False,
        due_s: float = math.inf,
        needs_s: float = 0.0,
    ) -> None:
        """Queues a request. When the request starts, the team is charged `tokens` tokens. While two teams wait, a team
        with twice the other's `weight` is served twice as many tokens.

        `again` is true for a preempted request, which goes before the other requests of its team. `due_s` and `needs_s`
        order the requests of a team (see DeadlineQueue).
        """
        self._pushed += 1
        queue = self._levels.setdefault(priority, _Level()).enter(team)
        queue.waiting.push(_Entry(self._pushed, tokens / weight, request), due_s=due_s, needs_s=needs_s, first=again)

    def head(self, now_s: float = -math.inf) -> T | None:
        """Returns the request that goes next, or None if the queue is empty."""
        return self._levels[min(self._levels)].head(now_s) if self._levels else None

    def pop(self, now_s: float = -math.inf) -> T:
        """Removes and returns the request that goes next. Raises IndexError if there is none."""
        if not self._levels:
            raise IndexError("the queue is empty")
        priority = min(self._levels)
        request = self._levels[priority].pop(now_s)
        self._forget_empty(priority)
        return request

    def remove(self, request: T) -> bool:
        """Removes a request whose client no longer waits. Returns whether the request was in the queue."""
        for priority, level in self._levels.items():
            if level.remove(request):
                self._forget_empty(priority)
                return True
        return False

    def charge(self, team: str, tokens: int, *, weight: float = 1.0, priority: int = 0) -> None:
        """Charges a team for tokens that its running requests have generated. Does nothing while no request of this
        priority waits.
        """
        if (level := self._levels.get(priority)) is not None:
            level.charge(team, tokens / weight)

    def _forget_empty(self, priority: int) -> None:
        """Deletes the teams' virtual times at a priority once no request of that priority waits."""
        if not self._levels[priority].length:
            del self._levels[priority]


class _Level(Generic[T]):
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        self.length = 0
        self._teams: dict[str, _Team[T]] = {}
        self._now = 0.0

    def enter(self, team: str) -> _Team[T]:
        """Counts one more request of a team and returns the team's queue, to which the caller adds the request."""
        queue = self._teams.setdefault(team, _Team())
        self.length += 1
        if not queue.waiting:
            queue.start = max(self._now, queue.finish)
        return queue

    def head(self, now_s: float) -> T:
        return self._next(now_s).waiting.head(now_s).request

    def pop(self, now_s: float) -> T:
        queue = self._next(now_s)
        entry = queue.waiting.pop(now_s)
        self._now = queue.start
        queue.finish = queue.start = queue.start + entry.length
        self.length -= 1
        return entry.request

    def remove(self, request: T) -> bool:
        for queue in self._teams.values():
            if queue.waiting.remove(lambda entry: entry.request is request):
                self.length -= 1
                return True
        return False

    def charge(self, team: str, length: float) -> None:
        if (queue := self._teams.get(team)) is not None:
            queue.finish += length
            queue.start = max(self._now, queue.finish)

    def _next(self, now_s: float) -> _Team[T]:
        waiting = (queue for queue in self._teams.values() if queue.waiting)
        return min(waiting, key=lambda queue: (queue.start, queue.waiting.head(now_s).number))
