"""Compares the fleets that Ray's own autoscaler and raytide's planner would launch for the same work on an empty
cluster: $/h, work left without a node, a lower bound of the cost, and the time of the decision.

    python benchmarks/autoscaler/autoscaler_packing.py --prices prices.csv --pods pods.csv
                                                     --sizes 50 200 800 --seeds 3

For Ray, the benchmark calls the scheduler of the installed Ray
(`ray.autoscaler.v2.scheduler.ResourceDemandScheduler`) as Ray's monitor does. The scheduler gets node types with
their maxima, tasks by shape, and placement groups as gangs with the constraints that the GCS writes. It does not
know prices, and chooses the node type that the work fills best. In the rows "Ray, 1", the scheduler gets only the
cheapest node type for each number of GPUs, as a user who compares prices would configure them. raytide's planner
gets the same tasks and groups as Ray's demand, that is, as work without leases.

`--prices` is a CSV file with the columns instance_type, gpu, gpus, vcpus, mem_gib and ondemand_usd_h. If a type has
several rows, the cheapest counts. `--pods` is a CSV file with the columns cpu_milli, memory_mib, num_gpu and
gpu_milli. Work is drawn from the pods that ask for a GPU. For Ray and for raytide, a share of a GPU is rounded up to
1/n of a GPU, because Ray's raylet cannot split a share over two GPUs. Some of the demands are placement groups of
several equal bundles. Half of these groups need a separate node for each bundle (STRICT_SPREAD). The bundles of the
other groups may be on any nodes (PACK).
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, ResourceRequest, ResourceRequestByCount
from scipy.optimize import linprog
from scipy.sparse import lil_array

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.planner import plan
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.autoscaler.provisioning.unmanaged import provision_unmanaged
from raytide.core.objects.node import NodeType, add, fits, round_up_gpu_share
from raytide.core.objects.plan import Launch
from raytide.core.objects.snapshot import Demand, Snapshot, Unmanaged
from raytide.scheduling.diagnosis import copies_that_fit
from raytide.scheduling.repacking import repack
from raytide.scheduling.state import SchedulingState

GIB = 2**30
MOST = 10_000
"""Nodes of each type that both may launch."""
GROUPS, LARGEST = 0.2, 8
"""The share of placement groups among the demands, and the most bundles of one."""


@dataclass(frozen=True, slots=True)
class Work:
    groups: tuple[Demand, ...]
    """Placement groups of equal bundles."""
    tasks: tuple[Demand, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The nodes that one of the two compared schedulers (Ray's or raytide's) would launch."""

    nodes: Counter[str]
    unmet: int
    """Tasks and bundles without a node."""
    cpu_s: float

    def usd_h(self, types: Sequence[NodeType]) -> float:
        return sum(self.nodes[t.name] * t.price_micro_usd_h for t in types) / 1e6


def menu(prices: Path) -> tuple[NodeType, ...]:
    """Returns the node types that have at least one whole GPU, each with its cheapest on-demand price."""
    types: dict[str, NodeType] = {}
    with prices.open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["vcpus"] or not row["ondemand_usd_h"] or float(row["gpus"]) < 1:
                continue
            price = round(float(row["ondemand_usd_h"]) * 1e6)
            name = row["instance_type"]
            if name not in types or price < types[name].price_micro_usd_h:
                resources = {
                    "CPU": float(row["vcpus"]),
                    "GPU": float(row["gpus"]),
                    "memory": float(row["mem_gib"]) * GIB,
                }
                types[name] = NodeType(name=name, resources=resources, price_micro_usd_h=price, max_nodes=MOST)
    return tuple(types[name] for name in sorted(types))


def cheapest_by_gpus(types: Sequence[NodeType]) -> tuple[NodeType, ...]:
    """Returns the cheapest type for each number of GPUs, as a user of Ray who compares prices would configure them."""
    best: dict[float, NodeType] = {}
    for node_type in sorted(types, key=lambda t: -t.price_micro_usd_h):
        best[node_type.resources["GPU"]] = node_type
    return tuple(best.values())


def shapes(pods: Path, types: Sequence[NodeType]) -> list[dict[str, float]]:
    """Returns the demand of each pod that asks for a GPU and fits on at least one node type."""
    found = []
    with pods.open(newline="") as file:
        for row in csv.DictReader(file):
            gpus = int(row["num_gpu"]) * (int(row["gpu_milli"]) / 1000 if row["num_gpu"] == "1" else 1.0)
            need = {"CPU": int(row["cpu_milli"]) / 1000, "GPU": gpus, "memory": float(row["memory_mib"]) * 2**20}
            need = {name: amount for name, amount in round_up_gpu_share(need).items() if amount > 0}
            if gpus > 0 and any(fits(need, node_type.resources) for node_type in types):
                found.append(need)
    return found


def draw(known: Sequence[dict[str, float]], size: int, chance: random.Random) -> Work:
    """Returns a random draw of tasks and placement groups. Tasks of the same shape are joined into one demand."""
    tasks, groups = Counter[tuple[tuple[str, float], ...]](), list[Demand]()
    for number in range(size):
        need = chance.choice(known)
        if chance.random() < GROUPS:
            apart = f"group-{number}" if chance.random() < 0.5 else ""
            groups.append(Demand(need, count=chance.randint(2, LARGEST), apart=apart))
        else:
            tasks[tuple(need.items())] += 1
    return Work(tuple(groups), tuple(Demand(dict(key), count=count) for key, count in tasks.items()))


def by_ray(types: Sequence[NodeType], work: Work) -> Fleet:
    configs = {
        t.name: NodeTypeConfig(t.name, 0, t.max_nodes, resources=dict(t.resources), labels=t.all_labels("local"))
        for t in types
    }
    gangs = [GangResourceRequest(requests=[_bundle(group, at)] * group.count) for at, group in enumerate(work.groups)]
    tasks = [ResourceRequestByCount(request=_bundle(task), count=task.count) for task in work.tasks]
    request = SchedulingRequest(True, configs, resource_requests=tasks, gang_resource_requests=gangs)
    began = time.process_time()
    reply = ResourceDemandScheduler().schedule(request)
    cpu_s = time.process_time() - began
    nodes = Counter({launch.instance_type: launch.count for launch in reply.to_launch})
    unmet = sum(len(gang.requests) for gang in reply.infeasible_gang_resource_requests)
    return Fleet(nodes, unmet + len(reply.infeasible_resource_requests), cpu_s)


def _bundle(demand: Demand, group: int = 0) -> ResourceRequest:
    apart = ResourceRequestUtil.PlacementConstraintType.ANTI_AFFINITY
    return ResourceRequestUtil.make(dict(demand.resources), [(apart, f"_PG_{group}", "")] if demand.apart else None)


def by_raytide(types: Sequence[NodeType], work: Work) -> Fleet:
    demand = (*work.groups, *work.tasks)
    seen = Snapshot(at_s=0.0, node_types=tuple(types), demand=demand, unmanaged=Unmanaged(len(types) * MOST, gpu=True))
    began = time.process_time()
    actions = plan(seen)
    cpu_s = time.process_time() - began
    nodes = Counter(action.node_type for action in actions if isinstance(action, Launch))
    return Fleet(nodes, unseated(seen, types, nodes), cpu_s)


def unseated(seen: Snapshot, types: Sequence[NodeType], nodes: Counter[str]) -> int:
    """Returns the number of tasks and bundles that the plan placed on no node. Asserts that all other tasks and bundles
    fit on their nodes.
    """
    draft, of = (
        PlanBuilder(seen, SchedulingState.from_snapshot(seen), NodeOccupancy.from_snapshot(seen), []),
        {t.name: t for t in types},
    )
    provision_unmanaged(draft)
    repack(draft.state)
    assert Counter(offer.node_type.name for offer in draft.state.bought.values()) == nodes
    for node_id, tenants in draft.state.tenants.items():
        taken: dict[str, float] = {}
        for tenant in tenants:
            add(taken, round_up_gpu_share(tenant.shape.resources))
        assert fits(taken, of[draft.state.bought[node_id].node_type.name].resources), node_id
    return sum(demand.count for demand in seen.demand) - sum(map(len, draft.state.tenants.values()))


def bound_usd_h(types: Sequence[NodeType], work: Work) -> float:
    """Returns a lower bound of the cost in dollars an hour. The bound is the solution of a relaxed problem. In this
    problem, a fraction of a node may be bought, and a task may be split over several nodes. Each of these nodes must be
    large enough for the whole task.
    """
    demand = (*work.groups, *work.tasks)
    kinds = sorted({name for t in types for name in t.resources})
    pairs = [
        (s, t)
        for s, d in enumerate(demand)
        for t, node in enumerate(types)
        if copies_that_fit(d.resources, node.resources)
    ]
    cost = np.array([t.price_micro_usd_h / 1e6 for t in types] + [0.0] * len(pairs))
    holds, seated = lil_array((len(types) * len(kinds), len(cost))), lil_array((len(demand), len(cost)))
    for t, node in enumerate(types):
        for k, name in enumerate(kinds):
            holds[t * len(kinds) + k, t] = -node.resources.get(name, 0.0) / _unit(name)
    for at, (s, t) in enumerate(pairs, start=len(types)):
        seated[s, at] = 1.0
        for k, name in enumerate(kinds):
            holds[t * len(kinds) + k, at] = demand[s].resources.get(name, 0.0) / _unit(name)
    counts: NDArray[np.float64] = np.array([d.count for d in demand], dtype=np.float64)
    found = linprog(cost, A_ub=holds.tocsr(), b_ub=np.zeros(holds.shape[0]), A_eq=seated.tocsr(), b_eq=counts)
    return float(found.fun)


def _unit(name: str) -> float:
    return GIB if name == "memory" else 1.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prices", type=Path, required=True)
    options.add_argument("--pods", type=Path, required=True)
    options.add_argument("--sizes", type=int, nargs="+", default=[50, 200, 800])
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    types = menu(given.prices)
    tuned, known = cheapest_by_gpus(types), shapes(given.pods, types)
    print(f"{len(types)} node types, {len(known)} pods with a GPU; per row {given.seeds} draws")
    print("demands  bundles   bound $/h  who      $/h      / bound  nodes  unmet  CPU s")
    for size in given.sizes:
        works = [draw(known, size, random.Random(seed)) for seed in range(given.seeds)]
        bounds = [bound_usd_h(types, work) for work in works]
        bundles = statistics.fmean(sum(d.count for d in (*work.groups, *work.tasks)) for work in works)
        for who, decide, choice in (("Ray", by_ray, types), ("Ray, 1", by_ray, tuned), ("raytide", by_raytide, types)):
            fleets = [decide(choice, work) for work in works]
            usd_h, nodes, unmet, cpu_s = (
                statistics.fmean(values)
                for values in zip(
                    *((fleet.usd_h(types), fleet.nodes.total(), fleet.unmet, fleet.cpu_s) for fleet in fleets),
                    strict=True,
                )
            )
            ratio = sum(fleet.usd_h(types) for fleet in fleets) / sum(bounds)
            row = f"{size:7}  {bundles:7.0f}  {statistics.fmean(bounds):10,.0f}  {who:<7}  {usd_h:7,.0f}"
            print(f"{row}  {ratio:7.3f}  {nodes:5.0f}  {unmet:5.0f}  {cpu_s:5.2f}", flush=True)


if __name__ == "__main__":
    main()
