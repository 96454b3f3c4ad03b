"""Compares raytide's serving policy with other policies on recorded requests and spot capacity.

    ./dev bench autoscaler_serving --requests R.csv --envelope E.csv --spot S.json
                                   --collection A --results F.jsonl

The other policies are Ray Serve with on-demand nodes, spot nodes alone, a static fleet, and SpotHedge. For each
collection and depth, the benchmark prints two figures of each policy: its cost, and the share of requests that were
in time. Of each figure it prints the mean, the least and the most over the seeds. It also prints raytide's results
for each SLO target, and the omniscient lower bound.

Each variant of SpotHedge is compared with one of raytide's results. This is the cheapest result that serves enough
requests in time: their share is at most 0.05 percentage points lower than the variant's share. The comparison holds
if raytide saves at least 15 %. The number of comparisons that hold is printed at the end.

Runs are kept in --results and are not repeated, so the benchmark can be interrupted and continued.
--figure draws the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytide.core.objects.node import CapacityType
from raytide.dashboards.figures.style import Picture
from raytide.simulate.serving.compare import Scenario
from raytide.simulate.serving.plot import tradeoff
from raytide.simulate.serving.setup import ServingSetup

TARGETS = (0.6, 0.65, 0.68, 0.7, 0.72, 0.74, 0.76, 0.78, 0.8, 0.85, 0.9, 0.95, 0.99)
HEDGES = tuple(f"spothedge-{extra}" for extra in range(5))
OTHERS = ("serve-ondemand", "spot-naive", "static")
ALLOWED_LOSS = 0.0005
SAVING = 0.15
MOST_OVER_BOUND = 2.2
_PANEL = 340


@dataclass(frozen=True, slots=True)
class Run:
    cost_usd: float
    slo: float = 0.0
    ttft_p99_s: float = 0.0
    ondemand_h: float = 0.0
    spot_h: float = 0.0
    cpu_s: float = 0.0


class Runs:
    """The runs of one setup (collection, depth and seed), kept in a file. Each run has its own policy or SLO target."""

    def __init__(self, setup: ServingSetup, file: Path | None) -> None:
        self.setup, self._file = setup, file
        self._known: dict[str, Run] = {}
        for line in file.read_text().splitlines() if file and file.exists() else ():
            entry = json.loads(line)
            if entry["setup"] == self._of:
                self._known[entry["name"]] = Run(**entry["run"])

    @property
    def _of(self) -> str:
        return self.setup.model_dump_json(exclude={"slo_target", "policy"})

    @cached_property
    def _stage(self) -> Scenario:
        return Scenario.of(self.setup)

    def of(self, name: str, target: float | None = None) -> Run:
        label = name if target is None else f"{name} {target:g}"
        if label not in self._known:
            self._known[label] = self._play(name, target)
            if self._file:
                with self._file.open("a") as file:
                    run = asdict(self._known[label])
                    file.write(json.dumps({"setup": self._of, "name": label, "run": run}) + "\n")
        return self._known[label]

    def _play(self, name: str, target: float | None) -> Run:
        stage, began_s = self._stage, time.process_time()
        if name == "bound":
            return Run(stage.lower_bound_usd())
        if target is not None:
            setup = self.setup.model_copy(update={"slo_target": target})
            stage = Scenario(setup, stage.work, stage.zones, stage.usd_h)
        result = stage.run(name)
        hours = (result.node_hours[CapacityType.ON_DEMAND], result.node_hours[CapacityType.SPOT])
        cpu_s = time.process_time() - began_s
        print(f"{self.setup.collection} {self.setup.depth} {self.setup.seed} {name} {cpu_s:.1f} s", file=sys.stderr)
        return Run(result.cost_usd, result.slo_attainment, result.ttft_p99_s, *hours, cpu_s)


@dataclass(frozen=True, slots=True)
class Mean:
    """The runs of one policy over all seeds, and their mean results."""

    name: str
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, seeds: Iterable[Runs], name: str, target: float | None = None) -> Mean:
        label = name if target is None else f"{name} {target:g}"
        return cls(label, tuple(runs.of(name, target) for runs in seeds))

    @property
    def cost_usd(self) -> float:
        return statistics.fmean(run.cost_usd for run in self.runs)

    @property
    def slo(self) -> float:
        return statistics.fmean(run.slo for run in self.runs)

    def row(self, bound_usd: float) -> str:
        costs, slos = [run.cost_usd for run in self.runs], [100 * run.slo for run in self.runs]
        p99_s = statistics.fmean(run.ttft_p99_s for run in self.runs)
        ondemand_h = statistics.fmean(run.ondemand_h for run in self.runs)
        spot_h = statistics.fmean(run.spot_h for run in self.runs)
        return (
            f"| {self.name} | {self.cost_usd:,.0f} ({min(costs):,.0f} to {max(costs):,.0f}) "
            f"| {self.cost_usd / bound_usd:.2f} | {100 * self.slo:.2f} ({min(slos):.2f} to {max(slos):.2f}) "
            f"| {p99_s:.1f} | {ondemand_h:.0f}/{spot_h:.0f} |"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of all policies for one collection and depth."""

    title: str
    bound_usd: float
    others: list[Mean]
    hedges: list[Mean]
    curve: list[Mean]

    def table(self) -> str:
        head = (
            "| policy | cost $ (least to most) | x bound | in time % (least to most) | p99 TTFT s | on-demand/spot h |"
        )
        rows = [mean.row(self.bound_usd) for mean in (*self.others, *self.hedges, *self.curve)]
        return "\n".join(
            (f"### {self.title}, lower bound ${self.bound_usd:,.0f}\n", head, "|---|---|---|---|---|---|", *rows)
        )

    def verdicts(self) -> list[tuple[bool, str]]:
        found = [self._against(hedge) for hedge in self.hedges]
        if any(mean.name == "serve-ondemand" and mean.slo >= 0.99 for mean in self.others):
            best = self._cheapest(0.99)
            ratio = best.cost_usd / self.bound_usd if best else float("inf")
            found.append(
                (ratio <= MOST_OVER_BOUND, f"99 %: {best.name if best else 'no point'}, {ratio:.2f} x the bound")
            )
        return found

    def _against(self, hedge: Mean) -> tuple[bool, str]:
        best = self._cheapest(hedge.slo - ALLOWED_LOSS)
        if best is None:
            return False, f"{hedge.name}: no point serves as many in time"
        saving = 1 - best.cost_usd / hedge.cost_usd
        points = 100 * (best.slo - hedge.slo)
        return saving >= SAVING, f"{hedge.name}: {best.name} saves {saving:.1%} at {points:+.2f} points"

    def _cheapest(self, slo: float) -> Mean | None:
        enough = [point for point in self.curve if point.slo >= slo]
        return min(enough, key=lambda point: point.cost_usd, default=None)

    def draw(self, axes: Axes) -> None:
        points = {mean.name: (mean.cost_usd, 100 * mean.slo) for mean in (*self.others, *self.hedges)}
        tradeoff(axes, [(point.cost_usd, 100 * point.slo) for point in self.curve], points, {}, self.title)


def picture(collections: Sequence[Comparison]) -> Picture:
    """Returns a picture with one panel for each comparison, one below the other."""

    def draw(figure: Figure) -> None:
        for axes, each in zip(figure.subplots(len(collections), squeeze=False)[:, 0], collections, strict=True):
            each.draw(axes)

    return Picture(draw, "Cost of serving, and requests in time", height=_PANEL * len(collections))


def options() -> argparse.Namespace:
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
    parser.add_argument("--results", type=Path, help="a file for the runs, made when it is not there")
    parser.add_argument("--figure", type=Path, help="a .svg, .png or .html file to write")
    return parser.parse_args()


def main() -> None:
    args = options()
    verdicts, comparisons = [], []
    for collection in args.collection:
        for depth in args.depth or [1, 4]:
            seeds = [
                Runs(
                    ServingSetup(
                        requests=args.requests, envelope=args.envelope, spot=args.spot, collection=collection,
                        gpu=args.gpu, depth=depth, days=args.days, seed=seed,
                    ),
                    args.results,
                )
                for seed in args.seed or [0, 1, 2]
            ]  # fmt: skip
            found = Comparison(
                f"{collection}, depth {depth}",
                Mean.of(seeds, "bound").cost_usd,
                [] if args.hedges_only else [Mean.of(seeds, name) for name in OTHERS],
                [Mean.of(seeds, name) for name in HEDGES],
                [Mean.of(seeds, "raytide", target) for target in args.target or TARGETS],
            )
            print(found.table(), end="\n\n")
            for held, what in found.verdicts():
                print(f"- {what}{'' if held else ' (MISSED)'}", flush=True)
                verdicts.append(held)
            comparisons.append(found)
    if args.figure:
        picture(comparisons).save(args.figure)
    print(f"\n{sum(verdicts)} of {len(verdicts)} comparisons hold")


if __name__ == "__main__":
    main()
