"""Simulates one serving policy on recorded days in virtual time, and computes the policy's cost and SLO attainment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from raytide.core.errors import ConfigError
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.baselines import TICK_S, ServeOnDemand, ServeTarget, SpotHedge, SpotNaive, Static
from raytide.simulate.serving.bound import lower_bound_usd
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.raytide import RaytidePolicy
from raytide.simulate.serving.requests import Workload, workload
from raytide.simulate.serving.router import SimulatedReplica
from raytide.simulate.serving.setup import USD_H, ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones, spot_zones

STATIC_SLO = 0.99
"""The SLO attainment of the fixed fleet, which is the smallest fleet that reaches it."""


class FleetPolicy(Protocol):
    def tick(self, fleet: SimulatedFleet) -> None:
        """Makes one decision: launches and releases replicas of the fleet."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The number of nodes by market, and the number of ready replicas, at one tick."""

    at_s: float
    ondemand: int
    spot: int
    ready: int


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    cost_usd: float
    slo_attainment: float
    worst_hour: int
    """The hour with the most late requests; hour 0 contains the first start."""
    worst_hour_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    node_hours: dict[CapacityType, float]
    request_count: int
    spot_nodes_lost: int
    samples: tuple[FleetSample, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Returns all fields except the samples."""
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "samples"}
        return {**shown, "node_hours": {str(market): hours for market, hours in self.node_hours.items()}}


@dataclass(frozen=True, slots=True)
class Scenario:
    """The inputs of a simulation, which are the same for every policy."""

    setup: ServingSetup
    work: Workload
    zones: SpotZones
    usd_h: dict[CapacityType, float]

    @classmethod
    def of(cls, setup: ServingSetup) -> Scenario:
        return cls(setup, workload(setup), spot_zones(setup), _prices(setup))

    def lower_bound_usd(self) -> float:
        return lower_bound_usd(self.setup, self.work, self.zones, self.usd_h)

    def run(self, name: str) -> Result:
        if name == "static":
            return self._smallest_static()
        return self._run(name, policy(name, self))

    def _smallest_static(self) -> Result:
        """Finds the smallest fixed fleet by bisection on its size, because a larger fleet never has more late
        requests."""
        low, high = 1, self.setup.max_replicas
        best = self._run("static", Static(high))
        while low < high:
            middle = (low + high) // 2
            result = self._run("static", Static(middle))
            if result.slo_attainment >= STATIC_SLO:
                high, best = middle, result
            else:
                low = middle + 1
        return best

    def setup_of(self, name: str) -> ServingSetup:
        """Returns the setup for a policy. It includes the order in which requests wait, and whether the requests of a
        lost node resume.
        """
        setup, is_raytide = self.setup, name == "raytide"
        queue = setup.queue or ("deadline" if is_raytide else "first-come")
        resumes = is_raytide if setup.resumes is None else setup.resumes
        return setup.model_copy(update={"queue": queue, "resumes": resumes})

    def _run(self, name: str, chosen: FleetPolicy) -> Result:
        fleet = SimulatedFleet(self.setup_of(name), self.work, self.zones)
        samples = simulate(fleet, chosen)
        hours = fleet.node_hours()
        ttft = np.array(fleet.first_token_s) - self.work.arrival_s
        never_s = self.setup.horizon_s - self.work.arrival_s + self.setup.slo_ttft_s
        ttft = np.where(np.isfinite(ttft), ttft, never_s)  # never served: late
        met = ttft <= self.setup.slo_ttft_s + 1e-9
        hour = (self.work.arrival_s // 3600.0).astype(int)
        late_by_hour = np.bincount(hour, weights=~met)
        worst = int(late_by_hour.argmax())
        p50, p99 = np.percentile(ttft, (50, 99))
        return Result(
            policy=name,
            cost_usd=sum(hours[market] * self.usd_h[market] for market in CapacityType),
            slo_attainment=float(met.mean()),
            worst_hour=worst,
            worst_hour_attainment=float(met[hour == worst].mean()),
            ttft_p50_s=float(p50),
            ttft_p99_s=float(p99),
            node_hours=hours,
            request_count=self.work.count,
            spot_nodes_lost=len(fleet.lost_nodes),
            samples=tuple(samples),
        )


def policy(name: str, stage: Scenario) -> FleetPolicy:
    """Returns a policy by name. `static` is not available here, because its size must be searched for."""
    target = ServeTarget(stage.setup.max_replicas)
    named: dict[str, Callable[[], FleetPolicy]] = {
        "serve-ondemand": lambda: ServeOnDemand(target),
        "spot-naive": lambda: SpotNaive(target),
        "raytide": lambda: RaytidePolicy(stage.setup, stage.work, stage.zones, stage.usd_h),
        **{f"spothedge-{extra}": lambda extra=extra: SpotHedge(target, extra) for extra in range(5)},  # type: ignore[misc]
    }
    if name not in named:
        raise ConfigError(f"there is no policy {name!r}.", hint=f"Choose static, {', '.join(named)}.")
    return named[name]()


def simulate(fleet: SimulatedFleet, chosen: FleetPolicy) -> list[FleetSample]:
    """Runs the policy to the end, and returns the state of the fleet at each tick.

    Time advances from event to event. Events are capacity changes, reclaim notices, replicas that become ready, and
    ticks.
    """
    setup, zones = fleet.setup, fleet.zones
    changes = deque(zones.times_s[1:])
    notices = deque(at - setup.notice_s for at in changes if at > setup.notice_s > 0)
    coming: deque[SimulatedReplica] = deque()
    samples: list[FleetSample] = []
    tick_s = 0.0
    while True:
        due_s = [*islice(changes, 1), *islice(notices, 1), *(replica.ready_s for replica in islice(coming, 1))]
        now_s = min([tick_s, *due_s])
        if now_s >= setup.horizon_s:
            break
        fleet.advance(now_s)
        while notices and notices[0] <= now_s:
            fleet.warn(notices.popleft() + setup.notice_s)
        if changes and changes[0] <= now_s:
            changes.popleft()
            fleet.reclaim()
        while coming and coming[0].ready_s <= now_s:
            fleet.admit(coming.popleft())
        if now_s >= tick_s:
            fleet.update_counts()
            known = len(fleet.launched)
            chosen.tick(fleet)
            coming += fleet.launched[known:]
            samples.append(_sample(fleet))
            tick_s += TICK_S
    fleet.advance(setup.horizon_s)
    return samples


def _sample(fleet: SimulatedFleet) -> FleetSample:
    spot = sum(replica.zone is not None for replica in fleet.alive)
    ready = sum(fleet.is_ready(replica) for replica in fleet.alive)
    return FleetSample(fleet.now_s, len(fleet.alive) - spot, spot, ready)


def _prices(setup: ServingSetup) -> dict[CapacityType, float]:
    known = USD_H.get(setup.gpu)
    ondemand, spot = setup.ondemand_usd_h, setup.spot_usd_h
    if known is not None:
        ondemand = known[0] * setup.gpus_per_node if ondemand is None else ondemand
        spot = known[1] * setup.gpus_per_node if spot is None else spot
    if ondemand is None or spot is None:
        raise ConfigError(f"no price of {setup.gpu} is known.", hint="Give ondemand_usd_h and spot_usd_h.")
    return {CapacityType.ON_DEMAND: ondemand, CapacityType.SPOT: spot}
