"""The simulated fleet: its replicas, the spot zones and the bill. A replica prefills one request after another, and
decodes requests in slots.

Unfinished requests of a lost replica start again on other replicas. The time to first token then still counts from the
original arrival.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.requests import Workload
from raytide.simulate.serving.router import DeadlineRouter, FirstComeRouter, SimulatedReplica
from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones


class SimulatedFleet:
    def __init__(self, setup: ServingSetup, work: Workload, zones: SpotZones) -> None:
        self.setup, self.zones = setup, zones
        self.now_s = 0.0
        self.launched: list[SimulatedReplica] = []
        """All replicas ever launched, in order."""
        self.alive: list[SimulatedReplica] = []
        self.router = (DeadlineRouter if setup.queue == "deadline" else FirstComeRouter)(setup, work)
        self.lost_nodes: list[SimulatedReplica] = []
        """The reclaimed spot nodes, in order."""
        self._random = np.random.default_rng([setup.seed, 3])
        self._ongoing: deque[int] = deque([0], maxlen=30)
        self._counted_s = 0

    @property
    def first_token_s(self) -> list[float]:
        """The time of each request's first token in seconds. It is infinite for a request without a first token."""
        return self.router.first_token_s

    @property
    def arrived(self) -> int:
        """The number of requests that have arrived."""
        return self.router.arrived

    def of(self, market: CapacityType) -> list[SimulatedReplica]:
        """Returns the replicas of a market, including replicas that are still launching. Replicas that are being
        released are left out.
        """
        is_spot = market is CapacityType.SPOT
        return [replica for replica in self.alive if not replica.is_leaving and (replica.zone is not None) == is_spot]

    def is_ready(self, replica: SimulatedReplica) -> bool:
        return replica.ready_s <= self.now_s and not replica.is_leaving

    def busy(self, replica: SimulatedReplica) -> int:
        """Returns the number of requests on the replica, in flight or waiting.

        A finished request counts until all requests before it have finished.
        """
        return len(replica.jobs)

    @property
    def ongoing(self) -> int:
        """The number of requests that are in flight or waiting."""
        return self._ongoing[-1]

    def mean_ongoing(self) -> float:
        """Returns the mean of `ongoing` over the last 30 s."""
        return sum(self._ongoing) / len(self._ongoing)

    def launch_ondemand(self) -> SimulatedReplica:
        return self._launch(None)

    def launch_spot(self, zone: int) -> SimulatedReplica | None:
        """Launches a replica in the zone and returns it. Returns None if the zone has no room now, or will have no room
        after the notice time.
        """
        soon = self.zones.at(self.now_s + self.setup.notice_s)[zone]
        room = min(self.zones.at(self.now_s)[zone], soon)
        there = sum(replica.zone == zone for replica in self.alive)
        return self._launch(zone) if there < room else None

    def release(self, replica: SimulatedReplica) -> None:
        """Ends the replica after its last request. A replica without requests ends at once."""
        last_s = max((self.router.done_s[job] for job in replica.jobs), default=self.now_s)
        replica.ended_s = min(replica.ended_s, max(self.now_s, last_s))
        self.router.cordon(replica)
        self._remove_ended()

    def advance(self, until_s: float) -> None:
        """Serves the requests that arrive before `until_s`, and sets the clock to `until_s`."""
        self.router.advance(until_s)
        self.now_s = until_s
        self._remove_ended()

    def admit(self, replica: SimulatedReplica) -> None:
        """Adds a ready replica to the router."""
        if replica.ended_s <= self.now_s or replica.is_leaving:
            return
        self.router.admit(replica, self.now_s)

    def reclaim(self) -> None:
        """Reclaims randomly chosen spot nodes in each zone that has more nodes than its capacity allows."""
        for zone, room in enumerate(self.zones.at(self.now_s)):
            for replica in self._excess(zone, room, [r for r in self.alive if r.zone == zone]):
                self._on_lost(replica)

    def warn(self, deadline_s: float) -> None:
        """Warns the spot nodes that will be reclaimed at `deadline_s`. They take no new requests, and hand over the
        requests that they cannot finish by then.
        """
        for zone, room in enumerate(self.zones.at(deadline_s)):
            staying = [r for r in self.alive if r.zone == zone and r.ended_s > deadline_s]
            for replica in self._excess(zone, room, staying):
                done_s = self.router.done_s
                handed = [job for job in replica.jobs if done_s[job] > deadline_s]
                replica.jobs = deque(job for job in replica.jobs if done_s[job] <= deadline_s)
                replica.ended_s = deadline_s
                self.router.cordon(replica)
                self.lost_nodes.append(replica)
                self.router.send_again(handed, self.now_s)

    def update_counts(self) -> None:
        """Removes finished requests from the replicas. Records the number of requests in progress at each second."""
        for replica in self.alive:
            jobs = replica.jobs
            while jobs and self.router.done_s[jobs[0]] <= self.now_s:
                jobs.popleft()
        ongoing = self._ongoing[-1]
        while self._counted_s < int(self.now_s):
            self._counted_s += 1
            ongoing += self.router.arrivals[self._counted_s] - self.router.departures[self._counted_s]
            self._ongoing.append(ongoing)

    def node_hours(self) -> dict[CapacityType, float]:
        """Returns the node hours billed so far, by market. A node is billed from its launch to its end."""
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
        again = [job for job in replica.jobs if self.router.done_s[job] > self.now_s]
        replica.jobs.clear()
        replica.ended_s = self.now_s
        if not replica.is_leaving:
            self.lost_nodes.append(replica)
        self.router.cordon(replica)
        self._remove_ended()
        self.router.send_again(again, self.now_s)

    def _remove_ended(self) -> None:
        if any(replica.ended_s <= self.now_s for replica in self.alive):
            self.alive = [replica for replica in self.alive if replica.ended_s > self.now_s]
