"""The routers of a simulation. A router holds waiting requests. For each request, it chooses a replica and the time at
which the request starts.

The first-come router sends a request on arrival to the replica that can start it first, as in the published
baselines. With the deadline router, a request waits until a replica can start it. Requests that can still meet their
deadline go first, as in raytide's replicas (deadline_queue.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np

from raytide.actors.engine.backends.remote.deadline_queue import DeadlineQueue
from raytide.simulate.serving.requests import Workload
from raytide.simulate.serving.setup import ServingSetup

NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica on a node of its own. `zone` is the index of its spot zone, or None for an on-demand node."""

    number: int
    zone: int | None
    launched_s: float
    ready_s: float
    slots: list[float]
    """A heap of the times at which slots become free."""
    jobs: deque[int] = field(default_factory=deque)
    """The replica's requests, in order; finished ones are removed by `update_counts`."""
    is_leaving: bool = False
    """True if the replica takes no more requests."""
    ended_s: float = NEVER_S
    """The time until which the replica is billed."""


class FirstComeRouter:
    """Routes requests in order of arrival. Records the times of each request, indexed by the request's number.

    The times of an unanswered request are infinite.
    """

    def __init__(self, setup: ServingSetup, work: Workload) -> None:
        seconds = int(setup.horizon_s) + 2
        self.first_token_s = [NEVER_S] * work.count
        self.done_s = [NEVER_S] * work.count
        self.arrivals = np.bincount(np.ceil(work.arrival_s).astype(int), minlength=seconds)[:seconds].tolist()
        self.departures = [0] * seconds
        """The number of requests by the second of their end; `arrivals` has those by the second of their arrival."""
        self.arrived = 0
        """The number of requests that have arrived."""
        self._arrival_s, self._prefill_s = work.arrival_s.tolist(), work.prefill_s.tolist()
        self._decode_s = work.decode_s.tolist()
        self._routed: list[SimulatedReplica] = []
        self._starts: list[float] = []
        """The time at which each routed replica can start another request."""
        self._waiting: list[int] = []
        self._resumes = bool(setup.resumes)

    def advance(self, until_s: float) -> None:
        """Serves the requests that arrive before `until_s`."""
        last = bisect_left(self._arrival_s, until_s, self.arrived)
        jobs, self.arrived = range(self.arrived, last), last
        self._send(jobs, 0.0)

    def admit(self, replica: SimulatedReplica, now_s: float) -> None:
        """Adds a replica that has become ready."""
        self._routed.append(replica)
        self._starts.append(now_s)
        waiting, self._waiting = self._waiting, []
        self._send(waiting, now_s)

    def cordon(self, replica: SimulatedReplica) -> None:
        """Stops sending requests to the replica."""
        replica.is_leaving = True
        if replica in self._routed:
            at = self._routed.index(replica)
            del self._routed[at], self._starts[at]

    def send_again(self, jobs: Iterable[int], now_s: float) -> None:
        """Sends the unfinished requests of a lost replica to other replicas. If the setup has `resumes`, a request that
        already has tokens continues after these tokens. All other requests start from the beginning.
        """
        last = len(self.departures) - 1
        for job in jobs:
            self.departures[min(int(self.done_s[job]) + 1, last)] -= 1
            if self._resumes and self.first_token_s[job] <= now_s:
                self._decode_s[job] = self.done_s[job] - now_s
            else:
                self.first_token_s[job] = NEVER_S
            self.done_s[job] = NEVER_S
        self._send(jobs, now_s)

    def _send(self, jobs: Iterable[int], not_before_s: float) -> None:
        """Routes each request to the replica that can start it first, not before `not_before_s`. This is a hot loop."""
        starts = self._starts
        if not starts:
            self._waiting += jobs
            return
        arrival_s = self._arrival_s
        for job in jobs:
            start_s = min(starts)
            self._start(job, starts.index(start_s), max(start_s, arrival_s[job], not_before_s))

    def _start(self, job: int, at: int, start_s: float) -> None:
        replica = self._routed[at]
        token_s = start_s + self._prefill_s[job]
        end_s = token_s + self._decode_s[job]
        if token_s < self.first_token_s[job]:  # else it goes on from its tokens
            self.first_token_s[job] = token_s
        self.done_s[job] = end_s
        replica.jobs.append(job)
        heapreplace(replica.slots, end_s)
        free_s = replica.slots[0]
        self._starts[at] = token_s if token_s > free_s else free_s
        departures, second = self.departures, int(end_s) + 1
        departures[min(second, len(departures) - 1)] += 1


class DeadlineRouter(FirstComeRouter):
    def __init__(self, setup: ServingSetup, work: Workload) -> None:
        super().__init__(setup, work)
        self._slo_ttft_s = setup.slo_ttft_s
        self._queue: DeadlineQueue[int] = DeadlineQueue()
        self._now_s = 0.0

    def advance(self, until_s: float) -> None:
        last = bisect_left(self._arrival_s, until_s, self.arrived)
        jobs, self.arrived = range(self.arrived, last), last
        starts, queue, arrival_s = self._starts, self._queue, self._arrival_s
        for job in jobs:
            now_s = arrival_s[job]
            if queue:
                self._dispatch(now_s)
            if starts and not queue and (free_s := min(starts)) <= now_s:
                self._start(job, starts.index(free_s), now_s)
            else:
                self._push(job)
                self._now_s = now_s
        self._dispatch(until_s)

    def _send(self, jobs: Iterable[int], not_before_s: float) -> None:
        self._now_s = max(self._now_s, not_before_s)
        for job in jobs:
            self._push(job)
        self._dispatch(self._now_s)

    def _push(self, job: int) -> None:
        is_begun = self.first_token_s[job] < NEVER_S
        since_s = self._now_s if is_begun else self._arrival_s[job]
        self._queue.push(job, due_s=since_s + self._slo_ttft_s, needs_s=self._prefill_s[job])

    def _dispatch(self, until_s: float) -> None:
        """Starts waiting requests on replicas that become free before `until_s`."""
        starts, queue = self._starts, self._queue
        while queue and starts and (free_s := min(starts)) <= until_s:
            start_s = max(free_s, self._now_s)
            self._start(queue.pop(start_s), starts.index(free_s), start_s)
        self._now_s = until_s
