"""An API of a simulated busy cluster, which exists only as records in a store. This API is used to take screenshots of
the page, to measure the page, and to run the page's soak test.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from busy_specs import CLUSTER, TYPES, add_alerts, add_models, job_spec, new_node, serve_spec

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.server import server
from raytide.control.api.services.service import ApiService
from raytide.control.views import Live, TeamUse, Waiting, to_json
from raytide.core.clock import SystemClock
from raytide.core.io.atomic_file import write_json
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.endpoint import Endpoint, EndpointState
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLoad, ReplicaStartup, Traffic
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import Node, NodeState, Signal
from raytide.core.objects.plan import Drain, Launch, Plan, Rejected, Scale, Wait
from raytide.core.state import Changes, Store

TOKEN = "benchmark"  # of a server that listens on loopback and has no real data


@dataclass
class Size:
    jobs: int = 1000
    nodes: int = 200
    endpoints: int = 50


class BusyCluster:
    """Writes the records of a busy cluster and, once a second, the observations that a controller would write."""

    def __init__(self, folder: Path, size: Size, seed: int = 17) -> None:
        self.folder, self.size, self.random = folder, size, random.Random(seed)
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "tokens.json").write_text(
            json.dumps({TOKEN: {"user": "ana", "team": "*"}, "chat": {"user": "bo", "team": "chat"}})
        )
        self.config: ClusterConfig = load_cluster(folder / "cluster.yaml")
        self.store = Store.open(f"sqlite:///{folder}/state.db")
        self.begun_s = time.time()
        self.running: list[Job] = []
        self.queue: tuple[str, ...] = ()
        self.loads: dict[str, EndpointLoad] = {}
        self._fill()

    def _fill(self) -> None:
        now_s, size = self.begun_s, self.size
        nodes = [new_node(number, now_s, self.random) for number in range(1, size.nodes + 1)]
        specs = [job_spec(number, self.folder, now_s, self.random) for number in range(size.jobs)]
        for number, spec in enumerate(specs):
            age_s = 600 + 5_000 * self.random.random()
            self.store.submit_job(spec, ("ana", "bo", "cy", "di")[number % 4], now_s - age_s)
        jobs = list(self.store.jobs(active=True, limit=size.jobs))[::-1]
        gpu_nodes = [node for node in nodes if node.type != "cpu32" and node.state is NodeState.READY]
        serving, training = gpu_nodes[: len(gpu_nodes) * 3 // 10], gpu_nodes[len(gpu_nodes) * 3 // 10 :]
        leases, changed, held = [], [], {}
        at = 0
        for job in jobs:
            shape = job.spec.gang.shapes[0]
            if at + shape.members > len(training) * 0.92:
                continue
            members = tuple(
                Member(index, MemberState.READY, training[at + index].id, f"ray-{training[at + index].id}")
                for index in range(shape.members)
            )
            for member in members:
                share = min(1.0, shape.resources["GPU"] / _gpus(training, member.node_id))
                held[member.node_id] = (
                    *((Share(EntryKind.IDLE, "", "", 1 - share),) if share < 1 else ()),
                    Share(EntryKind.JOB, job.id, job.spec.team, share),
                )
            at += shape.members
            leases.append(Lease(f"lease-{job.id[4:]}", job.id, shape, LeaseState.ACTIVE, members, epoch=1))
            started = replace(job, state=JobState.RUNNING, admitted_at_s=now_s - 500, started_at_s=now_s - 480)
            changed.append(started)
            self.running.append(started)
        for number in range(size.endpoints):
            spec = serve_spec(number)
            self.store.save_endpoint(spec, "bo", now_s - 80_000)
        endpoints = [
            replace(e, state=EndpointState.RUNNING, target_replicas=1 + number % 4)
            for number, e in enumerate(self.store.endpoints())
        ]
        for number, node in enumerate(serving):
            if endpoints:
                endpoint = endpoints[number % len(endpoints)]
                held[node.id] = (Share(EntryKind.ENDPOINT, endpoint.name, endpoint.spec.team, 1.0),)
        idle = (Share(EntryKind.IDLE, "", "", 1.0),)
        intervals = [
            OpenInterval(node.id, node.price_micro_usd_h, _us(now_s - 90_050), _us(now_s - 30), held.get(node.id, idle))
            for node in nodes
            if node.state in (NodeState.READY, NodeState.DRAINING)
        ]
        taken = {job.id for job in changed}
        self.queue = tuple(job.id for job in jobs if job.id not in taken)
        self.endpoints = endpoints
        self.serving = serving
        entries = list(self._entries(nodes, held, now_s))
        for part in range(0, len(entries), 20_000):
            self.store.commit(Changes(at_s=now_s, entries=tuple(entries[part : part + 20_000])))
        plans = [
            Plan(
                now_s - 900,
                (self._launch(nodes[3]), Scale(endpoints[0].name, 3, "41 requests a second need 3 replicas")),
            ),
            Plan(
                now_s - 300,
                (
                    Drain(
                        nodes[5].id, "idle", now_s - 200, "idle for 62 s, its type's idle_timeout_s is 60", -31_400_000
                    ),
                    Wait(self.queue[0] if self.queue else "queue", "quota", "team research has 0 of 400 GPU left"),
                ),
            ),
        ]
        for plan in plans:
            self.store.commit(Changes(at_s=plan.at_s, plan=plan))
        self.store.commit(
            Changes(
                at_s=now_s,
                jobs=tuple(changed),
                leases=tuple(leases),
                nodes=tuple(nodes),
                endpoints=tuple(endpoints),
                intervals=tuple(intervals),
            )
        )

    def _launch(self, node: Node) -> Launch:
        return Launch(
            node.id,
            node.type,
            node.zone,
            "lease-12",
            "the cheapest offering per work that holds a member",
            node.price_micro_usd_h,
            (
                Rejected("h100x8 in eu-1c", "dearer", 18_800_000),
                Rejected("h100x8.spot in eu-1b", "the pool failed twice, and is tried again in 240 s"),
            ),
        )

    def _entries(self, nodes: list[Node], held: dict[str, tuple[Share, ...]], now_s: float) -> Iterator[Entry]:
        """Yields a day of the ledger by quarters of an hour, with a tide in it."""
        quarter_us = 900_000_000
        end_us = _us(now_s - 30)
        for back in range(95):
            hour = (time.localtime(now_s - back * 900).tm_hour + time.localtime(now_s - back * 900).tm_min / 60) / 24
            busy = 0.55 + 0.4 * abs(2 * ((hour + 0.25) % 1) - 1)
            for number, node in enumerate(nodes):
                if node.state is NodeState.LAUNCHING:
                    continue
                shares = held.get(node.id, ())
                used = number / len(nodes) < busy
                holder = shares[-1] if shares and used else None
                kind = holder.kind if holder else EntryKind.IDLE
                if number == back % len(nodes):
                    kind, holder = EntryKind.STARTUP, None
                from_us = end_us - (back + 1) * quarter_us
                yield Entry(
                    node.id, from_us, from_us + quarter_us, kind, holder.subject if holder else "",
                    holder.team if holder else "", node.price_micro_usd_h, node.price_micro_usd_h // 4,
                    energy_mj=(5_600_000 if holder else 900_000) * 900,
                )  # fmt: skip

    def observe(self, tick: int) -> None:
        """Writes live.json and the progress of some jobs. The values look like those of a real cluster, `tick` seconds
        after the start.
        """
        now_s, chance = time.time(), self.random
        for job in chance.sample(self.running, min(len(self.running), 25)):
            step = 10_000 + tick
            done = {"step": step, "steps": 20_000, "loss": round(1.9 + chance.random() / 20, 4)}
            self.store.report(job.id, {**done, "tokens_per_s": round(402_000 + chance.gauss(0, 4000))}, now_s)
        self.loads = {
            endpoint.name: self._load(endpoint, number, tick, now_s) for number, endpoint in enumerate(self.endpoints)
        }
        waiting = {
            job_id: Waiting(
                "quota" if place % 3 else "capacity",
                "team research has 0 of 400 GPU left" if place % 3 else "no h100x8.spot is to be had in eu-1a",
                "Raise its quota, or wait." if place % 3 else "The pool is tried again in 4 min.",
                60.0 * (place + 1) if place < 40 else None,
            )
            for place, job_id in enumerate(self.queue)
        }
        use = {
            node.id: {"gpu": Signal(min(1.0, max(0.0, chance.gauss(0.78, 0.1))), now_s), "cpu": Signal(0.3, now_s)}
            for node in self.store.nodes(live=True)
        }
        teams = {
            team: TeamUse({"GPU": used}, {"GPU": own}, {"GPU": own - used}, 0, used * 3)
            for team, used, own in (
                ("research", 392.0, 400.0),
                ("search", 210.0, 160.0),
                ("chat", 188.0, 300.0),
                ("data", 24.0, 80.0),
            )
        }
        live = Live(now_s, waiting, self.queue, teams, loads=self.loads, use=use, ticks=tick, tick_s=0.02)
        write_json(self.folder / "live.json", to_json(live))

    def _load(self, endpoint: Endpoint, number: int, tick: int, now_s: float) -> EndpointLoad:
        chance, count = self.random, endpoint.target_replicas
        rate = 4.0 * (1 + number % 5) * (1 + 0.2 * chance.random())
        served = 1000.0 + tick * rate
        late = served * (0.03 if number == 1 else 0.002)
        replicas = tuple(
            ReplicaLoad(
                f"{endpoint.name}#{index}", now_s, 6 + chance.random() * 4, float(number == 2) * 3,
                min(0.98, 0.4 + 0.05 * (number % 10) + 0.05 * chance.random()),
                Counters(served, output_tokens=served * 180, finished=served, late=late),
                f"ray-{self.serving[(number + index) % len(self.serving)].id}" if self.serving else "",
            )
            for index in range(count)
        )  # fmt: skip
        ttft_s = (0.62 if number == 1 else 0.18 + 0.02 * (number % 6)) * (1 + 0.15 * chance.random())
        phases = (("node", 41.0), ("process", 6.2), ("stage", 12.4), ("load", 9.1), ("warm-up", 3.3))
        startups = tuple(
            ReplicaStartup(replica.id, now_s - 3600 - 90 * index, phases, True)
            for index, replica in enumerate(replicas)
        )
        if number == 0:
            startups = (
                *startups,
                ReplicaStartup(f"{endpoint.name}#9", now_s - 52, phases[:2], False, "8.1 of 16.0 GB"),
            )
        traffic = Traffic(rate, rate * 600, rate * 180, ttft_s, rate * 1.1)
        return EndpointLoad(
            now_s, 8.0 * count, count, tuple(each.node for each in replicas), replicas, traffic, startups=startups
        )


def _gpus(nodes: list[Node], node_id: str) -> int:
    node = next(node for node in nodes if node.id == node_id)
    return next(gpus for name, _, _, _, gpus in TYPES if name == node.type)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


class _NoMachines:
    def machines(self) -> tuple[object, ...]:
        return ()


class _Drivers:
    """Drivers that all printed the same."""

    def log(self, key: object, start: int, most: int) -> tuple[bytes, int]:
        text = "".join(f"step {step}  loss {2.4 - step / 5e4:.3f}  402k tokens/s\n" for step in range(9900, 10_000, 5))
        return text.encode()[start : start + most], len(text)


@contextmanager
def busy_api(size: Size, port: int = 0) -> Iterator[str]:
    """Serves the API of a simulated busy cluster on loopback, and yields the API's address."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cluster = BusyCluster(folder, size)
        cluster.observe(0)
        add_models(cluster.store, cluster.running[0].id if cluster.running else "", cluster.begun_s)
        add_alerts(folder, cluster.begun_s)
        service = ApiService(
            store=cluster.store,
            config=cluster.config,
            bill=_NoMachines(),
            drivers=_Drivers(),  # type: ignore[arg-type]
            clock=SystemClock(),
            live=folder / "live.json",
            serve_url="http://127.0.0.1:8000",
            ray_url="http://127.0.0.1:8265",
            ray_environment={},
        )
        running: uvicorn.Server = server(create_app(service, Tokens(folder / "tokens.json")), "127.0.0.1", port)
        ended = threading.Event()

        def observe() -> None:
            tick = 0
            while not ended.wait(1.0):
                cluster.observe(tick := tick + 1)

        threads = [threading.Thread(target=running.run, daemon=True), threading.Thread(target=observe, daemon=True)]
        for thread in threads:
            thread.start()
        try:
            while not running.started:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        finally:
            ended.set()
            running.should_exit = True
            for thread in threads:
                thread.join(timeout=15)
            cluster.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--endpoints", type=int, default=50)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with busy_api(Size(options.jobs, options.nodes, options.endpoints), options.port) as address:
        print(f"{address}/ with the token {TOKEN}; Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
