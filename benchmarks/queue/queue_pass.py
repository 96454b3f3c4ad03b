"""Measures a pass of the queue with 1,000 waiting jobs of 200 teams, and an API page of 100 jobs.

    python benchmarks/queue/queue_pass.py [--jobs 1000] [--teams 200] [--nodes 64] [--repeats 20]
                                          [--seed 0] [--scale]

There are four passes:

- Running jobs hold the fleet, and none of them may be preempted. This is the usual tick of a long queue.
- All running jobs may be preempted, and one pass preempts as many as it may. This is the worst tick.
- The fleet is empty and is filled.
- An endpoint takes a seat on each node from elastic gangs.

The API's page is timed over HTTP, encoding included. With `--scale`, the passes run again with more jobs and nodes,
to show how their time grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi.testclient import TestClient

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.control.controller import GC_THRESHOLDS
from raytide.control.views import Live, Waiting, to_json
from raytide.core.clock import SystemClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import Node, NodeState, NodeType
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.core.objects.team import Team, TeamSpec
from raytide.core.state import Store
from raytide.queue.admission.scheduler import schedule

LOCAL = Path(__file__).parents[2] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
MODEL = {"ray.io/accelerator-type": "H100"}
SCALES = (1000, 64), (2000, 128), (4000, 256), (5000, 1000)
"""Jobs and nodes."""


def snapshot(args: argparse.Namespace, *, held: bool, is_preemptible: bool) -> Snapshot:
    chance = random.Random(args.seed)
    h100 = NodeType(
        name="h100x8",
        resources={"CPU": 192.0, "GPU": 8.0},
        labels=MODEL,
        price_micro_usd_h=55_000_000,
        max_nodes=args.nodes,
    )
    teams = tuple(
        Team(f"team-{i}", TeamSpec(quota={"H100": 8.0 * args.nodes / args.teams}), recent_gpu_s=chance.uniform(0, 1e6))
        for i in range(args.teams)
    )
    running = 4 * args.nodes if held else 0
    jobs = [_job(n, chance, args.teams, JobState.RUNNING, is_preemptible) for n in range(1, running + 1)]
    leases = [_lease(job, n, args.nodes) for n, job in enumerate(jobs)]
    jobs += [_job(n, chance, args.teams, JobState.QUEUED, True) for n in range(running + 1, running + args.jobs + 1)]
    views = tuple(_view(n, h100, held) for n in range(args.nodes)) if held else ()
    return Snapshot(1e6, (h100,), views, tuple(jobs), tuple(leases), teams=teams, next_lease=10**6)


def passes(args: argparse.Namespace) -> Iterator[tuple[str, Snapshot]]:
    yield "the fleet is held, nobody may be preempted", snapshot(args, held=True, is_preemptible=False)
    everybody = snapshot(args, held=True, is_preemptible=True)
    yield "the fleet is held, everybody may be, and many are", everybody
    yield "an empty fleet is filled", snapshot(args, held=False, is_preemptible=False)
    spec = ServeSpec(
        name="chat", model="m", resources={"GPU": 1.0}, labels=MODEL, replicas=Replicas(min=1, max=args.nodes)
    )
    endpoint = Endpoint(spec, "ada", EndpointState.RUNNING, 0.0, target_replicas=args.nodes)
    view = EndpointView(endpoint, EndpointLoad(everybody.at_s, ongoing=1000.0, ready=0))
    holders = tuple(job for job in everybody.jobs if job.state is JobState.RUNNING)
    yield f"an endpoint takes {args.nodes} seats, nobody waits", replace(everybody, jobs=holders, endpoints=(view,))


def _job(number: int, chance: random.Random, teams: int, state: JobState, is_preemptible: bool) -> Job:
    if state is JobState.RUNNING:
        shape = Shape(members=2, min_members=1, resources={"GPU": 1.0}, labels=MODEL)
    else:
        each = float(chance.choice([1, 1, 2, 4, 8]))
        shape = Shape(members=chance.choice([1, 1, 2, 4]), resources={"GPU": each}, labels=MODEL)
    team = f"team-{chance.randrange(teams)}"
    spec = JobSpec(kind=JobKind.TRAIN, name="b", team=team, gang=GangSpec(shapes=(shape,)), preemptible=is_preemptible)
    attained = 1e6 if state is JobState.RUNNING else 0.0
    return Job(f"job-{number}", spec, "ada", state, float(number), attained_gpu_s=attained)


def _lease(job: Job, number: int, nodes: int) -> Lease:
    places = [(2 * number + k) % nodes for k in range(2)]
    members = tuple(Member(k, MemberState.READY, f"node-{n}", f"ray-{n}", "", "pg") for k, n in enumerate(places))
    return Lease(f"lease-{number}", job.id, job.spec.gang.shapes[0], LeaseState.ACTIVE, members)


def _view(number: int, node_type: NodeType, held: bool) -> NodeView:
    node = Node(
        f"node-{number}",
        node_type.name,
        "local",
        node_type.market,
        1,
        NodeState.READY,
        0.0,
        ray_node_id=f"ray-{number}",
    )
    free = {**node_type.resources, **({"GPU": 0.0} if held else {})}
    return NodeView(node, node_type.resources, free, node_type.all_labels("local"))


def api(folder: Path, jobs: int) -> TestClient:
    store = Store.open(f"sqlite:///{folder}/state.db")
    spec = JobSpec(kind=JobKind.GANG, name="b", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    ids = [store.submit_job(spec, "ada", 1.0).id for _ in range(jobs)]
    waiting = {job_id: Waiting("capacity", "it waits for room.", "Wait.") for job_id in ids}
    (folder / "live.json").write_text(json.dumps(to_json(Live(2.0, waiting=waiting, queue=tuple(ids)))))
    (folder / "tokens.json").write_text(json.dumps({"t": {"user": "ada", "team": "*"}}))
    desk = ApiService(store, load_cluster(LOCAL), None, None, SystemClock(), folder / "live.json", "", "", {})  # type: ignore[arg-type]
    return TestClient(create_app(desk, Tokens(folder / "tokens.json")), headers={"Authorization": "Bearer t"})


def timed(what: str, act: Callable[[], object], repeats: int) -> None:
    act()
    wall, own = [], []
    for _ in range(repeats):
        began, began_own = time.perf_counter(), time.process_time()
        act()
        wall.append(1000 * (time.perf_counter() - began))
        own.append(1000 * (time.process_time() - began_own))
    spread = f"{min(wall):.1f} .. {max(wall):.1f}"
    print(f"{what:50} median {statistics.median(wall):7.1f} ms ({spread}), CPU time {statistics.median(own):7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("jobs", 1000), ("teams", 200), ("nodes", 64), ("repeats", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scale", action="store_true")
    args = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)  # as the controller does
    print(f"{args.jobs} queued, {args.teams} teams, {args.nodes} nodes of 8 GPUs, seed {args.seed}")
    for what, seen in passes(args):
        timed(f"pass: {what}", partial(schedule, seen), args.repeats)
    with tempfile.TemporaryDirectory() as folder, api(Path(folder), args.jobs) as client:
        timed("page of 100 jobs over HTTP", lambda: client.get("/v1/jobs?limit=100").raise_for_status(), args.repeats)
    for jobs, nodes in SCALES if args.scale else ():
        print(f"{jobs} queued, {args.teams} teams, {nodes} nodes of 8 GPUs, seed {args.seed}")
        for what, seen in passes(argparse.Namespace(**{**vars(args), "jobs": jobs, "nodes": nodes})):
            timed(f"pass: {what}", partial(schedule, seen), 3)


if __name__ == "__main__":
    main()
