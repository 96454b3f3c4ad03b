"""Spot and on-demand nodes for one endpoint: what was seen goes into a memory, and a plan comes out.

A plan says how many replicas there should be, what to launch and what to let go. A node that is not wanted any more
stays until as many as are wanted are ready without it: on-demand leaves when its spot replacement serves, not when that
starts. No clock and no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raytide.autoscaler.forecast import Forecast
from raytide.autoscaler.hazard import Hazard, holds
from raytide.autoscaler.replica_target import Floats, MissTable, ReplicaSpeed, Service
from raytide.autoscaler.replica_target import Mix as RequestMix
from raytide.autoscaler.shadow import Shadow
from raytide.autoscaler.slo_price import SloPrice
from raytide.autoscaler.spot_mix import ONDEMAND, Mix, PoolOffer, Risk, choose
from raytide.autoscaler.stock import Stock

SERVICE_PERIOD_S = 1800.0
"""How often it is worked out anew what requests hold."""
HOLD_S = 300.0
"""Capacity is let go when it was not wanted for this long."""
FULL = 0.95
"""No replica is meant to be busier."""
DRAIN_S = 120.0
"""In which time work that has piled up should be gone."""


@dataclass(frozen=True, slots=True)
class ServingGoal:
    slo_ttft_s: float
    slo_target: float
    min_replicas: int
    max_replicas: int
    cold_start_s: float
    speed: ReplicaSpeed
    ondemand_usd_h: float
    spot_usd_h: Mapping[str, float]
    """By zone."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What the replicas and the fleet told since the last look."""

    at_s: float
    dt_s: float
    requests: int
    prompt_count: Floats
    prompt_tokens: Floats
    """Requests and their tokens by `replica_target.bucket_of`."""
    finished: int
    output_tokens: float
    output_squares: float
    missed: int
    """Requests of which it is certain since the last look that their first token was late."""
    ongoing: float
    """Requests in flight and waiting."""
    requests_by_s: NDArray[np.int64]
    prompt_tokens_by_s: Floats
    """Second by second."""
    lost: Mapping[str, int]
    """Spot nodes taken back, by zone."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    id: str
    zone: str
    """ONDEMAND, or its spot zone."""
    is_ready: bool
    busy: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    replicas: int
    launch: tuple[str, ...] = ()
    """Pools, one for each node to launch."""
    release: tuple[str, ...] = ()
    """Ids of nodes."""
    reason: str = ""


@dataclass(slots=True)
class Memory:
    goal: ServingGoal
    forecast: Forecast
    price: SloPrice
    shadow: Shadow
    requests: RequestMix = field(default_factory=RequestMix)
    hazard: Hazard = field(default_factory=Hazard)
    stock: Stock = field(default_factory=Stock)
    service: Service | None = None
    service_at_s: float = 0.0
    ongoing: float = 0.0
    _rates: deque[tuple[float, float]] = field(default_factory=deque)

    @classmethod
    def of(cls, goal: ServingGoal) -> Memory:
        shadow = Shadow(goal.max_replicas, goal.speed.slots, goal.cold_start_s)
        return cls(goal, Forecast(goal.cold_start_s), SloPrice(goal.slo_target), shadow)

    def rate_rps(self) -> float:
        """The highest forecast of the time in which capacity is held."""
        return max(rate for _, rate in self._rates)

    def learn(self, heard: Heard, nodes: Sequence[FleetNode]) -> None:
        expected = self.forecast.rate_rps * heard.dt_s
        self.requests.observe(heard.prompt_count, heard.prompt_tokens, heard.dt_s)
        self.requests.observe_outputs(heard.finished, heard.output_tokens, heard.output_squares, heard.dt_s)
        self.requests.observe_burst(heard.requests, expected)
        self.forecast.observe(heard.at_s, heard.requests, heard.dt_s)
        self.price.observe(heard.requests, heard.missed, self.forecast.rate_rps, heard.dt_s)
        held = holds(node.zone for node in nodes if node.zone != ONDEMAND)
        self.hazard.observe(held, heard.lost, heard.at_s, heard.dt_s)
        for zone in heard.lost:
            self.stock.took_back(zone, held.get(zone, 0), heard.at_s)
        self.ongoing = heard.ongoing
        self._rates.append((heard.at_s, self.forecast.rate_rps))
        while self._rates[0][0] < heard.at_s - HOLD_S:
            self._rates.popleft()
        if self.service is not None:
            prefill_s = heard.prompt_tokens_by_s / self.goal.speed.prefill_tps
            self.shadow.observe(heard.at_s, heard.requests_by_s, prefill_s, self.service, self.forecast.rate_rps)
        if self.requests.count.sum() > 0 and (
            self.service is None or heard.at_s - self.service_at_s >= SERVICE_PERIOD_S
        ):
            goal, self.service_at_s = self.goal, heard.at_s
            self.service = self.requests.service(goal.speed, goal.slo_ttft_s)
            formula = MissTable.of(self.service, self.requests.burst, goal.speed.slots, goal.max_replicas)
            self.shadow.trust(formula, self.forecast.spread)


def plan(memory: Memory, nodes: Sequence[FleetNode], now_s: float) -> FleetPlan:
    """What to launch and what to let go. Tell `memory.stock` what became of the launches."""
    mix = wanted(memory, nodes, now_s)
    have = holds(node.zone for node in nodes)
    launch = [name for name, count in mix.nodes.items() for _ in range(count - have.get(name, 0))]
    launch = launch[: max(0, memory.goal.max_replicas - len(nodes))]
    surplus = [node for name, count in have.items() for node in _surplus(nodes, name, count - mix.nodes.get(name, 0))]
    ready = sum(node.is_ready for node in nodes)
    release = []
    for node in sorted(surplus, key=lambda node: (node.is_ready, node.zone != ONDEMAND, node.busy, node.id)):
        if not node.is_ready:
            release.append(node.id)
        elif ready - 1 >= mix.total:
            release.append(node.id)
            ready -= 1
    shares = ", ".join(f"{count} {name or 'on demand'}" for name, count in sorted(mix.nodes.items()))
    reason = f"{memory.rate_rps():.2f} requests/s ahead; {shares} miss {mix.missed_share:.2%} at ${mix.usd_h:.2f}/h"
    return FleetPlan(mix.total, tuple(launch), tuple(release), reason)


def wanted(memory: Memory, nodes: Sequence[FleetNode], now_s: float) -> Mix:
    """The fleet that is cheapest with the price of missed requests in the sum."""
    goal, have = memory.goal, holds(node.zone for node in nodes)
    offers = [PoolOffer(ONDEMAND, goal.ondemand_usd_h, have.get(ONDEMAND, 0), goal.max_replicas)]
    for zone, usd_h in goal.spot_usd_h.items():
        held = have.get(zone, 0)
        most = memory.stock.most(zone, held, now_s)
        offers.append(PoolOffer(zone, usd_h, held, most, memory.hazard.per_h(zone, now_s)))
    rate_rps = memory.rate_rps()
    return choose(
        offers,
        memory.shadow.misses(rate_rps),
        usd_per_missed_share_h=memory.price.usd(_request_s(memory), goal.ondemand_usd_h) * rate_rps * 3600.0,
        risk=Risk(goal.cold_start_s + 20.0, memory.hazard.lost_share),
        cold_start_s=goal.cold_start_s,
        least=min(max(goal.min_replicas, _least(memory, nodes)), goal.max_replicas),
        most=goal.max_replicas,
    )


def _surplus(nodes: Sequence[FleetNode], zone: str, count: int) -> list[FleetNode]:
    """Of a pool: those that are not ready, then the least busy."""
    there = sorted((n for n in nodes if n.zone == zone), key=lambda n: (n.is_ready, n.busy, n.id))
    return there[: max(0, count)]


def _request_s(memory: Memory) -> float:
    """Replica-seconds of one request: of prefill, or of its share of the slots."""
    prefill_s, decode_s = _means_s(memory)
    return max(prefill_s, (prefill_s + decode_s) / memory.goal.speed.slots)


def _means_s(memory: Memory) -> tuple[float, float]:
    """Prefill and decode of one request."""
    speed, requests = memory.goal.speed, memory.requests
    prompt_tokens = float(requests.tokens.sum() / max(requests.count.sum(), 1.0))
    return prompt_tokens / speed.prefill_tps, requests.output_tokens / max(requests.finished, 1.0) * speed.tpot_s


def _least(memory: Memory, nodes: Sequence[FleetNode]) -> int:
    """What keeps up with the work, and clears within `DRAIN_S` what will still wait after a cold start."""
    request_s, rate_rps = _request_s(memory), memory.rate_rps()
    prefill_s, decode_s = _means_s(memory)
    usual = rate_rps * (2 * prefill_s + decode_s)
    ready = sum(node.is_ready for node in nodes)
    cleared = max(0.0, ready - rate_rps * request_s) * memory.goal.cold_start_s
    waiting_s = max(0.0, (memory.ongoing - usual) * request_s - cleared)
    return math.ceil(rate_rps * request_s / FULL + waiting_s / DRAIN_S)
