"""Measures the time of one decision on a large cluster: 10,000 nodes, 200 pools, 30,000 pending tasks in 120 shapes.

The cluster also has 1,500 running or waiting gangs, 100 endpoints with 4,000 replicas, and a queue of 300 jobs. The
state of the cluster is drawn at random for each tick.

A tick updates the records from an observation, takes the snapshot, orders the queue, plans, and writes the plan into
the records. The benchmark prints quantiles of the CPU time of a whole tick without I/O, quantiles of the CPU time of
the decision alone, and the process's peak memory.

    python benchmarks/autoscaler/autoscaler_tick.py --ticks 100
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))

from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.ray_gcs import RayNode
from raytide.autoscaler.spot.pool_risk import PoolRisk
from raytide.control.controller import GC_THRESHOLDS
from raytide.control.reconcile.decide import decide
from raytide.control.reconcile.intents import record_intents
from raytide.control.reconcile.observation import ClusterObservation
from raytide.control.reconcile.records import ClusterRecords, advance, take_snapshot
from raytide.core.objects.cluster_config import ClusterConfig, RaytideSection, UnmanagedSection
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType, Resources, fits, minus
from raytide.core.objects.plan import Drain, Launch
from raytide.core.objects.snapshot import Demand

NOW_S = 1_000_000.0
ZONES = ("a", "b")


@dataclass(frozen=True, slots=True)
class Size:
    nodes: int = 10_000
    pools: int = 200
    tasks: int = 30_000
    shapes: int = 120
    gangs: int = 1_500
    endpoints: int = 100
    queue: int = 300


def node_types(size: Size, chance: random.Random) -> tuple[NodeType, ...]:
    types = []
    for number in range(size.pools // len(ZONES)):
        gpus = chance.choice([0, 0, 1, 2, 4, 8])
        cpus = chance.choice([16, 32, 64, 96]) if not gpus else 12 * gpus
        resources = {"CPU": cpus, "memory": 4.0 * cpus} | ({"GPU": gpus} if gpus else {})
        types.append(
            NodeType(
                name=f"type{number}",
                resources=resources,
                market=chance.choice([CapacityType.SPOT, CapacityType.ON_DEMAND]),
                price_micro_usd_h=int(1e6 * (0.05 * cpus + 1.5 * gpus) * chance.uniform(0.3, 1.2)),
                zones=ZONES,
                max_nodes=size.nodes // 10,
            )
        )
    return tuple(types)


def cluster(size: Size, types: Sequence[NodeType], chance: random.Random) -> tuple[ClusterRecords, ClusterObservation]:
    """Returns a busy cluster. Gangs and replicas hold whole GPUs. On half of the nodes, tasks hold a random share of
    the remaining resources.
    """
    book, by_name = ClusterRecords(next_node=size.nodes + 1), {t.name: t for t in types}
    for number in range(1, size.nodes + 1):
        node_type, zone = chance.choice(types), chance.choice(ZONES)
        is_ready, age_s = chance.random() < 0.97, chance.uniform(60.0, 7200.0)
        book.nodes[f"node-{number}"] = Node(
            id=f"node-{number}",
            type=node_type.name,
            zone=zone,
            market=node_type.market,
            price_micro_usd_h=node_type.price_micro_usd_h,
            state=NodeState.READY if is_ready else NodeState.LAUNCHING,
            requested_at_s=NOW_S - (age_s + 60.0 if is_ready else 50.0),
            started_at_s=NOW_S - (age_s + 30.0 if is_ready else 20.0),
            ready_at_s=NOW_S - age_s if is_ready else None,
            ray_node_id=f"ray-{number}" if is_ready else "",
        )
    ready = [node for node in book.nodes.values() if node.ready_at_s is not None]
    free = {node.id: dict(by_name[node.type].resources) for node in ready}
    _add_gangs(book, size, free, chance)
    loads = _add_endpoints(book, size, free, chance)
    for left in free.values():
        if chance.random() < 0.5:
            taken = chance.choice([0.25, 0.5, 1.0])
            left.update({name: float(int(amount * (1.0 - taken))) for name, amount in left.items()})
    ray_nodes = [
        RayNode(
            node.ray_node_id,
            node.id,
            total=by_name[node.type].resources,
            available=free[node.id],
            labels={**by_name[node.type].all_labels(node.zone), "ray.io/node-id": node.ray_node_id},
        )
        for node in ready
    ]
    world = ClusterObservation(
        machines=tuple(
            Machine(n.id, n.type, n.zone, n.price_micro_usd_h, n.started_at_s or NOW_S) for n in book.nodes.values()
        ),
        notices=(),
        ray_nodes=tuple(ray_nodes),
        demand=tuple(_demand(size, chance)),
        groups={},
        drivers={},
        loads=loads,
    )
    return book, world


def _seat(need: Resources, free: dict[str, dict[str, float]], ids: Sequence[str], chance: random.Random) -> str:
    """A random node with room for it, which is taken; none when it takes too long to find one."""
    for _ in range(300):
        node_id = chance.choice(ids)
        if fits(need, free[node_id]):
            free[node_id] = minus(free[node_id], need)
            return node_id
    return ""


def _add_gangs(book: ClusterRecords, size: Size, free: dict[str, dict[str, float]], chance: random.Random) -> None:
    ids = list(free)
    for number in range(1, size.gangs + size.queue + 1):
        gpus, members = chance.choice([1.0, 1.0, 2.0, 2.0, 4.0, 8.0]), chance.choice([1, 2, 4, 8])
        shape = Shape(members=members, min_members=chance.choice([1, members]), resources={"GPU": gpus, "CPU": 4.0})
        gang, is_queued = GangSpec(shapes=(shape,)), number > size.gangs
        is_preemptible = chance.random() < 0.5
        spec = JobSpec(kind=JobKind.GANG, name="g", gang=gang, heartbeat_timeout_s=1e9, preemptible=is_preemptible)
        state = JobState.QUEUED if is_queued else JobState.RUNNING
        book.jobs[f"job-{number}"] = Job(f"job-{number}", spec, "me", state, NOW_S - 900, heartbeat_at_s=NOW_S)
        if is_queued:
            continue
        nodes = ["" if chance.random() < 0.005 else _seat(shape.resources, free, ids, chance) for _ in range(members)]
        seats = tuple(_member(index, node_id) for index, node_id in enumerate(nodes))
        lease = Lease(f"lease-{number}", f"job-{number}", shape, LeaseState.ACTIVE, seats, created_at_s=NOW_S - 7200)
        book.leases[lease.id] = lease


def _member(index: int, node_id: str) -> Member:
    if not node_id:
        return Member(index)
    return Member(index, MemberState.READY, node_id, node_id.replace("node", "ray"), placement_group_id="ab")


def _add_endpoints(
    book: ClusterRecords, size: Size, free: dict[str, dict[str, float]], chance: random.Random
) -> dict[str, EndpointLoad]:
    loads, ids = {}, list(free)
    for number in range(size.endpoints):
        name = f"m{number}x"
        spec = ServeSpec(name=name, model="/m", resources={"GPU": 1.0, "CPU": 2.0}, replicas=Replicas(max=64))
        book.endpoints[name] = Endpoint(spec, "me", EndpointState.RUNNING, 0.0, target_replicas=40)
        seats = [_seat(spec.resources, free, ids, chance) for _ in range(chance.choice([39, 40]))]
        hosts = tuple(node_id.replace("node", "ray") for node_id in seats if node_id)
        loads[name] = EndpointLoad(NOW_S - 1.0, chance.uniform(200.0, 400.0), len(hosts), hosts)
    return loads


def _demand(size: Size, chance: random.Random) -> Iterator[Demand]:
    for _ in range(size.shapes):
        need = {"CPU": float(chance.randint(1, 16)), "memory": float(chance.randint(1, 32))}
        if chance.random() < 0.5:
            need["GPU"] = float(chance.choice([1, 1, 2, 4]))
        labels = {"ray.io/market-type": "spot"} if chance.random() < 0.3 else {}
        yield Demand(need, labels, size.tasks // size.shapes)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ticks", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)  # as the controller does
    size, chance = Size(), random.Random(given.seed)
    types = node_types(size, chance)
    unmanaged = UnmanagedSection(max_nodes=2_000, gpu=True)
    config = ClusterConfig(name="large", node_types=types, settings=RaytideSection(node_types={}, unmanaged=unmanaged))
    by_name = {t.name: t for t in types}
    whole, deciding, launches, drains = [], [], 0, 0
    for _ in range(given.ticks):
        book, world = cluster(size, types, chance)
        began = time.process_time()
        advance(book, world, NOW_S)
        risk = PoolRisk()
        risk.observe(book.nodes.values(), NOW_S)
        seen = take_snapshot(book, world, IdleClock(), config, NOW_S)
        seen = replace(seen, quotes=risk.quotes(types, {}, NOW_S))
        between = time.process_time()
        plan = decide(seen)
        deciding.append(time.process_time() - between)
        record_intents(book, plan, by_name)
        whole.append(time.process_time() - began)
        launches += sum(isinstance(action, Launch) for action in plan.actions)
        drains += sum(isinstance(action, Drain) for action in plan.actions)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{size.nodes} nodes, {size.pools} pools, {size.tasks} tasks in {size.shapes} shapes, seed {given.seed}")
    for what, seconds in (("whole tick", whole), ("decide alone", deciding)):
        p50, p99 = np.quantile(seconds, [0.5, 0.99])
        print(f"{what:<13} p50 {p50:.3f} s  p99 {p99:.3f} s  worst {max(seconds):.3f} s of CPU, {len(seconds)} ticks")
    done = f"{launches / given.ticks:.0f} launches, {drains / given.ticks:.0f} drains"
    print(f"{done} a tick; peak memory {memory_mb:.0f} MB")


if __name__ == "__main__":
    main()
