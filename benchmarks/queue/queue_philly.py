"""Compares the queue with LAS, FIFO and EASY on windows of recorded jobs.

    python benchmarks/queue/queue_philly.py TRACE.csv [--windows busiest,0,10,20] [--days 14]
                                      [--loads 0.9,1.2,1.6] [--multi-gpu-shares 0,0.5] [--seed 0]
                                      [--baselines FILE]

TRACE is a file in the format of `raytide simulate jobs`. A window is `busiest` or the number of its first day. For
each window, prints three of raytide's figures, each divided by the same figure of a baseline: the mean completion
time (m, baseline LAS), the 99th percentile of the completion time (p, baseline FIFO), and the longest wait of a gang
(w, baseline EASY). raytide is better if a ratio is below 1. The column `over` names the ratios above their limits:
1.15 for m, 1.03 for p, and 1 for w. The results of the baselines, which take most of the time, are kept in FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.simulate.jobs import trace as job_trace
from raytide.simulate.jobs.cluster import replay
from raytide.simulate.jobs.compare import POLICIES
from raytide.simulate.jobs.trace import JobTrace

LIMITS = {"m": 1.15, "p": 1.03, "w": 1.0}
HEAD = f"{'day':>8}{'share':>6}{'load':>5}{'jobs':>7}{'GPUs':>6}{'mean':>8}{'p99':>8}{'wait':>8}  over"


@dataclass(frozen=True, slots=True)
class Figures:
    mean_s: float
    p99_s: float
    wait_s: float


def main() -> None:
    options = _options()
    trace = job_trace.read(options.trace)
    kept = json.loads(options.baselines.read_text()) if options.baselines and options.baselines.exists() else {}
    rows = []
    print(HEAD)
    for share in options.shares:
        for name in options.windows:
            found = job_trace.window(trace, None if name == "busiest" else int(name), options.days)
            mixed = job_trace.with_multi_gpu_share(found, share, options.seed)
            for load in options.loads:
                gpus = job_trace.gpus_for(mixed, load, options.days)
                key = f"{name} {share} {load} {options.days} {options.seed} {gpus} {len(mixed)}"
                if key not in kept:
                    kept[key] = [astuple(figures(mixed, gpus, of, options.days)) for of in ("las", "fifo", "easy")]
                    if options.baselines:
                        options.baselines.write_text(json.dumps(kept))
                rows.append(ratios(figures(mixed, gpus, "raytide", options.days), *(Figures(*of) for of in kept[key])))
                over = "".join(what for what, is_over in zip(LIMITS, exceeds(rows[-1]), strict=True) if is_over)
                cells = "".join(f"{ratio:>8.3f}" for ratio in rows[-1])
                print(f"{name:>8}{share:>6}{load:>5}{len(mixed):>7}{gpus:>6}{cells}  {over}", flush=True)
    worst = "".join(f"{max(column):>8.3f}" for column in zip(*rows, strict=True))
    print(f"{'worst':>8}{'':>24}{worst}  {sum(any(exceeds(row)) for row in rows)} of {len(rows)}")


def figures(trace: JobTrace, gpus: int, policy: str, days: int) -> Figures:
    outcome = replay(trace, gpus, POLICIES[policy], days)
    return Figures(outcome.mean_jct_s, outcome.p99_jct_s, outcome.max_wait_s)


def ratios(ours: Figures, las: Figures, fifo: Figures, easy: Figures) -> tuple[float, float, float]:
    """Returns three ratios of raytide's figures to the figures of a baseline:

    - The mean completion time, relative to LAS.
    - The 99th percentile of the completion time, relative to FIFO.
    - The longest wait of a gang, relative to EASY. If gangs wait only in raytide's queue and not under EASY,
      this ratio is infinite.
    """
    if not easy.wait_s:
        wait = math.inf if ours.wait_s else 0.0
    else:
        wait = ours.wait_s / easy.wait_s
    return ours.mean_s / las.mean_s, ours.p99_s / fifo.p99_s, wait


def exceeds(row: Sequence[float]) -> list[bool]:
    return [ratio > limit for ratio, limit in zip(row, LIMITS.values(), strict=True)]


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--windows", type=lambda text: text.split(","), default=["busiest"])
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--loads", type=numbers, default=[0.9, 1.2, 1.6])
    parser.add_argument("--multi-gpu-shares", dest="shares", type=numbers, default=[0.0, 0.5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baselines", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
