"""Compares deadline policies for a training job on recorded spot markets.

    ./dev bench autoscaler_deadline SPOT.json [--collection NAME] [--starts 12] [--slack 0.1,0.25,0.5]

The policies are raytide, greedy, the variants of Uniform Progress, and the optimum. SPOT is a file of spot traces in
the format of `raytide simulate deadline`. A pool is a single zone, or all zones of one region. The job has 48 h of
work, each start or restart takes 0.2 h, and the runs begin at evenly spread moments of the trace. A printed cost is
the mean over these runs, as a share of the job's cost with on-demand nodes. `closed` is (greedy - policy) / (greedy
- optimal), computed from sums of costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.simulate.deadline.compare import run
from raytide.simulate.deadline.policies import POLICIES
from raytide.simulate.spot import SpotTrace, read

NAMES = [name for name in POLICIES if name != "uniform-progress"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("spot", type=Path)
    parser.add_argument("--collection", default="")
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--slack", default="0.1,0.25,0.5")
    options = parser.parse_args()
    traces = [trace for trace in read(options.spot) if options.collection in trace.key]
    slacks = [float(slack) for slack in options.slack.split(",")]
    began_s = time.monotonic()
    print(f"{'set':<44}{'slack':>6}" + "".join(f"{name.replace('uniform-progress', 'up'):>9}" for name in NAMES))
    sums: dict[float, dict[str, float]] = {slack: defaultdict(float) for slack in slacks}
    missed: dict[str, int] = defaultdict(int)
    for title, pool in pools(traces).items():
        for slack in slacks:
            costs = {}
            for name in NAMES:
                report = run(
                    pool,
                    POLICIES[name],
                    policy=name,
                    collection=options.collection,
                    slack=slack,
                    hours=48,
                    restart_h=0.2,
                    count=options.starts,
                )
                costs[name] = report.cost_vs_ondemand
                sums[slack][name] += report.cost_vs_ondemand
                missed[name] += report.missed_deadlines
            print(f"{title:<44}{slack:>6.0%}" + "".join(f"{costs[name]:>9.3f}" for name in NAMES), flush=True)
    for slack in slacks:
        summary(f"sum at {slack:.0%}", sums[slack])
    summary("sum of all", {name: sum(sums[slack][name] for slack in slacks) for name in NAMES})
    print(
        f"missed deadlines: {', '.join(f'{name} {missed[name]}' for name in NAMES)}; {time.monotonic() - began_s:.0f} s"
    )


def pools(traces: Sequence[SpotTrace]) -> dict[str, list[SpotTrace]]:
    """Returns one pool for each single zone, and one pool for each region that has several zones."""
    found = {f"{t.collection} {t.zone} {t.gpus_per_node}x{t.gpu} {t.kind}": [t] for t in traces}
    regions: dict[str, list[SpotTrace]] = defaultdict(list)
    for t in traces:
        regions[f"{t.collection} {t.zone[:-1]} {t.gpus_per_node}x{t.gpu} {t.kind}"].append(t)
    return found | {f"{title} of {len(pool)}": pool for title, pool in regions.items() if len(pool) > 1}


def summary(title: str, costs: dict[str, float]) -> None:
    gap = costs["greedy"] - costs["optimal"]
    closed = "".join(f"{(costs['greedy'] - costs[name]) / gap:>9.1%}" for name in NAMES)
    print(f"{title:<50}" + "".join(f"{costs[name]:>9.3f}" for name in NAMES))
    print(f"{'  closed':<50}{closed}")


if __name__ == "__main__":
    main()
