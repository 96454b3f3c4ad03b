"""The real demo, whose controller is killed ten times while it trains: nothing is lost, leaked, doubled or misbooked.

SOAK_SEED sets the moments; it is printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raytide as rt
from raytide.cli.demo import NAME
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster, load
from raytide.control.bootstrap.wiring import local_provider
from raytide.control.client import ApiClient
from raytide.core.errors import RaytideError
from raytide.core.io.process import Process, marked
from raytide.core.objects.job import Job, JobKind, JobState
from raytide.core.state import Store
from raytide.ledger.reconcile import bill, reconcile

pytestmark = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(0)]

SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
KILLS = 10
LONGEST_LIFE_S = 4.0
"""The longest life of a controller: some die while they import, some in the middle of a tick."""
DEMO_S = 900.0
LONGER = """
from raytide.cli.demo import specs
train = specs.train
specs.train = lambda out: train(out).model_copy(update={"steps": 400})
from raytide.cli import main
main()
"""
"""The demo as it is, but for a training that is long enough for ten kills: a controller is back later each time."""
STARTED = re.compile(r"Registering new node\. node_id=\S+ node_name=(node-\d+) ")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home" / "clusters" / NAME
    local.down(NAME)


def test_the_demo_does_all_that_it_promises_while_its_controller_is_killed_ten_times(
    run_dir: Path, tmp_path: Path, say: Callable[[str], None]
) -> None:
    say(f"\n{KILLS} kills, seed {SEED} (SOAK_SEED)")
    command = [sys.executable, "-c", LONGER, "demo", "--json", "--out", str(tmp_path / "out")]
    log, answer = (tmp_path / "demo.log").open("w"), (tmp_path / "demo.json").open("w")
    with log, answer, subprocess.Popen(command, stdout=answer, stderr=log) as demo:
        try:
            killed = _kill_while_it_trains(run_dir, demo, random.Random(SEED))
            say(f"killed {len(killed)} controllers; the run was at steps {', '.join(map(str, killed.values()))}")
            code = demo.wait(timeout=DEMO_S)
        finally:
            demo.terminate()
    assert code == 0, (tmp_path / "demo.log").read_text()[-3000:]
    assert json.loads((tmp_path / "demo.json").read_text())["problems"] == []
    assert len(killed) == KILLS, "the training was over before its time"

    ended = load(run_dir)
    assert ended is not None
    assert marked(MARK, ended.cluster_id) == []
    store = Store.open(ended.state_url)
    try:
        _no_job_was_lost(store)
        _no_node_leaked_or_was_launched_twice(ended, store)
        _entries_are_the_bill(ended, store)
    finally:
        store.close()


def _kill_while_it_trains(run_dir: Path, demo: subprocess.Popen[bytes], moments: random.Random) -> dict[int, int]:
    """The step at which each controller was killed, by its pid. The first falls once steps are being done."""
    killed: dict[int, int] = {}
    while len(killed) < KILLS and demo.poll() is None:
        time.sleep(0.05)
        job = _training(run_dir)
        if job is not None and job.is_final:
            break
        controller = Process.read(run_dir / "pids" / "controller.json")
        if (
            job is None
            or not job.progress.get("step")
            or controller is None
            or controller.pid in killed
            or not controller.alive
        ):
            continue
        time.sleep(moments.uniform(0.0, LONGEST_LIFE_S))
        controller.send(9)
        killed[controller.pid] = int(job.progress["step"])
    return killed


def _training(run_dir: Path) -> Job | None:
    """The training once it was asked for; None while nobody can say."""
    try:
        jobs = rt.Client(ApiClient.from_run_dir(run_dir)).jobs()
    except RaytideError:
        return None
    return next((run.view.job for run in jobs if run.view.job.spec.kind is JobKind.TRAIN), None)


def _no_job_was_lost(store: Store) -> None:
    jobs = store.jobs(limit=1000)
    assert sorted((job.spec.kind, job.state) for job in jobs) == [
        (JobKind.DATA, JobState.SUCCEEDED),
        (JobKind.TRAIN, JobState.SUCCEEDED),
    ]
    for job in jobs:
        ends = [event for event in store.events(job.id, limit=1000) if event.to_state == JobState.SUCCEEDED]
        assert len(ends) == 1, job.id
    (training,) = (job for job in jobs if job.spec.kind is JobKind.TRAIN)
    assert training.progress["step"] == training.progress["steps"]


def _no_node_leaked_or_was_launched_twice(ended: LocalCluster, store: Store) -> None:
    machines = local_provider(ended).machines()
    assert [machine.node_id for machine in machines if machine.ended_at_s is None] == []
    bought = [node.id for node in store.nodes(limit=10_000) if node.started_at_s is not None]
    assert sorted(bought) == sorted(machine.node_id for machine in machines)
    joined = Counter(STARTED.findall((ended.logs_dir / "ray" / "gcs_server.out").read_text()))
    assert set(joined) <= set(bought)
    assert [node_id for node_id, times in joined.items() if times > 1] == []
    assert len(joined) >= 4, "the gang of two, a replacement and a replica's node"


def _entries_are_the_bill(ended: LocalCluster, store: Store) -> None:
    machines, entries = local_provider(ended).machines(), store.books.entries()
    assert reconcile(machines, entries) == ()
    assert sum(entry.amount_micro_usd for entry in entries) == sum(bill(machine) for machine in machines) > 0
    booked = Counter((e.node_id, e.from_us, e.kind, e.subject, e.is_reversal, e.cause) for e in entries)
    assert [entry for entry, times in booked.items() if times > 1] == []
