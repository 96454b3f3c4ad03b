"""Measures the CPU time of the API while drivers wait for their leases, and the delay until drivers hear of a change.

    python benchmarks/queue/api_long_poll.py [--waiting 1000] [--poll 110] [--seconds 20] [--changes 2]
                                             [--repeats 3]

The API runs in a process of its own over a SQLite store, as on a head. Each driver sends a request that waits for up
to `--poll` seconds. After the answer, the driver sends the next request at once. Half of the jobs are GANG jobs. In
a GANG job, a waiting request also counts as the driver's heartbeat. Meanwhile another process commits changes of
single leases, `--changes` times a second, as the controller does.

The CPU time is printed as a share of a core. It is the user and system time of the API's process only, without the
drivers and the commits. A lower bound of this time would be the CPU time of the same server for the same number of
requests that do nothing. The script does not measure this bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.core.clock import SystemClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.state import Changes, Store, codec, tables

LOCAL = Path(__file__).parents[2] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
HOST, PORT = "127.0.0.1", 17400
SHAPE = Shape(members=4, resources={"CPU": 1.0})


class NoMachines:
    def machines(self) -> tuple[object, ...]:
        return ()


def serve(folder: Path) -> None:
    """Serves the API of the store in `folder` in the same way as the head of a cluster does."""
    desk = ApiService(
        store=Store.open(f"sqlite:///{folder}/state.db"),
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=None,  # type: ignore[arg-type]
        clock=SystemClock(),
        live=folder / "live.json",
        serve_url="",
        ray_url="",
        ray_environment={},
    )
    app = create_app(desk, Tokens(folder / "tokens.json"))
    try:
        from raytide.control.api.server import server
    except ModuleNotFoundError:  # a release before it
        import uvicorn

        uvicorn.run(app, host=HOST, port=PORT, log_level="warning")
    else:
        server(app, HOST, PORT).run()


def fill(folder: Path, waiting: int) -> Store:
    store = Store.open(f"sqlite:///{folder}/state.db")
    (folder / "tokens.json").write_text(json.dumps({"secret": {"user": "ana", "team": "default"}}))
    (folder / "tokens.json").chmod(0o600)
    kinds = (JobKind.GANG, JobKind.TRAIN)
    specs = [JobSpec(kind=kind, name="waits", gang=GangSpec(shapes=(SHAPE,))) for kind in kinds]
    jobs = [codec.new_job(number, specs[number % 2], "ana", time.time(), None) for number in range(1, waiting + 1)]
    with store._db.write() as c:
        c.execute(tables.jobs.insert(), jobs)
    members = tuple(Member(index) for index in range(SHAPE.members))
    leases = [
        Lease(f"lease-{n}", f"job-{n}", SHAPE, LeaseState.WAITING, members, epoch=1) for n in range(1, waiting + 1)
    ]
    store.commit(Changes(time.time(), leases=tuple(leases)))
    return store


class Load:
    """Drivers that wait for changes of their leases. Each driver measures how soon it hears of a change."""

    def __init__(self, waiting: int, poll_s: float) -> None:
        self._waiting, self._poll_s = waiting, poll_s
        self.epochs = dict.fromkeys(range(1, waiting + 1), 1)
        self.changed_s: dict[int, float] = {}
        self.delays_s: list[float] = []
        self.answers = 0

    async def driver(self, number: int) -> None:
        await asyncio.sleep(random.uniform(0.0, 5.0))
        poll_s = random.uniform(0.1, self._poll_s)  # so that they do not all ask again at once
        reader, writer = await asyncio.open_connection(HOST, PORT)
        while True:
            path = f"/v1/jobs/job-{number}/lease?newer_than={self.epochs[number]}&timeout_s={poll_s}"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: api\r\nAuthorization: Bearer secret\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert " 200 " in head, head
            body = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0])))
            self.answers += 1
            poll_s = self._poll_s
            if body["epoch"] > self.epochs[number]:
                self.epochs[number] = body["epoch"]
                self.delays_s.append(time.monotonic() - self.changed_s[number])


async def change(store: Store, load: Load, waiting: int, changes: float) -> None:
    """Commits a change of a random lease `changes` times a second, as the controller would. The commits run in this
    process.
    """
    members = tuple(Member(index) for index in range(SHAPE.members))
    while True:
        await asyncio.sleep(1.0 / changes)
        number = random.randint(1, waiting)
        lease = Lease(f"lease-{number}", f"job-{number}", SHAPE, LeaseState.WAITING, members)
        load.changed_s[number] = time.monotonic()
        epoch = load.epochs[number] + 1
        await asyncio.to_thread(store.commit, Changes(time.time(), leases=(replace(lease, epoch=epoch),)))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(args: argparse.Namespace, store: Store, api: psutil.Process) -> tuple[list[float], Load]:
    load = Load(args.waiting, args.poll)
    tasks = [asyncio.create_task(load.driver(number)) for number in range(1, args.waiting + 1)]
    await asyncio.sleep(8.0)
    if args.changes:
        tasks.append(asyncio.create_task(change(store, load, args.waiting, args.changes)))
    shares = []
    for _ in range(args.repeats):
        load.answers = 0
        began_s, used_s = time.monotonic(), cpu_s(api)
        await asyncio.sleep(args.seconds)
        took_s = time.monotonic() - began_s
        shares.append((cpu_s(api) - used_s) / took_s)
        print(f"  {100 * shares[-1]:.1f} % of a core, {load.answers / took_s:.0f} answers/s")
        if broken := [task for task in tasks if task.done()]:
            broken[0].result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return shares, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--poll", type=float, default=110.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--changes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    random.seed(args.seed)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        store = fill(Path(folder), args.waiting)
        child = subprocess.Popen([sys.executable, __file__, "--serve", folder], env=os.environ)
        try:
            time.sleep(5.0)
            print(f"{args.waiting} drivers wait, {args.poll:g} s a poll; {args.changes:g} changes a second")
            shares, load = asyncio.run(measure(args, store, psutil.Process(child.pid)))
        finally:
            child.terminate()
            child.wait(20)
            store.close()
    print(f"{100 * statistics.median(shares):.1f} % of a core ({100 * min(shares):.1f} to {100 * max(shares):.1f})")
    if load.delays_s:
        delays = sorted(load.delays_s)
        print(f"a change is heard after {delays[len(delays) // 2] * 1e3:.0f} ms (worst {delays[-1] * 1e3:.0f} ms)")


if __name__ == "__main__":
    main()
