"""Compares two SLOs of raytide's serving policy: the SLO that was asked for, and the SLO that was attained.

    benchmarks/autoscaler/serving_targets.py --recording code.csv --recording chat.jsonl
                                             --envelope E.csv --spot S.json

The loads are made from the recordings (serving_load.py) and served on recorded spot capacity. On these loads, a
fleet of on-demand nodes alone reaches high SLOs. Each case has its own load, collection, depth and seed.

The cases form two parts (--part). The constants of the policy were chosen on the cases `tune`. The cases `look` were
run only after this choice.

For each target, two shares of requests in time are printed: the attained share of the whole run, and the share in
the worst hour. The policy's cost is also printed, divided by each of several other costs:

- the omniscient lower bound.
- the cost of an omniscient buyer of whole nodes (serving_floor.py).
- the cost of the cheapest SpotHedge with the same attained share, once as published and once with
  raytide's order of waiting requests. Costs are interpolated linearly between the variants of SpotHedge.
  `-` means that no variant attains this share.

Runs are kept in --results and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path

import numpy as np
from serving_floor import WholeNodeFloor
from serving_load import Load, read, write

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.compare import Scenario
from raytide.simulate.serving.setup import ServingSetup

TARGETS = (0.97, 0.99, 0.995, 0.999)
HEDGES = tuple(f"spothedge-{extra}" for extra in range(5))
TOLERANCE = 0.001
ORDERED: dict[str, object] = {"queue": "deadline", "resumes": True}
"""The treatment by raytide's replicas and gateways of requests that wait, or lose their node."""


@dataclass(frozen=True, slots=True)
class Case:
    part: str
    recording: int
    """Index of the `--recording`."""
    load: Load
    setup: dict[str, object]
    """Fields of ServingSetup: the market, the peak rate and the replicas' speed."""


CODE = Load(copies=24, keep=0.1, prompts=0.4, outputs=8, hours=12)
BURSTS = Load(copies=24, keep=0.1, prompts=0.25, outputs=10, bursts_per_day=8, burst=1.6, burst_s=900)
CHAT = Load(copies=3, prompts=0.05, outputs=1.5, hours=12)
CALM = Load(copies=40, keep=0.05, prompts=0.5, outputs=5, hours=12)
PEAKS = Load(copies=4, prompts=0.04, outputs=2, bursts_per_day=12, burst=2, burst_s=600)
FAST = {"prefill_tps": 6000.0, "peak_rps": 6.0}
LIVELY = {"prefill_tps": 6000.0, "peak_rps": 6.0, "tpot_ms": 40.0}
LONG = {"prefill_tps": 3000.0, "peak_rps": 5.0}


def market(collection: str, depth: int, seed: int, **more: object) -> dict[str, object]:
    kind = "preemption" if collection == "aws-04-22-2023" else "availability"
    return {"collection": collection, "depth": depth, "seed": seed, "kind": kind, **more}


CASES = (
    Case("tune", 0, CODE, market("aws-02-15-2023", 2, 0, **FAST)),
    Case("tune", 1, CHAT, market("aws-10-26-2022", 4, 1, **LONG)),
    Case("tune", 0, BURSTS, market("aws-04-22-2023", 4, 0, **LIVELY)),
    Case("tune", 1, CHAT, market("aws-02-15-2023", 4, 2, **LONG)),
    Case("tune", 0, BURSTS, market("aws-10-26-2022", 2, 2, **LIVELY)),
    Case("look", 0, CALM, market("aws-02-15-2023", 1, 11, prefill_tps=6000.0, peak_rps=5.0)),
    Case("look", 1, PEAKS, market("aws-02-15-2023", 4, 12, prefill_tps=4000.0, peak_rps=4.0)),
    Case("look", 0, CALM, market("aws-04-22-2023", 2, 13, prefill_tps=8000.0, peak_rps=8.0, tpot_ms=50.0)),
    Case("look", 1, CHAT, market("aws-10-26-2022", 4, 14, gpu="k80", **LONG)),
)


@dataclass(frozen=True, slots=True)
class Run:
    cost_usd: float
    attained: float = 0.0
    worst_hour: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    ondemand_h: float = 0.0
    spot_h: float = 0.0


class Runs:
    """The runs of one case. Their results are kept in a file, and a run whose result is in the file is not repeated."""

    def __init__(self, number: int, load: Callable[[], Scenario], days: float, file: Path | None) -> None:
        self._number, self._load, self._days, self._file = number, load, days, file
        self._known: dict[str, Run] = {}
        for line in file.read_text().splitlines() if file and file.exists() else ():
            entry = json.loads(line)
            if (entry["case"], entry["days"]) == (number, days):
                self._known[entry["name"]] = Run(**entry["run"])

    @cached_property
    def _stage(self) -> Scenario:
        return self._load()

    @cached_property
    def _floor(self) -> WholeNodeFloor:
        return WholeNodeFloor(self._stage)

    def bound_usd(self) -> float:
        return self._kept("bound", lambda: Run(self._stage.lower_bound_usd())).cost_usd

    def floor_usd(self, attained: float) -> float:
        """Returns the lowest cost of answering the share `attained` of the requests in time. The fleet has whole nodes,
        and its buyer knows all requests in advance.
        """
        return self._kept(f"floor {attained:.6f}", lambda: Run(self._floor.usd(attained))).cost_usd

    def of(self, policy: str, **changed: object) -> Run:
        label = " ".join((policy, *(f"{name}={value}" for name, value in changed.items())))
        return self._kept(label, lambda: self._run(policy, changed))

    def _run(self, policy: str, changed: dict[str, object]) -> Run:
        stage = self._stage
        result = replace(stage, setup=stage.setup.model_copy(update=changed)).run(policy)
        hours = (result.node_hours[CapacityType.ON_DEMAND], result.node_hours[CapacityType.SPOT])
        ttft_s = (result.ttft_p50_s, result.ttft_p99_s)
        return Run(result.cost_usd, result.slo_attainment, result.worst_hour_attainment, *ttft_s, *hours)

    def _kept(self, name: str, run: Callable[[], Run]) -> Run:
        if name not in self._known:
            self._known[name] = run()
            if self._file:
                entry = {"case": self._number, "days": self._days, "name": name, "run": asdict(self._known[name])}
                with self._file.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        return self._known[name]


def scenario(
    case: Case, recordings: list[Path], envelope: Path | None, spot: Path, days: float, folder: Path
) -> Scenario:
    requests = folder / "load.csv"
    write(requests, case.load.requests(read(recordings[case.recording]), np.random.default_rng(0)))
    return Scenario.of(
        ServingSetup.model_validate(
            {"requests": requests, "envelope": envelope, "spot": spot, "days": days, **case.setup}
        )
    )


def cost_of_hedges(hedges: list[Run], slo: float) -> float | None:
    """Returns the least cost at which SpotHedge attains the share `slo`. The cost may be interpolated linearly between
    a variant that attains less and one that attains enough. Returns None if no variant attains the share.
    """
    costs = [hedge.cost_usd for hedge in hedges if hedge.attained >= slo]
    for low, high in combinations(sorted(hedges, key=lambda hedge: hedge.attained), 2):
        if low.attained < slo <= high.attained:
            share = (slo - low.attained) / (high.attained - low.attained)
            costs.append(low.cost_usd + share * (high.cost_usd - low.cost_usd))
    return min(costs, default=None)


def table(case: Case, runs: Runs, targets: Sequence[float], *, is_brief: bool) -> None:
    bound_usd, setup = runs.bound_usd(), case.setup
    ondemand, hedges = others(runs)
    print(f"\n### {case.part}: {setup['collection']}, depth {setup['depth']}, seed {setup['seed']}\n")
    print(f"As published: {described(ondemand, hedges, bound_usd)}.\n")
    ordered_hedges: list[Run] = []
    if not is_brief:
        ordered, ordered_hedges = others(runs, **ORDERED)
        print(f"With raytide's queue: {described(ordered, ordered_hedges, bound_usd)}.\n")
    print(
        "| asked % | attained % | | worst hour % | x bound | x whole nodes | x SpotHedge | with raytide's queue "
        "| TTFT p50, p99 s | on-demand/spot h |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for target in targets:
        run = runs.of("raytide", slo_target=target)
        attained, usd = run.attained, run.cost_usd
        kept = "kept" if attained >= target - TOLERANCE else "missed"
        if ondemand.attained < target - TOLERANCE:
            kept += " (not on demand)"
        whole = "-" if is_brief else f"{usd / runs.floor_usd(attained):.2f}"
        print(
            f"| {100 * target:g} | {100 * attained:.2f} | {kept} | {100 * run.worst_hour:.1f} "
            f"| {usd / bound_usd:.2f} | {whole} "
            f"| {over(usd, cost_of_hedges(hedges, attained))} | {over(usd, cost_of_hedges(ordered_hedges, attained))} "
            f"| {run.ttft_p50_s:.1f}, {run.ttft_p99_s:.0f} | {run.ondemand_h:.0f}/{run.spot_h:.0f} |",
            flush=True,
        )


def others(runs: Runs, **changed: object) -> tuple[Run, list[Run]]:
    return runs.of("serve-ondemand", **changed), [runs.of(name, **changed) for name in HEDGES]


def described(ondemand: Run, hedges: list[Run], bound_usd: float) -> str:
    """Returns a text about the run of Ray Serve with on-demand nodes and about each run of SpotHedge. For each run, the
    text has the attained share, and the cost as a multiple of the lower bound.
    """
    known = ", ".join(f"{100 * hedge.attained:.2f} at {hedge.cost_usd / bound_usd:.2f}" for hedge in hedges)
    return f"on demand {100 * ondemand.attained:.2f} % at {ondemand.cost_usd / bound_usd:.2f}; SpotHedge {known}"


def over(usd: float, hedge_usd: float | None) -> str:
    return "-" if hedge_usd is None else f"{usd / hedge_usd:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path, action="append", required=True, help="twice: code, then chat")
    parser.add_argument("--envelope", type=Path)
    parser.add_argument("--spot", type=Path, required=True)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--part", choices=("tune", "look"), action="append")
    parser.add_argument("--case", type=int, action="append", help="index in CASES; by default all of the part")
    parser.add_argument("--target", type=float, action="append")
    parser.add_argument("--brief", action="store_true", help="leave out whole nodes, and SpotHedge with that queue")
    parser.add_argument("--results", type=Path, help="a file for the runs, made when it is not there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for at, case in enumerate(CASES):
            if at not in (args.case or range(len(CASES))):
                continue
            if case.part in (args.part or ("tune", "look")) and case.recording < len(args.recording):
                load = partial(scenario, case, args.recording, args.envelope, args.spot, args.days, Path(folder))
                runs = Runs(at, load, args.days, args.results)
                table(case, runs, args.target or TARGETS, is_brief=args.brief)


if __name__ == "__main__":
    main()
