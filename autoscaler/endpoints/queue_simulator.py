"""Simulated fleets of 1, 2, 3... replicas. Each fleet serves the real arrivals and counts how many requests would have
been late. The counts thus show the effect of bursts of any shape, and of arrivals that a forecast would have missed.

Requests that can be in time start in the order of their arrival, on the replica that is free first. The slots of all
replicas of a fleet form one pool. Late requests are left out of the simulation, because real replicas start them
after all others (deadline_queue.py).

The counts are kept separately for each usual request rate. For a batch of requests, this is the rate that was known
one cold start before the requests arrived. A node for these requests would have to be launched at that time, when no
later rate is known. Each single rate is observed for only a few hours. The result for a rate therefore also includes
the counts at nearby rates, scaled to the same number of replicas per request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat

from raytide.core.config import Config

Floats = NDArray[np.float64]

HALF_LIFE_S = 3 * 86400.0
GUESS_H = 0.1
"""The weight of the prior for a rate, in hours of observation."""
KNOWN_H = 0.3
"""The hours of observation after which a rate counts as known."""
_LEAST_WEIGHT = 0.003
_BINS = 190
_LEAST_RPS = 1e-3
_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """The measured speed of one replica."""

    prefill_tps: float
    slots: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The requests that arrived in [from_s, until_s), with their numbers of tokens."""

    from_s: float
    until_s: float
    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats


class SavedCounts(Config):
    """The counts of the simulated fleets, in the form that is stored for the next controller."""

    late: list[list[NonNegativeFloat]]
    hours: list[NonNegativeFloat]
    totals: list[NonNegativeFloat]


class CounterfactualFleets:
    def __init__(self, most: int, speed: ReplicaSpeed, slo_ttft_s: float) -> None:
        self._speed, self._most = speed, most
        self._fleets = [DeadlineFleet(size, speed.slots, slo_ttft_s) for size in _sizes(most)]
        self._at = np.array([0, *(fleet.size for fleet in self._fleets)])
        self._late = np.zeros((_BINS, len(self._at)))
        """Late requests by rate and fleet size; in the first column, size 0, all are late."""
        self._hours = np.zeros(_BINS)
        self._totals = np.array([1.0, 1.0])
        """The requests, and their replica-seconds of work. Both start with one request that takes a second."""

    def observe(self, served: RequestBatch, usual_rps: float) -> None:
        """Simulates a batch in all fleets. `usual_rps` is the usual number of requests per second, as known before the
        batch. A replica that was started at that time would be ready for the batch.
        """
        dt_s, speed = served.until_s - served.from_s, self._speed
        fade = 0.5 ** (dt_s / HALF_LIFE_S)
        self._late *= fade
        self._hours *= fade
        rate_bin = _bin(usual_rps)
        self._hours[rate_bin] += dt_s / 3600.0
        if not len(served.arrival_s):
            return
        prefill_s, decode_s = served.prompt_tokens / speed.prefill_tps, served.output_tokens * speed.tpot_s
        requests = list(zip(served.arrival_s.tolist(), prefill_s.tolist(), decode_s.tolist(), strict=True))
        self._late[rate_bin] += [len(requests), *(fleet.count_late(requests) for fleet in self._fleets)]
        work_s = np.maximum(prefill_s, (prefill_s + decode_s) / speed.slots)
        self._totals = self._totals * fade + [len(requests), work_s.sum()]

    def set_speed(self, speed: ReplicaSpeed) -> None:
        """Sets the replicas' speed for later batches. Earlier counts stay until they decay."""
        if speed.slots != self._speed.slots:
            for fleet in self._fleets:
                fleet.set_slots(speed.slots)
        self._speed = speed

    @property
    def sizes(self) -> NDArray[np.intp]:
        """The sizes of the simulated fleets in replicas, ascending. The first size is 0, and the last is the
        maximum.
        """
        return self._at

    @property
    def saved(self) -> SavedCounts:
        """The counts to store for the next controller. The fleets' queues are not stored, because a new simulation
        rebuilds them within minutes.
        """
        return SavedCounts(late=self._late.tolist(), hours=self._hours.tolist(), totals=self._totals.tolist())

    def restore(self, counted: SavedCounts) -> None:
        """Restores stored counts. Does nothing if they were counted for other fleet sizes."""
        if len({len(row) for row in counted.late}) > 1:
            return
        late, hours, totals = np.array(counted.late), np.array(counted.hours), np.array(counted.totals[:2])
        if (late.shape, hours.shape, totals.shape) == (self._late.shape, self._hours.shape, self._totals.shape):
            self._late, self._hours, self._totals = late, hours, totals

    @property
    def request_s(self) -> float:
        """The mean replica-seconds that one request takes: the mean of `max(prefill, (prefill + decoding) / slots)`.
        `slots` is the number of requests that a replica can run at once.
        """
        requests, work_s = self._totals.tolist()
        return work_s / requests if requests else 0.0

    def late_per_h(self, usual_rps: float) -> Floats:
        """Returns the expected late requests per hour with 0, 1, 2... replicas, as a decreasing convex curve.

        The curve is computed from the counts at this request rate and at nearby rates. A prior estimate is added.
        Its weight falls as the counted hours grow. It assumes that a request is late if all replicas are busy, and
        that each replica is busy independently of the others.
        """
        rate_bin, replicas = _bin(usual_rps), np.arange(self._most + 1)
        busy = np.minimum(1.0, _rate(rate_bin) * self.request_s / np.maximum(replicas, 1))
        late: Floats = GUESS_H * 3600.0 * _rate(rate_bin) * busy**replicas
        hours = GUESS_H
        for weight, seen in self._near(rate_bin):
            ratio = _RATIO ** (seen - rate_bin)
            late = late + weight / ratio * np.interp(replicas * ratio, self._at, self._late[seen])
            hours += weight * self._hours[seen]
        return convex(late / hours)

    def _near(self, rate_bin: int) -> Iterator[tuple[float, int]]:
        """Yields (weight, bin) for the bins that contribute to a rate: the weight is 1 up to the distance of the
        nearest well-known bin, and falls by a factor of e with each bin beyond.
        """
        seen = np.flatnonzero(self._hours)
        far = np.abs(seen - rate_bin)
        known = far[self._hours[seen] > KNOWN_H]
        weights = np.exp(np.minimum((known.min() if len(known) else 0) - far, 0.0))
        for at in np.flatnonzero(weights > _LEAST_WEIGHT):
            yield float(weights[at]), int(seen[at])


class DeadlineFleet:
    def __init__(self, size: int, slots: int, slo_ttft_s: float) -> None:
        self.size = size
        self._slo_ttft_s = slo_ttft_s
        self._free_s = [0.0] * size
        """A heap of the times at which replicas finish their prefills."""
        self._slots = size * slots
        self._slots_free_s: list[float] = []
        """A heap of the times at which used slots become free. Slots that were never needed are not in it: a fleet may
        have millions."""

    def set_slots(self, each: int) -> None:
        """Sets the number of slots of each replica. If the number falls, the slots that would be free first are
        removed.
        """
        self._slots = self.size * each
        self._slots_free_s = sorted(self._slots_free_s)[-self._slots :]

    def count_late(self, requests: Iterable[tuple[float, float, float]]) -> int:
        """Returns how many of the requests get their first token late. A request is a tuple (arrival, prefill, decode)
        in seconds. This is a hot loop.
        """
        free_s, slots_free_s, slo_s, count = self._free_s, self._slots_free_s, self._slo_ttft_s, 0
        slots = self._slots
        for arrived_s, prefill_s, decode_s in requests:
            start_s, slot_s = free_s[0], slots_free_s[0] if slots_free_s else arrived_s
            has_free = len(slots_free_s) < slots and slot_s > arrived_s
            if slot_s > start_s and not has_free:
                start_s = slot_s
            if start_s < arrived_s:
                start_s = arrived_s
            token_s = start_s + prefill_s
            if token_s - arrived_s > slo_s:
                count += 1
                continue
            heapreplace(free_s, token_s)
            if has_free or not slots_free_s:
                heappush(slots_free_s, token_s + decode_s)
            else:
                heapreplace(slots_free_s, token_s + decode_s)
        return count


def convex(late: Floats) -> Floats:
    """Returns the largest convex decreasing curve that is nowhere above `late`. If several consecutive replicas are
    useful only together, the curve shares their total benefit equally among them.
    """
    corners: list[int] = []
    values = late.tolist()
    for at, value in enumerate(values):
        while len(corners) > 1:
            first, middle = corners[-2], corners[-1]
            if (values[middle] - values[first]) * (at - first) < (value - values[first]) * (middle - first):
                break
            corners.pop()
        corners.append(at)
    hull: Floats = np.interp(np.arange(len(values)), corners, late[corners])
    return np.minimum.accumulate(hull)


def _sizes(most: int) -> Sequence[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, round(sizes[-1] * 1.2))))
    return sizes


def _bin(rate_rps: float) -> int:
    return min(int(math.log(max(rate_rps, _LEAST_RPS) / _LEAST_RPS) / math.log(_RATIO)), _BINS - 1)


def _rate(rate_bin: int) -> float:
    """Returns the rate in the middle of the bin."""
    return float(_LEAST_RPS * _RATIO ** (rate_bin + 0.5))
