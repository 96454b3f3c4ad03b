"""Computes the cost of serving for an omniscient buyer of whole nodes. Requests queue by deadline, as in raytide's
replicas, and a given share of them may be late.

The lower bound of `raytide simulate serving` buys fractions of nodes for the mean work of five minutes. Here the
fleet has a whole number of nodes in each minute. A minute has as many late requests as it would have if the fleet
had this size all the time. Lagrange's relaxation (weak duality) gives a lower bound of the cost at which at most the
allowed number of requests are late. The inner problem of the relaxation is a dynamic programme over minutes and
fleet sizes.

In each minute, the fleet uses spot nodes up to the zones' largest capacity in that minute, and on-demand nodes for
the rest. Starts are billed at the spot price, and a reclaim loses no requests. Therefore no policy pays less, except
for the effect of queues that last from one minute into the next.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raytide.autoscaler.endpoints.queue_simulator import DeadlineFleet
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.compare import Scenario

Floats = NDArray[np.float64]
STEP_S = 60.0
MOST_USD, STEPS = 100.0, 40
"""The largest price of a late request, and the evaluations in search of the best one."""


class WholeNodeFloor:
    """The lowest cost of serving one scenario with whole nodes. The caller gives the share of the requests that must be
    served in time.
    """

    def __init__(self, stage: Scenario) -> None:
        setup = stage.setup
        minutes = int(np.ceil(setup.horizon_s / STEP_S))
        sizes = np.arange(setup.max_replicas + 1)
        room = np.array([sum(stage.zones.most_in(at * STEP_S, (at + 1) * STEP_S)) for at in range(minutes)])
        spot = np.minimum(sizes, room[:, None])
        usd = stage.usd_h[CapacityType.SPOT] * spot + stage.usd_h[CapacityType.ON_DEMAND] * (sizes - spot)
        self._usd = usd * STEP_S / 3600.0
        start_usd = stage.usd_h[CapacityType.SPOT] * setup.cold_start_s / 3600.0
        self._rise_usd = start_usd * np.maximum(0, sizes[:, None] - sizes)
        self._late, self._count = _late(stage, minutes, len(sizes)), stage.work.count

    def usd(self, target: float) -> float:
        """Returns the least cost of serving the share `target` of the requests in time."""
        return self._relaxed_usd(self._late_usd(target), (1.0 - target) * self._count)

    def sizes(self, target: float) -> list[int]:
        """Returns, for each minute, the size of the cheapest fleet that serves the share `target` of the requests in
        time.
        """
        cost = self._usd + self._late_usd(target) * self._late
        best, before = self._rise_usd[:, 0] + cost[0], []
        for step in cost[1:]:
            sums = self._rise_usd + best
            before.append(sums.argmin(axis=1))
            best = sums.min(axis=1) + step
        sizes = [int(best.argmin())]
        for came_from in reversed(before):
            sizes.append(int(came_from[sizes[-1]]))
        return sizes[::-1]

    def _late_usd(self, target: float) -> float:
        """Returns the price of a late request at which the relaxed cost is largest."""
        allowed, low, high = (1.0 - target) * self._count, 0.0, MOST_USD
        for _ in range(STEPS):  # the relaxed cost is concave in the price of a late request
            first, second = low + (high - low) / 3, high - (high - low) / 3
            if self._relaxed_usd(first, allowed) < self._relaxed_usd(second, allowed):
                low = first
            else:
                high = second
        return (low + high) / 2

    def _relaxed_usd(self, late_usd: float, allowed: float) -> float:
        """Returns the least cost where a late request beyond `allowed` costs `late_usd`."""
        cost = self._usd + late_usd * self._late
        best = self._rise_usd[:, 0] + cost[0]
        for step in cost[1:]:
            best = (self._rise_usd + best).min(axis=1) + step
        return float(best.min()) - late_usd * allowed


def _late(stage: Scenario, minutes: int, sizes: int) -> Floats:
    """Returns late requests by minute and fleet size; with no replica all are late."""
    work = stage.work
    edges = np.searchsorted(work.arrival_s, np.arange(1, minutes) * STEP_S)
    requests = list(zip(work.arrival_s.tolist(), work.prefill_s.tolist(), work.decode_s.tolist(), strict=True))
    bounds = [0, *edges.tolist(), len(requests)]
    late = np.zeros((minutes, sizes))
    late[:, 0] = np.diff(bounds)
    for size in range(1, sizes):
        fleet = DeadlineFleet(size, stage.setup.slots, stage.setup.slo_ttft_s)
        for at, (first, last) in enumerate(pairwise(bounds)):
            late[at, size] = fleet.count_late(requests[first:last]) if last > first else 0
        if not late[:, size].any():  # nor has a larger one any
            break
    return late
