"""Splits the cost of raytide's serving policy into the least possible cost and the causes of the rest.

    benchmarks/autoscaler/serving_costs.py --recording code.csv --recording chat.jsonl
                                           --spot S.json --case 0

The least possible cost is that of a buyer of whole nodes who knows the future (serving_floor.py). This buyer serves
the same share of requests in time as the policy does. The benchmark runs one case of serving_targets.py.

All figures are multiples of a lower bound: the cost if fractions of nodes could be bought. With
--plenty, the same load is also served with spot nodes that are never scarce and never reclaimed. Then
only the future load is unknown. The figures of that run are multiples of a lower bound of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from serving_floor import STEP_S, WholeNodeFloor
from serving_targets import CASES, scenario

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.baselines import TICK_S
from raytide.simulate.serving.compare import Result, Scenario
from raytide.simulate.serving.spot_zones import SpotZones


def split(stage: Scenario, result: Result, floor: WholeNodeFloor) -> dict[str, float]:
    """Returns the dollars for each cause. Their sum differs from the total cost only because nodes may start or end
    between two ticks.
    """
    sizes = np.array(floor.sizes(result.slo_attainment))
    spot_usd = stage.usd_h[CapacityType.SPOT] * TICK_S / 3600.0
    ondemand_usd = stage.usd_h[CapacityType.ON_DEMAND] * TICK_S / 3600.0
    ready = np.array([sample.ready for sample in result.samples])
    spot = np.array([sample.spot for sample in result.samples])
    ondemand = np.array([sample.ondemand for sample in result.samples])
    least = sizes[np.minimum((np.arange(len(ready)) * TICK_S / STEP_S).astype(int), len(sizes) - 1)]
    free = np.array([sum(stage.zones.at(sample.at_s)) for sample in result.samples]) > spot
    return {
        "the omniscient buyer's replicas, at the price of spot": spot_usd * least.sum(),
        "ready replicas beyond those": spot_usd * np.maximum(ready - least, 0).sum(),
        "ready replicas short of those": -spot_usd * np.maximum(least - ready, 0).sum(),
        "nodes that start or end": spot_usd * (spot + ondemand - ready).sum(),
        "on demand while no zone has a free node": (ondemand_usd - spot_usd) * ondemand[~free].sum(),
        "on demand while one has": (ondemand_usd - spot_usd) * ondemand[free].sum(),
    }


def with_plenty_of_spot(stage: Scenario) -> Scenario:
    room = tuple(2 * stage.setup.max_replicas for _ in stage.zones.names)
    return replace(stage, zones=SpotZones(stage.zones.names, (0.0,), (room,)))


def print_split(stage: Scenario, bound_usd: float, floor: WholeNodeFloor) -> None:
    result = stage.run("raytide")
    attained = result.slo_attainment
    print("| part | x bound |\n|---|---|")
    print(f"| all; {100 * attained:.2f} % attained | {result.cost_usd / bound_usd:.2f} |")
    print(f"| an omniscient buyer of whole nodes | {floor.usd(attained) / bound_usd:.2f} |")
    for name, usd in split(stage, result, floor).items():
        print(f"| {name} | {usd / bound_usd:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path, action="append", required=True, help="twice: code, then chat")
    parser.add_argument("--envelope", type=Path)
    parser.add_argument("--spot", type=Path, required=True)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--case", type=int, action="append", help="index in CASES; by default the first")
    parser.add_argument("--target", type=float, action="append")
    parser.add_argument("--plenty", action="store_true", help="also where spot is never scarce or reclaimed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for at in args.case or [0]:
            stage = scenario(CASES[at], args.recording, args.envelope, args.spot, args.days, Path(folder))
            stages = {"": stage, ", plenty of spot": with_plenty_of_spot(stage)} if args.plenty else {"": stage}
            for name, market in stages.items():
                bound_usd, floor = market.lower_bound_usd(), WholeNodeFloor(market)
                for target in args.target or [0.99]:
                    print(f"\n### case {at}{name}, {100 * target:g} % asked\n")
                    setup = market.setup.model_copy(update={"slo_target": target})
                    print_split(replace(market, setup=setup), bound_usd, floor)


if __name__ == "__main__":
    main()
