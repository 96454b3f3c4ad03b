"""Asked against attained SLO of raytide's serving policy, on loads where on-demand serving reaches high SLOs.

    benchmarks/autoscaler/serving_targets.py --recording code.csv --recording chat.jsonl --envelope E.csv --spot S.json

Loads are made from the recordings (serving_load.py) and served on recorded spot capacity. Each case has a load,
collection, depth and seed of its own. Constants were chosen on the cases `tune`; the cases `look` were only run
afterwards (--part). For each target: the attained share, its worst hour, the cost over the omniscient bound, and the
cost over that of the cheapest SpotHedge with the same attainment (linear between its depths; - where none has it).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from serving_load import Load, read, write

from raytide.simulate.serving.compare import Result, Scenario
from raytide.simulate.serving.setup import ServingSetup

TARGETS = (0.97, 0.99, 0.995, 0.999)
HEDGES = tuple(f"spothedge-{extra}" for extra in range(5))
TOLERANCE = 0.001


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


def cost_of_hedges(hedges: list[Result], slo: float) -> float | None:
    """Returns the least cost of SpotHedge at an attainment, linear between any two depths; None if none reaches it."""
    costs = [hedge.cost_usd for hedge in hedges if hedge.slo_attainment >= slo]
    for low, high in combinations(sorted(hedges, key=lambda hedge: hedge.slo_attainment), 2):
        if low.slo_attainment < slo <= high.slo_attainment:
            share = (slo - low.slo_attainment) / (high.slo_attainment - low.slo_attainment)
            costs.append(low.cost_usd + share * (high.cost_usd - low.cost_usd))
    return min(costs, default=None)


def table(case: Case, recordings: list[Path], envelope: Path | None, spot: Path, days: float, folder: Path) -> None:
    requests = folder / "load.csv"
    write(requests, case.load.requests(read(recordings[case.recording]), np.random.default_rng(0)))
    setup = ServingSetup.model_validate(
        {"requests": requests, "envelope": envelope, "spot": spot, "days": days, **case.setup}
    )
    stage = Scenario.of(setup)
    bound_usd, ondemand = stage.lower_bound_usd(), stage.run("serve-ondemand")
    hedges = [stage.run(name) for name in HEDGES]
    known = ", ".join(f"{100 * h.slo_attainment:.2f} at {h.cost_usd / bound_usd:.2f}" for h in hedges)
    print(f"\n### {case.part}: {setup.collection} {setup.gpu}, depth {setup.depth}, seed {setup.seed}\n")
    print(
        f"On demand {100 * ondemand.slo_attainment:.2f} % at {ondemand.cost_usd / bound_usd:.2f}; SpotHedge {known}.\n"
    )
    print("| asked % | attained % | | worst hour % | x bound | x SpotHedge | on-demand/spot h |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for target in TARGETS:
        goal = setup.model_copy(update={"slo_target": target})
        result = Scenario(goal, stage.work, stage.zones, stage.usd_h).run("raytide")
        hedge_usd = cost_of_hedges(hedges, result.slo_attainment)
        beside = "-" if hedge_usd is None else f"{result.cost_usd / hedge_usd:.2f}"
        kept = "kept" if result.slo_attainment >= target - TOLERANCE else "missed"
        if ondemand.slo_attainment < target - TOLERANCE:
            kept += " (not on demand)"
        hours = "/".join(f"{spent:.0f}" for spent in result.node_hours.values())
        print(
            f"| {100 * target:g} | {100 * result.slo_attainment:.2f} | {kept} "
            f"| {100 * result.worst_hour_attainment:.1f} | {result.cost_usd / bound_usd:.2f} | {beside} | {hours} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recording", type=Path, action="append", required=True, help="twice: code, then chat")
    parser.add_argument("--envelope", type=Path)
    parser.add_argument("--spot", type=Path, required=True)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--part", choices=("tune", "look"), action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.part in (args.part or ("tune", "look")) and case.recording < len(args.recording):
                table(case, args.recording, args.envelope, args.spot, args.days, Path(folder))


if __name__ == "__main__":
    main()
