"""raytide's serving policy beside Ray Serve on demand, spot alone and SpotHedge, on recorded requests and spot nodes.

    python benchmarks/autoscaler_serving.py --requests R.csv --envelope E.csv --spot S.json --collection A

For each collection and depth: every policy's cost and share of requests in time (mean over the seeds, least and most),
raytide's curve over its targets, the omniscient lower bound, and for each SpotHedge the cheapest point of the curve
that serves no fewer in time than it does, less 0.05 points. Ends with the share of these comparisons that save 15 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from raytide.core.fleet import Market
from raytide.simulate.serving import Result, Stage
from raytide.simulate.serving_setup import ServingSetup

TARGETS = (0.95, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9965, 0.998, 0.999)
HEDGES = tuple(f"spothedge-{extra}" for extra in range(5))
OTHERS = ("static", "serve-ondemand", "spot-naive")
ALLOWED_LOSS = 0.0005
SAVING = 0.15
MOST_OVER_BOUND = 2.2


@dataclass(frozen=True, slots=True)
class Mean:
    """One policy over all seeds."""

    name: str
    results: tuple[Result, ...]

    @property
    def cost_usd(self) -> float:
        return statistics.fmean(result.cost_usd for result in self.results)

    @property
    def slo(self) -> float:
        return statistics.fmean(result.slo_attainment for result in self.results)

    def row(self, bound_usd: float) -> str:
        costs = [result.cost_usd for result in self.results]
        slos = [100 * result.slo_attainment for result in self.results]
        p99_s = statistics.fmean(result.ttft_p99_s for result in self.results)
        split = "/".join(f"{statistics.fmean(r.node_hours[m] for r in self.results):.0f}" for m in Market)
        return (
            f"| {self.name} | {self.cost_usd:,.0f} ({min(costs):,.0f} to {max(costs):,.0f}) "
            f"| {self.cost_usd / bound_usd:.2f} | {100 * self.slo:.2f} ({min(slos):.2f} to {max(slos):.2f}) "
            f"| {p99_s:.1f} | {split} |"
        )


def play(stages: list[Stage], name: str, target: float | None = None) -> Mean:
    began_s = time.perf_counter()
    if target is not None:
        stages = [replace(s, setup=s.setup.model_copy(update={"slo_target": target})) for s in stages]
    results = tuple(stage.play(name) for stage in stages)
    label = name if target is None else f"{name} {target:g}"
    print(f"{label}: {(time.perf_counter() - began_s) / len(stages):.1f} s a seed", file=sys.stderr)
    return Mean(label, results)


def compare(title: str, stages: list[Stage], targets: list[float], others: tuple[str, ...]) -> list[bool]:
    """Prints the table of one collection and depth; returns what held."""
    bound_usd = statistics.fmean(stage.lower_bound_usd() for stage in stages)
    print(f"\n### {title}: {stages[0].work.count:,} requests, lower bound ${bound_usd:,.0f}\n")
    print("| policy | cost $ (least to most) | x bound | in time % (least to most) | p99 TTFT s | on-demand/spot h |")
    print("|---|---|---|---|---|---|")
    rows = {name: play(stages, name) for name in (*others, *HEDGES)}
    curve = [play(stages, "raytide", target) for target in targets]
    for mean in (*rows.values(), *curve):
        print(mean.row(bound_usd), flush=True)
    held = []
    print()
    for hedge in (rows[name] for name in HEDGES):
        enough = [point for point in curve if point.slo >= hedge.slo - ALLOWED_LOSS]
        best = min(enough, key=lambda point: point.cost_usd, default=None)
        saving = 1 - best.cost_usd / hedge.cost_usd if best else float("-inf")
        held.append(saving >= SAVING)
        what = f"{best.name} saves {saving:.1%} at {100 * (best.slo - hedge.slo):+.2f} points" if best else "no point"
        print(f"- {hedge.name}: {what}{'' if held[-1] else ' (MISSED)'}")
    served = [point for point in curve if point.slo >= 0.99]
    if "serve-ondemand" in rows and rows["serve-ondemand"].slo >= 0.99:
        best = min(served, key=lambda point: point.cost_usd, default=None)
        ratio = best.cost_usd / bound_usd if best else float("inf")
        held.append(ratio <= MOST_OVER_BOUND)
        what = f"{best.name} costs {ratio:.2f} x the bound" if best else "no point"
        print(f"- 99 %: {what}{'' if held[-1] else ' (MISSED)'}")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--envelope", type=Path)
    parser.add_argument("--spot", type=Path, required=True)
    parser.add_argument("--collection", action="append", required=True)
    parser.add_argument("--gpu", default="v100")
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--target", type=float, action="append")
    parser.add_argument("--hedges-only", action="store_true", help="leave out static, spot-naive and serve-ondemand")
    args = parser.parse_args()
    held = []
    for collection in args.collection:
        for depth in args.depth or [1, 4]:
            setups = [
                ServingSetup(
                    requests=args.requests, envelope=args.envelope, spot=args.spot, collection=collection,
                    gpu=args.gpu, depth=depth, days=args.days, seed=seed,
                )
                for seed in args.seed or [0, 1, 2]
            ]  # fmt: skip
            stages = [Stage.of(setup) for setup in setups]
            others = () if args.hedges_only else OTHERS
            held += compare(f"{collection}, depth {depth}", stages, args.target or list(TARGETS), others)
    print(f"\n{sum(held)} of {len(held)} comparisons hold")


if __name__ == "__main__":
    main()
