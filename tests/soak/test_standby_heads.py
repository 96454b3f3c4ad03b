"""Two heads, with PostgreSQL and Redis for real: the one that leads is killed ten times at random moments while jobs,
a training and an endpoint run on own machines. No job is lost or run to its end twice, streams straight from replicas
are unbroken, and the books are the bill. SOAK_SEED sets the moments; it is printed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests import runbook
from tests.heads_fixture import NAME, Heads, heads, wait_until
from tests.server_fixtures import postgres_server, redis_port
from tests.soak.work import PATIENCE, Corpus

import raytide as rt
from raytide.actors.trainer.runners.local import train_local
from raytide.autoscaler.providers.purchases import Purchases
from raytide.control.bootstrap.head.ray_start import HEAD_MARK
from raytide.core.errors import RaytideError
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec
from raytide.ledger.reconcile import bill, reconcile

__all__ = ["postgres_server", "redis_port"]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
KILLS = int(os.environ.get("SOAK_KILLS") or 10)
LONG_S = 300.0
OTHER = {"a": "b", "b": "a"}
GANG = GangSpec(shapes=(Shape(members=1, resources={"CPU": 1}),))
WORK = "import os, time\ntime.sleep(3)\nprint('done', os.environ['RAYTIDE_JOB'])\n"

Say = Callable[[str], None]


def served_model(corpus: Corpus, folder: Path) -> ServeSpec:
    shape = ModelSpec(dim=64, layers=2, heads=4, max_seq_len=1024)
    few = {"steps": 20, "global_batch": 4, "micro_batch": 4, "seq_len": 64}
    spec = TrainSpec.parse({"dataset": corpus.dataset, "out": str(folder / "m"), **few}, where="test")
    result = train_local(spec.model_copy(update={"model": shape}))
    return ServeSpec(
        name="tiny",
        model=str(result.model_dir),
        replicas=Replicas(min=1, max=1),
        resources={"CPU": 1},
        engine={"deterministic": True},
    )


def training(corpus: Corpus, folder: Path) -> JobSpec:
    spec = TrainSpec(
        dataset=corpus.dataset,
        out=str(folder / "run"),
        model=ModelSpec(dim=32, layers=1, heads=2, max_seq_len=128),
        steps=200 * KILLS,
        global_batch=2,
        seq_len=64,
        checkpoint_every=20,
        gang=GANG,
    )
    config = spec.model_dump(mode="json")
    return JobSpec(kind=JobKind.TRAIN, name="train", gang=GANG, config=config, max_restarts=PATIENCE)


class Users:
    """Submits a job every few seconds, and repeats a submission that had no answer with its key."""

    def __init__(self, cluster: Heads, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.asked: list[str] = []

    def ask(self) -> None:
        key = f"job-of-soak-{len(self.asked)}"
        config = ScriptSpec(command=(sys.executable, "-c", WORK)).model_dump(mode="json")
        spec = JobSpec(kind=JobKind.SCRIPT, name=key, gang=GANG, config=config, max_restarts=PATIENCE)
        deadline = time.monotonic() + LONG_S
        while True:
            try:
                self.asked.append(self._cluster.client().submit(spec, key=key).job.id)
                return
            except RaytideError:
                assert time.monotonic() < deadline, self._cluster.logs()
                time.sleep(0.5)


def test_ten_heads_are_killed_under_load_and_nothing_is_lost_doubled_or_misbooked(
    tmp_path: Path, postgres_server: str, redis_port: int, corpus: Corpus, say: Say, eventually: Callable[..., None]
) -> None:
    say(f"\n{KILLS} kills, seed {SEED} (SOAK_SEED)")
    chance = random.Random(SEED)
    with heads(tmp_path, postgres_server, redis_port, 1, 2, 3) as cluster, ExitStack() as stack:
        for name in ("a", "b"):
            cluster.start(name)
        wait_until(lambda: cluster.leader() != "", LONG_S, cluster.logs)
        with rt.Client(cluster.client()) as tide:
            tide.serve(served_model(corpus, tmp_path)).wait(replicas=1, timeout_s=LONG_S)
        run = cluster.client().submit(training(corpus, tmp_path)).job
        streams = stack.enter_context(start_streams(cluster))
        stack.callback(streams.kill)
        assert streams.stdout is not None and streams.stdout.readline().endswith(" whole\n")
        users, took_s = Users(cluster, tmp_path), []
        for number in range(KILLS):
            users.ask()
            eventually(lambda: cluster.standbys() != (), within_s=LONG_S)
            time.sleep(chance.uniform(0.0, 10.0))
            users.ask()
            eventually(lambda: cluster.leader() != "", within_s=LONG_S)  # a busy machine may have handed over by itself
            leader = cluster.leader()
            heir = OTHER[leader]
            cluster.kill(leader)
            took_s.append(wait_until(lambda: cluster.leader() == heir, LONG_S, cluster.logs))  # noqa: B023
            say(f"kill {number + 1}: {heir} answers after {took_s[-1]:.1f} s")
            cluster.start(leader)
        lines = end_streams(streams)
        say(f"{len(lines)} streams, the longest {max(float(line.split()[0]) for line in lines):.1f} s")
        assert [line for line in lines if not line.endswith(" whole")] == []
        assert max(float(line.split()[0]) for line in lines) > 0

        client = cluster.client()

        def ended() -> bool:
            try:
                return all(client.job(job_id).job.is_final for job_id in (*users.asked, run.id))
            except RaytideError:
                return False

        eventually(ended, within_s=1200.0)
        check_records(cluster, [*users.asked, run.id])
        follow_runbook(cluster, eventually)
        leader = cluster.leader()
        down(cluster, leader)
        eventually(lambda: cluster.processes(OTHER[leader]) == [], within_s=60.0)
        check_books(cluster)


def follow_runbook(cluster: Heads, eventually: Callable[..., None]) -> None:
    """Loses the head once more, and types what the runbook says on the machine that took over and on the lost one."""
    leader = cluster.leader()
    heir = OTHER[leader]
    cluster.kill(leader)
    wait_until(lambda: cluster.leader() == heir, LONG_S, cluster.logs)
    variables = {"CLUSTER": NAME, "CONFIG": str(cluster.file), "RAYTIDE_HOME": str(cluster.folder / heir)}
    for command in runbook.commands("lost-standby-head.md"):
        if command.startswith("raytide head"):
            there = {HEAD_MARK: str(cluster.run_dir(leader)), "RAYTIDE_HOME": str(cluster.folder / leader)}
            printed = runbook.run(f"{command} --as {leader}", cluster.folder, {**variables, **there})
            assert f"{leader} is a head of cluster {NAME}" in printed
            eventually(lambda: cluster.standbys() == (leader,), within_s=LONG_S)
        else:
            printed = runbook.run(command, cluster.folder, variables)
        if "status" in command:
            assert f"head: {heir}; " in printed


def start_streams(cluster: Heads) -> subprocess.Popen[str]:
    shared = cluster.folder / "shared"
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(shared / "ray_token")}
    gcs_address = cluster.record(cluster.leader()).gcs_address
    command = [sys.executable, "-m", "tests.soak.direct_streams", gcs_address, "tiny"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, **access, "PYTHONPATH": f"{root}{os.pathsep}{root / 'platform'}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=root)


def end_streams(streams: subprocess.Popen[str]) -> list[str]:
    out, err = streams.communicate("", timeout=LONG_S)
    assert streams.returncode == 0, err[-3000:]
    return out.splitlines()


def check_records(cluster: Heads, asked: list[str]) -> None:
    with cluster.store() as store:
        jobs = {job.id: job for job in store.jobs(limit=10_000)}
        assert sorted(jobs) == sorted(asked), "each was accepted once"
        assert {job.id: (job.state, job.reason) for job in jobs.values() if job.state is not JobState.SUCCEEDED} == {}
        for job_id in jobs:
            ends = [each for each in store.events(job_id, limit=10_000) if each.to_state == JobState.SUCCEEDED]
            assert len(ends) == 1, job_id


def down(cluster: Heads, leader: str) -> None:
    environment = {**os.environ, "RAYTIDE_HOME": str(cluster.folder / leader)}
    command = [sys.executable, "-m", "raytide.cli", "down", "--name", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout + done.stderr


def check_books(cluster: Heads) -> None:
    machines = Purchases(cluster.folder / "shared" / "hosts" / "purchases").machines()
    assert [machine.node_id for machine in machines if machine.ended_at_s is None] == []
    with cluster.store() as store:
        entries = store.books.entries()
        assert reconcile(machines, entries) == ()
        assert sum(entry.amount_micro_usd for entry in entries) == sum(bill(machine) for machine in machines) > 0
        booked = Counter((e.node_id, e.from_us, e.kind, e.subject, e.is_reversal, e.cause) for e in entries)
        assert [entry for entry, times in booked.items() if times > 1] == []
