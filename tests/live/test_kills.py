"""Whoever is killed, at whatever moment: nothing is launched twice, lost, leaked or booked twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.autoscaler.providers.local.spot import reclaim
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.bootstrap.wiring import local_provider
from raytide.core.objects.job import JobState
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.ledger.reconcile import reconcile

pytestmark = pytest.mark.cluster

KILLS = 10


def kill(live: LocalCluster, what: str) -> None:
    process = live.process(what)
    assert process is not None
    process.send(signal.SIGKILL)


@pytest.mark.soak
def test_the_controller_killed_ten_times_while_a_gang_trains_and_loses_a_node(
    live: LocalCluster,
    tide: rt.Client,
    train_spec: Callable[..., TrainSpec],
    eventually: Callable[..., None],
    tmp_path: Path,
) -> None:
    run = tide.train(train_spec(steps=150, name="killed"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "once.py").write_text("import sys; print('ran', file=open(sys.argv[1], 'a'))")
    small: list[rt.Run] = []
    moments = random.Random(0)
    for number in range(KILLS):
        if number % 3 == 0:
            small.append(
                tide.run(tmp_path / "work" / "once.py", str(tmp_path / f"{number}"), working_dir=tmp_path / "work")
            )
        time.sleep(moments.uniform(0.2, 3.0))
        kill(live, "controller")
        if number == KILLS // 2:
            eventually(lambda: (lease := run.refresh().view.lease) is not None and bool(lease.usable))
            lease = run.view.lease
            assert lease is not None
            reclaim(live.run_dir, lease.usable[-1].node_id)
            kill(live, "controller")
    run.wait(timeout_s=180.0)

    assert int(run.progress["step"]) == 150
    assert [job.id for job in tide.jobs() if job.view.job.spec.name == "killed"] == [run.id]
    assert [each.wait(timeout_s=360.0).state for each in small] == [JobState.SUCCEEDED] * 4
    assert [(tmp_path / f"{number}").read_text() for number in range(0, KILLS, 3)] == ["ran\n"] * 4, "once each"
    eventually(lambda: not tide.status().nodes, within_s=120.0)
    machines = local_provider(live).machines()
    store = Store.open(live.state_url)
    try:
        nodes = store.nodes(limit=10_000)
        assert sorted(machine.node_id for machine in machines) == sorted(
            n.id for n in nodes if n.started_at_s is not None
        )
        assert reconcile(machines, store.books.entries()) == ()
    finally:
        store.close()
    assert all(machine.ended_at_s is not None for machine in machines)


def test_a_killed_supervisor_leaves_its_children_and_the_next_up_adopts_them(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    before = {what: live.process(what) for what in ("controller", "api")}
    kill(live, "supervisor")
    eventually(lambda: not live.is_alive("supervisor"))
    assert tide.status().controller_age_s is not None
    local.up(name=live.name)
    assert {what: live.process(what) for what in ("controller", "api")} == before


def test_a_killed_api_is_back_and_what_it_had_accepted_is_there(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    with tide.gang(name="survivor") as gang:
        before = live.process("api")
        kill(live, "api")
        eventually(lambda: live.process("api") not in (None, before) and _answers(tide), within_s=60.0)
        assert tide.job(gang.job_id).state is JobState.RUNNING
        assert len(gang.members) == 1
    assert tide.job(gang.job_id).refresh().state in (JobState.RUNNING, JobState.SUCCEEDED)


def _answers(tide: rt.Client) -> bool:
    try:
        tide.status()
    except rt.RaytideError:
        return False
    return True
