"""The elastic gang on real raylets: what the processes of tests/actors/trainer cannot show."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from tests.actors.trainer.gang_processes import assert_undisturbed, lines, node_of
from tests.cluster_fixture import kill_raylet

import raytide as rt
from raytide.actors.gang.packages import content_key
from raytide.autoscaler.providers.local.spot import give_notice, set_stockouts
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.bootstrap.wiring import local_provider
from raytide.core.io.private_folder import private_folder
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.ledger.reconcile import reconcile

pytestmark = pytest.mark.cluster

SPOT = {"ray.io/market-type": "spot"}


@pytest.mark.soak  # tests/actors/trainer/elastic/test_elastic.py has it in processes of this machine
def test_four_members_become_two_by_a_dead_raylet_and_a_notice_and_four_again(
    live: LocalCluster, tide: rt.Client, train_spec: Callable[..., TrainSpec], eventually: Callable[..., None]
) -> None:
    """No replacement can be bought until two are left; they then stand still until the new workers are there.

    The steps that went with the raylet are waste, lost to its node.
    """
    gang = GangSpec(shapes=(Shape(members=4, min_members=2, resources={"CPU": 1}, labels=SPOT),))
    every = {"checkpoint_every": 50, "snapshot_every": 50}
    spec = train_spec(gang=gang, record_samples=True, export=False, collective_timeout_s=100.0, **every)
    run = tide.train(spec)

    def formed() -> list[dict[str, list[str]]]:
        return [event for event in lines(spec, "events.jsonl") if event["event"] == "formed"]

    def ready() -> int:
        return sum(event["event"] == "ready" for event in lines(spec, "events.jsonl"))

    eventually(lambda: formed() and formed()[-1]["world"] == 4 and len(lines(spec, "metrics.jsonl")) > 2)
    nodes = [node_of(host) for host in formed()[-1]["hosts"]]
    pids = dict(zip(nodes, formed()[-1]["pids"], strict=True))
    set_stockouts(live.run_dir, [("cpu1.spot", "*")])
    try:
        kill_raylet(live, nodes[1])
        eventually(lambda: formed()[-1]["world"] == 3)  # a notice before that would save what is meant to be lost
        give_notice(live.run_dir, nodes[3], time.time() + 20.0)
        eventually(lambda: formed()[-1]["world"] == 2)
        kept = [int(pids[nodes[0]]), int(pids[nodes[2]])]
        for pid in kept:
            os.kill(pid, signal.SIGSTOP)
    finally:
        set_stockouts(live.run_dir, ())
    eventually(lambda: ready() == 6)
    for pid in kept:
        os.kill(pid, signal.SIGCONT)
    run.wait(timeout_s=360.0)

    worlds = [event["world"] for event in formed()]
    assert worlds[-1] == 4 and 2 in worlds[worlds.index(4) :], worlds
    assert formed()[-1]["pids"][0] == kept[0] and formed()[-1]["pids"][2] == kept[1], "the same two processes"
    assert int(run.refresh().progress["step"]) == spec.steps
    assert_undisturbed(spec)
    store = Store.open(live.state_url)
    try:
        assert {line.cause for line in store.books.losses() if line.subject == run.id} == {nodes[1]}
        eventually(lambda: reconcile(local_provider(live).machines(), store.books.entries()) == ())
    finally:
        store.close()


def test_ranks_run_with_the_packages_that_a_training_names_or_it_ends_with_their_names(
    tide: rt.Client, train_spec: Callable[..., TrainSpec], eventually: Callable[..., None]
) -> None:
    """`packaging` is there already, below the environment, so that nothing is fetched."""
    spec = train_spec(steps=100_000, gang=GangSpec(shapes=(Shape(members=1, resources={"CPU": 1}),)))
    run = tide.train(spec, pip=["packaging"])

    def formed() -> list[dict[str, list[int]]]:
        return [event for event in lines(spec, "events.jsonl") if event["event"] == "formed"]

    eventually(lambda: run.refresh().state == "failed" or len(lines(spec, "metrics.jsonl")) > 2)
    assert formed(), run.view.job.reason
    kept = private_folder("environments") / f"{content_key(['packaging'])}.lock"
    assert str(kept) in {file.path for file in psutil.Process(formed()[-1]["pids"][0]).open_files()}
    run.stop()
    nowhere = "tidelib @ https://127.0.0.1:9/tidelib-1.0-cp27-cp27m-win32.whl"  # pip refuses the name, and asks nobody
    failed = tide.train(spec.model_copy(update={"out": f"{spec.out}-2"}), pip=[nowhere])
    eventually(lambda: failed.refresh().view.job.is_final)
    assert f"the packages {nowhere} cannot be installed on" in failed.view.job.reason
    eventually(lambda: run.refresh().state == "stopped")
