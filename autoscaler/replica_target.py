"""How many requests miss their time to first token with n replicas: two queues, prefill and decode slots.

A replica prefills one prompt after another, and a request holds one of its slots until its last token. Waiting in each
is that of a queue with many servers: Erlang's C for the chance of it, an exponential tail for its length, longer the
burstier the arrivals and the more uneven the requests (Allen and Cunneen).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKETS_PER_DOUBLING = 6
BUCKETS = 20 * BUCKETS_PER_DOUBLING

_RATES = 160
"""Grid points of a table, each 5 % above the last."""
_STEP = 1.05
_NORMAL = ((-2.857, 0.01126), (-1.3556, 0.22208), (0.0, 0.53333), (1.3556, 0.22208), (2.857, 0.01126))
"""The normal distribution as five weighted points (Gauss and Hermite)."""


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """What one replica does on its GPU, as measured."""

    prefill_tps: float
    slots: int
    tpot_s: float


def bucket_of(tokens: Floats) -> NDArray[np.int64]:
    """The histogram bucket of each number of tokens."""
    doublings: Floats = np.log2(np.maximum(tokens, 1.0))
    return np.minimum(doublings * BUCKETS_PER_DOUBLING, BUCKETS - 1).astype(np.int64)


@dataclass(slots=True)
class Mix:
    """Which requests came, the last hours counting most: prompts by length, tokens generated, and how bursty."""

    half_life_s: float = 3 * 3600.0
    count: Floats = field(default_factory=lambda: np.zeros(BUCKETS))
    tokens: Floats = field(default_factory=lambda: np.zeros(BUCKETS))
    finished: float = 0.0
    output_tokens: float = 0.0
    output_squares: float = 0.0
    burst: float = 2.0
    """Variance of the requests of an interval over their mean; 1 for Poisson."""

    def observe(self, count: Floats, tokens: Floats, dt_s: float) -> None:
        fade = 0.5 ** (dt_s / self.half_life_s)
        self.count = self.count * fade + count
        self.tokens = self.tokens * fade + tokens

    def observe_outputs(self, finished: int, tokens: float, squares: float, dt_s: float) -> None:
        fade = 0.5 ** (dt_s / self.half_life_s)
        self.finished = self.finished * fade + finished
        self.output_tokens = self.output_tokens * fade + tokens
        self.output_squares = self.output_squares * fade + squares

    def observe_burst(self, requests: int, expected: float) -> None:
        if expected > 0:
            seen = min((requests - expected) ** 2 / expected, 50.0)
            self.burst += (seen - self.burst) * min(0.01, expected / 2000)

    def service(self, speed: ReplicaSpeed, slo_ttft_s: float) -> Service:
        """What the requests hold, and how long they may wait."""
        seen = self.count > 0
        weight = self.count[seen] / self.count.sum()
        prefill_s = self.tokens[seen] / self.count[seen] / speed.prefill_tps
        mean_s, square = float(weight @ prefill_s), float(weight @ prefill_s**2)
        finished = max(self.finished, 1.0)
        decode_s = self.output_tokens / finished * speed.tpot_s
        decode_square = max(self.output_squares / finished * speed.tpot_s**2, decode_s**2)
        held_square = square + 2 * mean_s * decode_s + decode_square
        slack_s = slo_ttft_s - prefill_s
        order = np.argsort(slack_s)
        return Service(mean_s, square, mean_s + decode_s, held_square, slack_s[order], weight[order])


@dataclass(frozen=True, slots=True)
class Service:
    """Of the requests that come: seconds of prefill and in a slot (means and means of squares), and time to wait."""

    prefill_s: float
    prefill_square: float
    held_s: float
    held_square: float
    slack_s: Floats
    """Rising: what a request may wait and still be in time; negative when it cannot be."""
    weight: Floats
    """The share of requests with that slack."""


@dataclass(frozen=True, slots=True)
class MissTable:
    """The share of requests that miss, by replicas (rows, from 0) and by rate (columns, a geometric grid)."""

    least_rps: float
    shares: Floats

    @classmethod
    def of(cls, service: Service, burst: float, slots_each: int, most: int) -> MissTable:
        mean_s, held_s, slack_s, weight = service.prefill_s, service.held_s, service.slack_s, service.weight
        uneven, held_uneven = service.prefill_square / mean_s**2 - 1.0, service.held_square / held_s**2 - 1.0
        least_rps = 0.02 / max(mean_s, held_s / slots_each)
        rates: Floats = least_rps * np.power(_STEP, np.arange(_RATES, dtype=np.float64))
        hopeless = float(weight[slack_s < 0].sum())
        loads, slot_loads = rates * mean_s, rates * held_s
        waits, slot_waits = _erlang_c(most, loads), _erlang_c(most * slots_each, slot_loads)
        drain_s = mean_s * (burst + uneven) / 2
        slot_drain_s = held_s * (burst + held_uneven) / 2
        shares = np.ones((most + 1, _RATES))
        for replicas in range(1, most + 1):
            prefill = _late(waits[replicas], replicas, loads, drain_s, slack_s, weight)
            slots = replicas * slots_each
            decode = _late(slot_waits[slots], slots, slot_loads, slot_drain_s, slack_s, weight)
            shares[replicas] = np.minimum(1.0, hopeless + prefill + decode)
        return cls(least_rps, shares)

    def misses(self, rate_rps: float, spread: float) -> Floats:
        """The share that misses with 0, 1, 2... replicas, where the logarithm of the rate varies by `spread`."""
        middle = np.log(max(rate_rps, 1e-9) / self.least_rps) / np.log(_STEP)
        total = np.zeros(len(self.shares))
        for point, weight in _NORMAL:
            at = min(max(middle + point * spread / np.log(_STEP), 0.0), _RATES - 1.001)
            low = int(at)
            total += weight * (self.shares[:, low] * (low + 1 - at) + self.shares[:, low + 1] * (at - low))
        return total / sum(weight for _, weight in _NORMAL)


def _late(waits: Floats, servers: int, load: Floats, drain_s: float, slack_s: Floats, weight: Floats) -> Floats:
    """P(wait > slack >= 0) over the requests' slacks; 1 where there is more work than servers.

    `drain_s`: how long one server too many takes to shorten the tail by e.
    """
    spare = np.maximum(servers - load, 0.0) / drain_s
    tail = np.exp(-np.outer(spare, np.maximum(slack_s, 0.0))) @ np.where(slack_s >= 0, weight, 0.0)
    return np.where(load >= servers, 1.0, waits * tail)


def _erlang_c(most: int, load: Floats) -> Floats:
    """The chance that all servers are busy, by servers (rows, from 0); 1 where they cannot keep up."""
    waits = np.ones((most + 1, len(load)))
    blocked = np.ones_like(load)
    for servers in range(1, most + 1):
        blocked = load * blocked / (servers + load * blocked)
        idle = np.maximum(1.0 - load / servers, 1e-9)
        waits[servers] = np.where(load >= servers, 1.0, blocked / (idle + (1.0 - idle) * blocked))
    return waits
