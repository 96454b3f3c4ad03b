"""The changes of counters between two reports of a replica, and the request log that is reconstructed from these
changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.queue_simulator import RequestBatch
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad

FORGET_S = 600.0
"""The longest time without a report; after it, a replica counts as gone."""


@dataclass(frozen=True, slots=True)
class CounterDelta:
    replica: ReplicaLoad
    from_s: float
    """The time of the replica's previous report."""
    delta: Counters


@dataclass(slots=True)
class CounterDeltas:
    """Keeps the last report of each replica of an endpoint, and computes how the counters have changed since that
    report.
    """

    last_report: dict[str, ReplicaLoad] = field(default_factory=dict)

    def update(self, load: EndpointLoad) -> list[CounterDelta]:
        """Returns the changes of the counters since the last reports. The result leaves out everything that a replica
        counted before its first report, because the time of these counts is unknown.
        """
        found = []
        for replica in load.replicas:
            before = self.last_report.get(replica.id)
            if before is not None and replica.at_s > before.at_s:
                found.append(CounterDelta(replica, before.at_s, replica.counters.since(before.counters)))
            self.last_report[replica.id] = replica
        self.last_report = {
            id: report for id, report in self.last_report.items() if load.at_s - report.at_s <= FORGET_S
        }
        return found


@dataclass(slots=True)
class Arrivals:
    """The requests of one endpoint: their arrival times and their sizes in tokens. Engines report the size of a request
    when the request ends.

    Sizes are assigned to arrivals in the order in which requests ended, which is mostly the order of arrivals. Requests
    that ended between the same two reports get the mean of their sizes.
    """

    arrival_s: list[float] = field(default_factory=list)
    sizes: deque[tuple[float, float]] = field(default_factory=deque)
    last: tuple[float, float] = (0.0, 0.0)

    def add(self, report: CounterDelta) -> None:
        count, ended = round(report.delta.requests), round(report.delta.finished)
        self.arrival_s += spread(count, report.from_s, report.replica.at_s)
        if ended:
            size = report.delta.prompt_tokens / ended, report.delta.output_tokens / ended
            self.sizes.extend([size] * ended)

    def correct(self, count: int, from_s: float, until_s: float) -> None:
        """Adds `count` arrivals that no replica has received yet. If `count` is negative, removes arrivals that were
        counted twice: first in the router's queue, then at a replica.
        """
        self.arrival_s += spread(count, from_s, until_s)
        del self.arrival_s[max(0, len(self.arrival_s) + min(count, 0)) :]

    def take_batch(self, from_s: float, until_s: float) -> RequestBatch:
        """Removes and returns the arrivals before `until_s`. A request of unknown size gets the last known size.

        If there are more sizes than arrivals, the surplus belongs to requests whose arrival was not seen, and is
        dropped.
        """
        while len(self.sizes) > len(self.arrival_s):
            self.sizes.popleft()
        arrivals = sorted(at_s for at_s in self.arrival_s if at_s < until_s)
        self.arrival_s = [at_s for at_s in self.arrival_s if at_s >= until_s]
        sizes = [self._size() for _ in arrivals]
        prompt, output = np.array(sizes).reshape(-1, 2).T
        return RequestBatch(from_s, until_s, np.array(arrivals), prompt, output)

    def _size(self) -> tuple[float, float]:
        if self.sizes:
            self.last = self.sizes.popleft()
        return self.last


@dataclass(slots=True)
class RouterQueue:
    """A model of the router's queue. Only the length of the real queue is known. Its order is assumed to be first come,
    first served.
    """

    arrival_s: deque[float] = field(default_factory=deque)
    late_count: int = 0
    """Requests at the head of the queue that have been reported late."""
    reported: int = 0
    """The number of requests that were reported late here, are at replicas now, and were not yet reported by those."""

    def record_interval(self, taken: int, length: int, from_s: float, until_s: float) -> int:
        """Records the arrivals of an interval and returns their number. `taken` requests went from the queue to
        replicas in the interval. `length` requests are in the queue when the interval ends.
        """
        count = max(0, taken + length - len(self.arrival_s))
        self.arrival_s.extend(spread(count, from_s, until_s))
        left = len(self.arrival_s) - length
        for _ in range(left):
            self.arrival_s.popleft()
        self.reported += min(self.late_count, left, taken)
        self.late_count = max(0, self.late_count - left)
        return count

    def deduplicate_late(self, late: int, in_replicas: int) -> int:
        """Returns how many of the `late` requests this queue has already counted as late. A request that waits in the
        queue is counted by the queue. Once it is at a replica, the replica counts it again.

        `late` is the number of requests that replicas now report as late. `in_replicas` is the number of requests at
        replicas now.
        """
        found = min(self.reported, late)
        self.reported = min(self.reported - found, in_replicas)
        return found

    def count_newly_late(self, before_s: float) -> int:
        """Returns the number of waiting requests that arrived before `before_s` and have not been reported late yet.
        From now on they count as reported.
        """
        late = sum(at_s < before_s for at_s in self.arrival_s)
        count, self.late_count = max(0, late - self.late_count), max(late, self.late_count)
        return count


def spread(count: int, from_s: float, until_s: float) -> list[float]:
    """Returns `count` arrival times, evenly spaced between `from_s` and `until_s`."""
    apart_s = (until_s - from_s) / max(count, 1)
    return [from_s + (at + 0.5) * apart_s for at in range(count)]
