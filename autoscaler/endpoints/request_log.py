"""What replicas counted between two words of theirs, and requests put together from that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.queue_simulator import RequestBatch
from raytide.core.objects.endpoint import Counters, EndpointLoad, ReplicaLoad

FORGET_S = 600.0
"""A replica that has been silent for longer is gone."""


@dataclass(frozen=True, slots=True)
class CounterDelta:
    replica: ReplicaLoad
    from_s: float
    """When it spoke before."""
    delta: Counters
    """Since then."""


@dataclass(slots=True)
class CounterDeltas:
    """Of one endpoint."""

    last_report: dict[str, ReplicaLoad] = field(default_factory=dict)
    """What each replica said last."""

    def update(self, load: EndpointLoad) -> list[CounterDelta]:
        """What a replica counted before its first word is left out: nobody knows when that was."""
        found = []
        for replica in load.replicas:
            before = self.last_report.get(replica.id)
            if before is not None and replica.at_s > before.at_s:
                found.append(CounterDelta(replica, before.at_s, replica.counters.since(before.counters)))
            self.last_report[replica.id] = replica
        self.last_report = {id: said for id, said in self.last_report.items() if load.at_s - said.at_s <= FORGET_S}
        return found


@dataclass(slots=True)
class Arrivals:
    """Requests of one endpoint: when each came, and its tokens, which engines count when it has ended.

    The sizes are those of the requests that ended, in that order, which for most of them is the order in which they
    came; where several ended between two words, their mean.
    """

    arrival_s: list[float] = field(default_factory=list)
    sizes: deque[tuple[float, float]] = field(default_factory=deque)
    last: tuple[float, float] = (0.0, 0.0)

    def add(self, word: CounterDelta) -> None:
        count, ended = round(word.delta.requests), round(word.delta.finished)
        self.arrival_s += spread(count, word.from_s, word.replica.at_s)
        if ended:
            size = word.delta.prompt_tokens / ended, word.delta.output_tokens / ended
            self.sizes.extend([size] * ended)

    def correct(self, count: int, from_s: float, until_s: float) -> None:
        """So many more came than replicas took; or fewer, since they took some that had waited."""
        self.arrival_s += spread(count, from_s, until_s)
        del self.arrival_s[max(0, len(self.arrival_s) + min(count, 0)) :]

    def take_batch(self, from_s: float, until_s: float) -> RequestBatch:
        """Those that came before `until_s` and were not told yet; of whom no size is known, the last one's.

        Nobody else can have ended yet: sizes beyond those are of requests that came unseen.
        """
        while len(self.sizes) > len(self.arrival_s):
            self.sizes.popleft()
        told = sorted(at_s for at_s in self.arrival_s if at_s < until_s)
        self.arrival_s = [at_s for at_s in self.arrival_s if at_s >= until_s]
        sizes = [self._size() for _ in told]
        prompt, output = np.array(sizes).reshape(-1, 2).T
        return RequestBatch(from_s, until_s, np.array(told), prompt, output)

    def _size(self) -> tuple[float, float]:
        if self.sizes:
            self.last = self.sizes.popleft()
        return self.last


@dataclass(slots=True)
class RouterQueue:
    """In front of the replicas, where requests are not counted: only its length is told. First come, first served."""

    arrival_s: deque[float] = field(default_factory=deque)
    late_count: int = 0
    """The first so many were told to be late."""
    taken: deque[bool] = field(default_factory=deque)
    """Those whom replicas took and who have no first token yet, in that order: whether each was told to be late."""

    def record_interval(self, taken: int, length: int, from_s: float, until_s: float) -> int:
        """How many came, when replicas took so many meanwhile and so many wait now."""
        count = max(0, taken + length - len(self.arrival_s))
        self.arrival_s.extend(spread(count, from_s, until_s))
        gone = len(self.arrival_s) - length
        for _ in range(gone):
            self.arrival_s.popleft()
        late = min(self.late_count, gone, taken)
        self.taken.extend([True] * late + [False] * (taken - late))
        self.late_count = max(0, self.late_count - gone)
        return count

    def deduplicate_late(self, first_tokens: int, late: int, in_replicas: int) -> int:
        """Of so many first tokens that came now, and so many that came late, how many are of requests that were told to
        be late while they waited here. `in_replicas`: requests there now."""
        answered = [self.taken.popleft() for _ in range(min(first_tokens, len(self.taken)))]
        while len(self.taken) > in_replicas:  # some ended without a token
            self.taken.popleft()
        return min(sum(answered), late)

    def count_newly_late(self, before_s: float) -> int:
        """How many came before that, and were not told yet."""
        late = sum(at_s < before_s for at_s in self.arrival_s)
        count, self.late_count = max(0, late - self.late_count), max(late, self.late_count)
        return count


def spread(count: int, from_s: float, until_s: float) -> list[float]:
    """So many arrivals, each as far from the next."""
    apart_s = (until_s - from_s) / max(count, 1)
    return [from_s + (at + 0.5) * apart_s for at in range(count)]
