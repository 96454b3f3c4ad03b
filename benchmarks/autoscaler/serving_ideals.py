"""Splits the cost of raytide's serving policy by the things that the policy cannot know or avoid.

    benchmarks/autoscaler/serving_ideals.py --recording code.csv --recording chat.jsonl
                                            --spot S.json --case 0

The first row is the real policy. Each later row makes one of these things ideal. The benchmark runs one case of
serving_targets.py. All costs are multiples of a lower bound, which buys fractions of nodes. In the later rows, the
price of a late request is constant. The price is set so that exactly the requested share of requests is in time: the
cost is interpolated between runs at two or three prices. The first hour contains the first start. This hour counts
for the cost, but not for the share of requests in time.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from serving_costs import with_plenty_of_spot
from serving_floor import WholeNodeFloor
from serving_targets import CASES, scenario

from raytide.autoscaler.endpoints.replica_value import SloShadowPrice
from raytide.autoscaler.endpoints.traffic import RateForecast
from raytide.autoscaler.spot.reclaim_hazard import ReclaimHazard
from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.compare import Scenario, simulate
from raytide.simulate.serving.fleet import SimulatedFleet
from raytide.simulate.serving.raytide import RaytidePolicy
from raytide.simulate.serving.requests import Floats
from raytide.simulate.serving.router import SimulatedReplica

IDEALS = {
    "rate": "the mean rate around the time of serving is known",
    "losses": "a reclaimed node goes on, at the price of on demand, and none is expected",
    "start": "a start takes a second",
    "scarcity": "spot is never scarce",
}
FIRST_S = 3600.0
FIRST_LOG_PRICE = -0.5


@dataclass(slots=True)
class ConstantPrice(SloShadowPrice):
    log_price: float = 0.0
    """The logarithm of the price relative to the initial one."""

    @property
    def _log_price(self) -> float:
        return self.log_price


@dataclass(slots=True)
class KnownRate(RateForecast):
    """A forecast that knows future arrivals. It returns the mean rate of a window that begins now and lasts twice
    `ahead_s`. A replica that is bought now begins to serve in the middle of this window.
    """

    arrival_s: Floats = field(default_factory=lambda: np.zeros(0))
    ahead_s: float = 0.0

    def observe(self, requests: int, dt_s: float, ahead_s: float) -> None:
        self._now_s += dt_s
        self.ahead_s = ahead_s

    @property
    def rps(self) -> float:
        window_s = 2 * self.ahead_s
        first, last = np.searchsorted(self.arrival_s, (self._now_s, self._now_s + window_s))
        return float(last - first) / window_s if window_s else 0.0


class NoLosses(ReclaimHazard):
    def losses(
        self, held: Mapping[str, float], now_s: float, recovery_s: float
    ) -> Iterator[tuple[float, Sequence[str]]]:
        return iter(())

    def per_h(self, name: str, now_s: float) -> float:
        return 0.0


class MovedFleet(SimulatedFleet):
    """A fleet in which a node that would be reclaimed continues to run, at the on-demand price."""

    moved: list[tuple[SimulatedReplica, float]]

    def reclaim(self) -> None:
        self.moved = getattr(self, "moved", [])
        for zone, room in enumerate(self.zones.at(self.now_s)):
            for replica in [replica for replica in self.alive if replica.zone == zone][room:]:
                self.moved.append((replica, self.now_s))
                replica.zone = None

    def node_hours(self) -> dict[CapacityType, float]:
        hours = super().node_hours()
        for replica, at_s in getattr(self, "moved", []):
            on_spot_h = (at_s - replica.launched_s) / 3600.0
            hours[CapacityType.SPOT] += on_spot_h
            hours[CapacityType.ON_DEMAND] -= on_spot_h
        return hours


def run(stage: Scenario, ideals: Sequence[str], log_price: float | None) -> tuple[float, float]:
    """Returns the cost in dollars, and the share of late requests after the first hour. If `log_price` is None, the
    policy uses its own price of a late request.
    """
    setup = stage.setup_of("raytide")
    if "start" in ideals:
        setup = setup.model_copy(update={"cold_start_s": 1.0})
    zones = (with_plenty_of_spot(stage) if "scarcity" in ideals else stage).zones
    policy = RaytidePolicy(setup, stage.work, zones, stage.usd_h)
    if log_price is not None:
        policy.model.price = ConstantPrice(setup.slo_target, log_price=log_price)
    if "rate" in ideals:
        policy.model.usual_rate = KnownRate(arrival_s=stage.work.arrival_s)
    if "losses" in ideals:
        policy.hazard = NoLosses()
    fleet = (MovedFleet if "losses" in ideals else SimulatedFleet)(setup, stage.work, zones)
    simulate(fleet, policy)
    usd = sum(hours * stage.usd_h[market] for market, hours in fleet.node_hours().items())
    counted = stage.work.arrival_s >= FIRST_S
    is_late = np.array(fleet.first_token_s) - stage.work.arrival_s > setup.slo_ttft_s + 1e-9
    return usd, float(is_late[counted].mean())


def usd_at_target(stage: Scenario, ideals: Sequence[str]) -> float:
    """Returns the cost at which exactly the target share of requests is in time. Interpolates this cost between two
    runs. The cost is taken as linear in the logarithm of the late share.

    To find the two runs, changes the price of a late request step by step. Each step assumes that a price k times
    higher makes the late share k times smaller.
    """
    allowed = 1.0 - stage.setup.slo_target
    log_price, points = FIRST_LOG_PRICE, list[tuple[float, float]]()
    while len(points) < 3:
        usd, late = run(stage, ideals, log_price)
        points.append((math.log(max(late, 1e-6) / allowed), usd))
        sides = {beyond > 0 for beyond, _ in points}
        if len(sides) == 2:
            break
        log_price += points[-1][0] + math.copysign(0.2, points[-1][0])
    (low, low_usd), (high, high_usd) = sorted(sorted(points, key=lambda point: abs(point[0]))[:2])
    return low_usd + (high_usd - low_usd) * (0.0 - low) / (high - low)


def print_ideals(stage: Scenario) -> None:
    bound_usd, target = stage.lower_bound_usd(), stage.setup.slo_target
    usd, late = run(stage, (), None)
    print("| ideal | x bound |\n|---|---|")
    print(f"| nothing; {100 * (1 - late):.2f} % attained after the first hour | {usd / bound_usd:.2f} |", flush=True)
    print(f"| the price of a late request | {usd_at_target(stage, ()) / bound_usd:.2f} |", flush=True)
    for ideal, name in IDEALS.items():
        print(f"| {name} | {usd_at_target(stage, (ideal,)) / bound_usd:.2f} |", flush=True)
    print(f"| an omniscient buyer of whole nodes | {WholeNodeFloor(stage).usd(target) / bound_usd:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path, action="append", required=True, help="twice: code, then chat")
    parser.add_argument("--envelope", type=Path)
    parser.add_argument("--spot", type=Path, required=True)
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--case", type=int, action="append", help="index in CASES; by default the first")
    parser.add_argument("--target", type=float, action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for at in args.case or [0]:
            stage = scenario(CASES[at], args.recording, args.envelope, args.spot, args.days, Path(folder))
            for target in args.target or [0.99]:
                print(f"\n### case {at}, {100 * target:g} % asked, {args.days:g} days\n")
                print_ideals(replace(stage, setup=stage.setup.model_copy(update={"slo_target": target})))


if __name__ == "__main__":
    main()
