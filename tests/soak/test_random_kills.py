"""Whoever is killed, at whatever moment, together with whatever else: nothing is lost, leaked, doubled or misbooked.

SOAK_SECONDS and SOAK_SEED set the length of the storm and its seed, which is printed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.soak import checks, work
from tests.soak.storm import Storm
from tests.soak.users import Clients

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import MARK, LocalCluster
from raytide.control.client import ApiClient
from raytide.core.errors import ClusterError
from raytide.core.io.process import marked
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import EndpointState
from raytide.core.state import Store

pytestmark = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("SOAK_SECONDS") or 360)
SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10_000))
CONTROL_DIES_FOR = 0.65
"""The part of the storm in which controller and API die; later they live on, so that growth can be seen."""
CALM_S = 300.0


def test_a_storm_loses_leaks_and_doubles_nothing(
    stormy: LocalCluster, config_path: Path, corpus: work.Corpus, say: Callable[[str], None]
) -> None:
    say(f"\nstorm of {SECONDS:g} s, seed {SEED} (SOAK_SECONDS, SOAK_SEED)")
    tide = rt.Client(ApiClient.from_run_dir(stormy.run_dir))
    endpoint = tide.serve(work.endpoint(corpus))
    endpoint.wait(timeout_s=120.0)
    storm = Storm(stormy, config_path, corpus, random.Random(SEED), tide.client)
    clients = Clients(endpoint.base_url, endpoint.name, SEED)
    meter = checks.Meter(stormy)
    try:
        storm.blow(SECONDS * CONTROL_DIES_FOR)
        storm.spares_control = True
        storm.blow(SECONDS * (1 - CONTROL_DIES_FOR))
    finally:
        storm.calm()

    say("calm")
    calm_since_s = time.monotonic()
    eventually(lambda: all(run.view.job.is_final for run in tide.jobs(limit=1000)), "the jobs to end")
    for holder in storm.holders:
        holder.join(30.0)
    assert [(h.job_id, h.error) for h in storm.holders if h.error and h.job_id not in storm.stopped] == []
    eventually(lambda: endpoint.refresh().status.ready_replicas > 0, "a replica to be ready")
    assert clients.close(timeout_s=60.0) == 0
    assert clients.ask() == "answered"
    endpoint.delete()
    eventually(lambda: endpoint.refresh().status.endpoint.state is EndpointState.DELETED, "the endpoint to be deleted")
    eventually(lambda: not tide.status().nodes, "the nodes to go")
    meter.close()
    calm_s = time.monotonic() - calm_since_s

    store = Store.open(stormy.state_url)
    try:
        checks.jobs_are_over_as_they_should(storm, store)
        checks.nothing_was_started_twice(stormy, store)
        checks.machines_are_the_records(stormy, store)
        billed = checks.the_ledger_is_the_bill(stormy, store)
        nodes = len(store.nodes(limit=10_000))
    finally:
        store.close()
    assert clients.ended["cut short"] == 0, clients.ended
    assert sum(clients.ended.values()) == clients.sent
    tide.close()

    closed = local.down(stormy.name)
    assert closed is not None
    assert closed.cost.billed_micro_usd == closed.cost.booked_ended_micro_usd == billed
    assert marked(MARK, stormy.cluster_id) == []
    assert not stormy.temp_dir.exists()
    nobody_complained(stormy)
    checks.nobody_grew(meter)

    say(f"deeds: {listed(storm.done)}")
    say(f"requests: {listed(clients.ended)}")
    for what in ("controller", "api"):
        young, old = meter.oldest(what)
        say(
            f"{what}: {young.mb:.0f} MB and {young.fds} files at {young.age_s:.0f} s, "
            f"{old.mb:.0f} MB and {old.fds} files at {old.age_s:.0f} s"
        )
    say(f"{len(storm.accepted)} jobs, {nodes} nodes, {format_usd(billed)}; calm after {calm_s:.0f} s")


def nobody_complained(cluster: LocalCluster) -> None:
    """The controller and the API raised nothing that they did not expect."""
    for what in ("controller", "api", "supervisor"):
        text = cluster.log(what).read_text(errors="replace")
        assert "Traceback" not in text, (what, text[text.index("Traceback") :][:3000])


def eventually(what: Callable[[], object], waits_for: str) -> None:
    deadline = time.monotonic() + CALM_S
    while True:
        try:
            if what():
                return
        except ClusterError:
            pass  # the API may still be starting
        assert time.monotonic() < deadline, f"waited {CALM_S:g} s for {waits_for}"
        time.sleep(0.5)


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in sorted(counts.items()))
