"""Measures how a load spike on a served model takes GPUs from an elastic trainer (the shock absorber).

    python benchmarks/trainer/absorber.py [--tick 2] [--spike-s 45] [--spike-rps 7] [--slo-s 2]
                                           [--json FILE]

The cluster is that of `raytide up --local`, with real processes: raylets, the controller, Ray Serve. One node has
five logical GPUs, and no other node can be bought. A trainer has four members with one GPU each, and can continue
with two. An endpoint has the fifth GPU. Its engine is the fake engine with a fixed token rate and a fixed number of
slots. Requests are sent at fixed intervals, with shorter ones during the spike. They do not wait for earlier
answers. A second run does the same with `limits.shrink_for_serving` off.

For both runs, prints the p95 of the time to first token, the replicas and members over time, and the time of each
step of the reaction. Also prints the moment from which p95 was under the limit in every window of five seconds until
the end of the spike. The start time of a replica begins when the GPU for it is free, and ends with the replica's
first answer. The samples of every training step are compared with those of the run that never shrank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import numpy as np
import yaml
from elastic_cpu import lines, until, write_dataset

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.objects.endpoint import EndpointState, Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.train import ModelSpec, TrainSpec

MEMBERS, AT_LEAST, REPLICAS = 4, 2, 3
TOKENS_PER_S, TOKENS, SLOTS = 5.0, 10, 8
BEFORE_S, WINDOW_S, LOOK_S = 15.0, 5.0, 0.25
BACK_S = 120.0
"""The time after the spike within which the members must be back."""


@dataclass(frozen=True)
class Answer:
    asked_s: float
    ttft_s: float
    """Infinite when it had none by the end."""


@dataclass(frozen=True)
class Look:
    at_s: float
    target: int
    ready: int
    seats: int
    """The usable members of the trainer's lease."""
    world: int
    """Ranks of the trainer's newest generation."""


@dataclass
class Run:
    """The observations of one run. Times are in seconds after the beginning of the spike."""

    shrinks: bool
    answers: list[Answer] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    decided_s: list[float] = field(default_factory=list)
    """Each Shrink."""
    freed_s: list[float] = field(default_factory=list)
    """Each seat that was given away."""
    answers_s: list[float] = field(default_factory=list)
    """Each replica that began to answer during the spike."""
    back_s: float | None = None
    """All members train again."""
    said: list[str] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)

    def under_slo_s(self, slo_s: float, spike_s: float) -> float | None:
        """Returns the time from which p95 was under the limit in every window until the end of the spike. Returns None
        if there is no such time.
        """
        starts = np.arange(0.0, spike_s - WINDOW_S + 1e-9, 0.5)
        bad = [start for start in starts if self.p95(start) > slo_s]
        if not bad:
            return 0.0
        return None if bad[-1] + 0.5 > starts[-1] else float(bad[-1] + 0.5)

    def p95(self, start_s: float) -> float:
        """Returns the 95th percentile of the time to first token, over the requests of the window that begins at
        `start_s`.
        """
        asked = sorted(a.ttft_s for a in self.answers if start_s <= a.asked_s < start_s + WINDOW_S)
        return asked[math.ceil(0.95 * len(asked)) - 1] if asked else 0.0

    def start_s(self) -> float | None:
        """Returns the seconds that the slowest replica took to start. The time runs from the release of resources for
        the replica to the replica's first answer. Returns None if no replica started.
        """
        freed_s = sorted(at_s for at_s in self.freed_s if at_s > 0.0)
        pairs = zip(freed_s, sorted(self.answers_s), strict=False)
        return max((answers - freed for freed, answers in pairs), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tick", type=float, default=2.0, help="seconds between two decisions")
    parser.add_argument("--base-rps", type=float, default=1.0)
    parser.add_argument("--spike-rps", type=float, default=7.0)
    parser.add_argument("--spike-s", type=float, default=45.0)
    parser.add_argument("--slo-s", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = []
    for shrinks in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            write_dataset(home / "tokens")
            (home / "config.json").write_text("{}")
            with local.temporary(home / "home", fleet(home, args.tick, shrinks), "absorber") as up:
                runs.append(disturbed(up, home, args, shrinks))
        show(runs[-1], args)
    verdict = compare(*runs, args)
    print("\n".join(f"{name}: {value}" for name, value in verdict.items()))
    if args.json:
        args.json.write_text(json.dumps({**verdict, "runs": [asdict(run) for run in runs]}))


def fleet(home: Path, tick_s: float, shrinks: bool) -> Path:
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    body["available_node_types"]["gpu8"] |= {"resources": {"CPU": 0, "GPU": MEMBERS + 1}, "max_workers": 1}
    body["metadata"]["raytide"] |= {"tick_s": tick_s, "limits": {"shrink_for_serving": shrinks}}
    (home / "cluster.yaml").write_text(yaml.safe_dump(body))
    return home / "cluster.yaml"


def disturbed(up: LocalCluster, home: Path, args: argparse.Namespace, shrinks: bool) -> Run:
    """Runs one trainer and one endpoint through one spike, and returns the observations."""
    spec = TrainSpec(
        dataset=str(home / "tokens"),
        out=str(home / "run"),
        model=ModelSpec(dim=32, layers=2, heads=4, max_seq_len=64),
        steps=1_000_000,
        global_batch=8,
        micro_batch=8,
        seq_len=64,
        checkpoint_every=500,
        record_samples=True,
        gang=GangSpec(shapes=(Shape(members=MEMBERS, min_members=AT_LEAST, resources={"GPU": 1}),)),
    )
    served = ServeSpec(
        name="chat",
        model=str(home),
        resources={"GPU": 1},
        replicas=Replicas(min=1, max=REPLICAS, target_ongoing=4, downscale_delay_s=5),
        engine={"kind": "fake", "tokens_per_s": TOKENS_PER_S, "max_running": SLOTS},
    )
    run = Run(shrinks)
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as tide:
        job = tide.train(spec)
        until(lambda: world(spec) == MEMBERS, "the whole gang")
        endpoint = tide.serve(served).wait(replicas=1, timeout_s=240.0)
        began_s = time.time() + BEFORE_S
        is_over = threading.Event()
        watching = threading.Thread(target=watch, args=(run, up, job.id, spec, began_s, is_over))
        watching.start()
        try:
            run.answers = asyncio.run(ask_all(endpoint.base_url, args, began_s))
            deadline_s = time.time() + BACK_S
            while time.time() < deadline_s and not (is_back := _is_back(run, args.spike_s)):
                time.sleep(LOOK_S)
            run.back_s = run.looks[-1].at_s if is_back else None
        finally:
            is_over.set()
            watching.join()
        tell(run, tide, job.id, began_s)
        tide.client.stop(job.id)
        until(lambda: tide.job(job.id).view.job.is_final, "the job to stop")
        endpoint.delete()
        until(lambda: endpoint.refresh().status.endpoint.state is EndpointState.DELETED, "the endpoint to go")
    run.samples = samples(spec)
    return run


def _is_back(run: Run, spike_s: float) -> bool:
    last = run.looks[-1]
    return last.at_s > spike_s and last.ready == 1 and last.world == MEMBERS == last.seats


def watch(run: Run, up: LocalCluster, job_id: str, spec: TrainSpec, began_s: float, is_over: threading.Event) -> None:
    """Records the state of the endpoint, of the lease and of the trainer every LOOK_S seconds until `is_over`
    is set.
    """
    freed: set[tuple[int, int]] = set()
    with rt.Client(ApiClient.from_run_dir(up.run_dir)) as tide:
        while not is_over.wait(LOOK_S):
            status, lease = tide.endpoint("chat").status, tide.client.job(job_id).lease
            assert lease is not None
            look = Look(
                at_s=time.time() - began_s,
                target=status.endpoint.target_replicas,
                ready=status.ready_replicas,
                seats=len(lease.usable),
                world=world(spec),
            )
            if run.looks and look.at_s > 0.0:
                run.answers_s += [look.at_s] * max(0, look.ready - max(1, run.looks[-1].ready))
            for member in lease.members:
                if member.is_parked and member.given_to and (member.index, member.incarnation) not in freed:
                    freed.add((member.index, member.incarnation))
                    run.freed_s.append((member.leaves_at_s or 0.0) - began_s)
            run.looks.append(look)


def world(spec: TrainSpec) -> int:
    formed = [event for event in lines(Path(spec.out) / "events.jsonl") if event["event"] == "formed"]
    return int(formed[-1]["world"]) if formed else 0


async def ask_all(base_url: str, args: argparse.Namespace, began_s: float) -> list[Answer]:
    """Sends requests before the spike, during the spike, and for a while after the spike. The requests of each of these
    phases are sent at even intervals. No request waits for another one.
    """
    at_s = [-BEFORE_S + n / args.base_rps for n in range(int(BEFORE_S * args.base_rps))]
    at_s += [n / args.spike_rps for n in range(int(args.spike_s * args.spike_rps))]
    at_s += [args.spike_s + n / args.base_rps for n in range(int(2 * WINDOW_S * args.base_rps))]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits) as http:
        asking = []
        for due_s in at_s:
            await asyncio.sleep(max(0.0, began_s + due_s - time.time()))
            asking.append(asyncio.create_task(ask(http, began_s, 2 * args.spike_s)))
        return list(await asyncio.gather(*asking))


async def ask(http: httpx.AsyncClient, began_s: float, patience_s: float) -> Answer:
    asked_s = time.time()
    body = {"model": "chat", "prompt": f"{asked_s}", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    ttft_s = math.inf
    try:
        async with asyncio.timeout(patience_s), http.stream("POST", "/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if answer.is_success and ttft_s == math.inf and line.startswith("data: {"):
                    ttft_s = time.time() - asked_s
    except (httpx.HTTPError, TimeoutError):
        pass  # a request that broke off before its first token had none
    return Answer(asked_s - began_s, ttft_s)


def tell(run: Run, tide: rt.Client, job_id: str, began_s: float) -> None:
    """Records the controller's `scale`, `shrink` and `grow` actions, each with its time and the controller's reason.
    Also records the times at which the controller decided to shrink the job `job_id`.
    """
    for plan in tide.client.plans(limit=1000):
        for action in plan["actions"]:
            if action["action"] in ("scale", "shrink", "grow") and plan["at_s"] > began_s - BEFORE_S:
                at_s = plan["at_s"] - began_s
                run.said.append(f"{at_s:6.1f} s  {action['action']:6} {action['reason']}")
                if action["action"] == "shrink" and action["job_id"] == job_id:
                    run.decided_s.append(at_s)


def samples(spec: TrainSpec) -> dict[int, list[int]]:
    """Returns the sample ids of each complete step, over all ranks. If several generations did a step, the last one
    counts.
    """
    last: dict[int, tuple[int, Counter[int]]] = {}
    for file in sorted((Path(spec.out) / "samples").glob("*.jsonl")):
        for line in lines(file):
            generation, ids = last.get(line["step"], (-1, Counter()))
            if line["generation"] > generation:
                generation, ids = line["generation"], Counter()
            if line["generation"] == generation:
                ids.update(line["ids"])
            last[line["step"]] = generation, ids
    whole = {step: sorted(ids.elements()) for step, (_, ids) in last.items() if ids.total() == spec.global_batch}
    return dict(sorted(whole.items()))


def show(run: Run, args: argparse.Namespace) -> None:
    print(f"\nshrink_for_serving {'on' if run.shrinks else 'off'}, a decision every {args.tick:g} s")
    print("\n".join(run.said))
    print("   from   p95 TTFT  replicas (target)  seats  ranks")
    end_s = run.looks[-1].at_s
    for start_s in np.arange(-BEFORE_S, end_s, WINDOW_S):
        look = max((look for look in run.looks if look.at_s <= start_s + WINDOW_S), key=lambda look: look.at_s)
        replicas = f"{look.ready:8} {look.target:8}"
        print(f"{start_s:5.0f} s {run.p95(start_s):8.2f} s  {replicas}  {look.seats:5}  {look.world:5}")


def compare(on: Run, off: Run, args: argparse.Namespace) -> dict[str, object]:
    under_s, start_s = on.under_slo_s(args.slo_s, args.spike_s), on.start_s()
    bound_s = None if start_s is None else start_s + 3 * args.tick
    common = sorted(on.samples.keys() & off.samples.keys())
    return {
        "shrunk_at_s": on.decided_s,
        "seats_free_at_s": on.freed_s,
        "replicas_answer_at_s": on.answers_s,
        "replica_start_s": start_s,
        "under_slo_at_s": under_s,
        "bound_s": bound_s,
        "within_bound": under_s is not None and bound_s is not None and under_s <= bound_s,
        "under_slo_at_s_without": off.under_slo_s(args.slo_s, args.spike_s),
        "worst_p95_s": max(on.p95(at) for at in np.arange(0.0, args.spike_s)),
        "worst_p95_s_without": max(off.p95(at) for at in np.arange(0.0, args.spike_s)),
        "least_ranks": min(look.world for look in on.looks),
        "members_back_s_after_the_spike": None if on.back_s is None else on.back_s - args.spike_s,
        "steps_compared": len(common),
        "samples_equal": all(on.samples[step] == off.samples[step] for step in common),
    }


if __name__ == "__main__":
    main()
