"""The simulated fleet: replicas with a first-come prefill queue and decode slots, a router, spot zones and the bill.

A request goes to the replica that can start it first, on arrival. Unfinished requests of a lost replica start again
elsewhere; their first token counts from the first arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.requests import Workload
from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones

_NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica on its own node. `zone` is the column of its spot zone, None on demand."""

    number: int
    zone: int | None
    launched_s: float
    ready_s: float
    slots: list[float]
    """A heap of the times at which slots become free."""
    jobs: deque[int] = field(default_factory=deque)
    """The replica's requests, in order; finished ones are removed by `update_counts`."""
    is_leaving: bool = False
    """It takes no more requests."""
    ended_s: float = _NEVER_S
    """Billed until then."""


class SimulatedFleet:
    def __init__(self, setup: ServingSetup, work: Workload, zones: SpotZones) -> None:
        self.setup, self.zones = setup, zones
        self.now_s = 0.0
        self.launched: list[SimulatedReplica] = []
        """All replicas ever launched, in order."""
        self.alive: list[SimulatedReplica] = []
        self.first_token_s = [_NEVER_S] * work.count
        self.arrived = 0
        """Requests that have arrived."""
        self.lost_nodes: list[SimulatedReplica] = []
        """Reclaimed spot nodes, in order."""
        self._random = np.random.default_rng([setup.seed, 3])
        self._arrival_s, self._prefill_s = work.arrival_s.tolist(), work.prefill_s.tolist()
        self._decode_s = work.decode_s.tolist()
        self._done_s = [_NEVER_S] * work.count
        self._routed: list[SimulatedReplica] = []
        self._starts: list[float] = []
        """The time at which each routed replica can start another request."""
        self._waiting: list[int] = []
        seconds = int(setup.horizon_s) + 2
        self._arrivals = np.bincount(np.ceil(work.arrival_s).astype(int), minlength=seconds)[:seconds].tolist()
        self._departures = [0] * seconds
        self._ongoing: deque[int] = deque([0], maxlen=30)
        self._counted_s = 0

    def of(self, market: CapacityType) -> list[SimulatedReplica]:
        """Returns staying replicas of a market, launching ones included."""
        is_spot = market is CapacityType.SPOT
        return [replica for replica in self.alive if not replica.is_leaving and (replica.zone is not None) == is_spot]

    def is_ready(self, replica: SimulatedReplica) -> bool:
        return replica.ready_s <= self.now_s and not replica.is_leaving

    def busy(self, replica: SimulatedReplica) -> int:
        """Returns its requests in flight and waiting, and finished ones behind an older unfinished one."""
        return len(replica.jobs)

    @property
    def ongoing(self) -> int:
        """Requests in flight and waiting."""
        return self._ongoing[-1]

    def mean_ongoing(self) -> float:
        """Returns the mean of `ongoing` over the last 30 s."""
        return sum(self._ongoing) / len(self._ongoing)

    def launch_ondemand(self) -> SimulatedReplica:
        return self._launch(None)

    def launch_spot(self, zone: int) -> SimulatedReplica | None:
        """Launches a replica in the zone; None if the zone is full."""
        soon = self.zones.at(self.now_s + self.setup.notice_s)[zone]
        room = min(self.zones.at(self.now_s)[zone], soon)
        there = sum(replica.zone == zone for replica in self.alive)
        return self._launch(zone) if there < room else None

    def release(self, replica: SimulatedReplica) -> None:
        """Ends it: now if it has no requests or is not ready, else after its last request."""
        last_s = max((self._done_s[job] for job in replica.jobs), default=self.now_s)
        replica.ended_s = min(replica.ended_s, max(self.now_s, last_s))
        self._cordon(replica)
        self._remove_ended()

    def advance(self, until_s: float) -> None:
        """Routes the requests that arrive before `until_s`, and sets the clock to it."""
        last = bisect_left(self._arrival_s, until_s, self.arrived)
        self._send(range(self.arrived, last), 0.0)
        self.arrived = last
        self.now_s = until_s
        self._remove_ended()

    def admit(self, replica: SimulatedReplica) -> None:
        """Adds a ready replica to the router."""
        if replica.ended_s <= self.now_s or replica.is_leaving:
            return
        self._routed.append(replica)
        self._starts.append(self.now_s)
        waiting, self._waiting = self._waiting, []
        self._send(waiting, self.now_s)

    def reclaim(self) -> None:
        """Reclaims randomly chosen nodes above their zone's capacity."""
        for zone, room in enumerate(self.zones.at(self.now_s)):
            for replica in self._excess(zone, room, [r for r in self.alive if r.zone == zone]):
                self._on_lost(replica)

    def warn(self, deadline_s: float) -> None:
        """Warns nodes that will be reclaimed: they take no new requests, and hand over those they cannot finish."""
        for zone, room in enumerate(self.zones.at(deadline_s)):
            staying = [r for r in self.alive if r.zone == zone and r.ended_s > deadline_s]
            for replica in self._excess(zone, room, staying):
                handed = [job for job in replica.jobs if self._done_s[job] > deadline_s]
                replica.jobs = deque(job for job in replica.jobs if self._done_s[job] <= deadline_s)
                replica.ended_s = deadline_s
                self._cordon(replica)
                self.lost_nodes.append(replica)
                self._send_again(handed)

    def update_counts(self) -> None:
        """Removes finished requests, and counts ongoing ones second by second."""
        for replica in self.alive:
            jobs = replica.jobs
            while jobs and self._done_s[jobs[0]] <= self.now_s:
                jobs.popleft()
        ongoing = self._ongoing[-1]
        while self._counted_s < int(self.now_s):
            self._counted_s += 1
            ongoing += self._arrivals[self._counted_s] - self._departures[self._counted_s]
            self._ongoing.append(ongoing)

    def node_hours(self) -> dict[CapacityType, float]:
        """Returns the billed hours so far, from launch to end."""
        hours = dict.fromkeys(CapacityType, 0.0)
        for replica in self.launched:
            market = CapacityType.ON_DEMAND if replica.zone is None else CapacityType.SPOT
            hours[market] += (min(replica.ended_s, self.now_s) - replica.launched_s) / 3600.0
        return hours

    def _launch(self, zone: int | None) -> SimulatedReplica:
        ready_s = self.now_s + self.setup.cold_start_s
        replica = SimulatedReplica(len(self.launched), zone, self.now_s, ready_s, [self.now_s] * self.setup.slots)
        self.launched.append(replica)
        self.alive.append(replica)
        return replica

    def _excess(self, zone: int, room: int, there: list[SimulatedReplica]) -> list[SimulatedReplica]:
        if len(there) <= room:
            return []
        chosen = self._random.choice(len(there), size=len(there) - room, replace=False)
        return [there[i] for i in chosen]

    def _on_lost(self, replica: SimulatedReplica) -> None:
        again = [job for job in replica.jobs if self._done_s[job] > self.now_s]
        replica.jobs.clear()
        replica.ended_s = self.now_s
        if not replica.is_leaving:
            self.lost_nodes.append(replica)
        self._cordon(replica)
        self._remove_ended()
        self._send_again(again)

    def _send_again(self, jobs: list[int]) -> None:
        last = len(self._departures) - 1
        for job in jobs:
            self._departures[min(int(self._done_s[job]) + 1, last)] -= 1
            self._done_s[job] = self.first_token_s[job] = _NEVER_S
        self._send(jobs, self.now_s)

    def _cordon(self, replica: SimulatedReplica) -> None:
        replica.is_leaving = True
        if replica in self._routed:
            at = self._routed.index(replica)
            del self._routed[at], self._starts[at]

    def _remove_ended(self) -> None:
        if any(replica.ended_s <= self.now_s for replica in self.alive):
            self.alive = [replica for replica in self.alive if replica.ended_s > self.now_s]

    def _send(self, jobs: Iterable[int], not_before_s: float) -> None:
        """Routes each request to the replica that can start it first. The hot loop."""
        starts, routed = self._starts, self._routed
        if not routed:
            self._waiting += jobs
            return
        arrival_s, prefill_s, decode_s = self._arrival_s, self._prefill_s, self._decode_s
        first_token_s, done_s, departures = self.first_token_s, self._done_s, self._departures
        last = len(departures) - 1
        for job in jobs:
            start_s = min(starts)
            at = starts.index(start_s)
            now_s = max(arrival_s[job], not_before_s)
            if start_s < now_s:
                start_s = now_s
            token_s = start_s + prefill_s[job]
            end_s = token_s + decode_s[job]
            first_token_s[job] = token_s
            done_s[job] = end_s
            replica = routed[at]
            replica.jobs.append(job)
            heapreplace(replica.slots, end_s)
            free_s = replica.slots[0]
            starts[at] = token_s if token_s > free_s else free_s
            second = int(end_s) + 1
            departures[second if second < last else last] += 1
