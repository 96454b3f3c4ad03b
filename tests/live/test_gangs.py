"""Gangs on real raylets: from nothing to running, notices, deaths, and drivers that came through `ray job submit`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import raytide as rt
from raytide.autoscaler.providers.local_spot import give_notice
from raytide.control.embedded import LocalCluster
from raytide.core.fleet import NodeState
from raytide.core.gang import GangSpec, LeaseState, MemberState, Shape
from raytide.core.job import JobKind, JobSpec, JobState

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
SPOT = {"ray.io/market-type": "spot"}


def test_a_driver_under_ray_job_submit_gets_its_gang_through_the_queue(live: LocalCluster, tide: rt.Tide) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    command = [*ray, "job", "submit", "--working-dir", "."]
    done = subprocess.run(
        [*command, "--", "python", "gang_job.py"],
        cwd=EXAMPLES,
        env={**os.environ, **live.ray_access},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 squared is 1, computed on node-" in done.stdout
    run = next(run for run in tide.jobs() if run.view.job.spec.name == "squares")
    assert run.state is JobState.SUCCEEDED
    assert run.view.job.spec.kind is JobKind.GANG


def test_a_notice_lets_a_member_leave_and_raytide_ends_the_node_at_its_deadline(
    live: LocalCluster, tide: rt.Tide, eventually: Callable[..., None]
) -> None:
    spec = JobSpec(kind=JobKind.GANG, name="noticed", gang=GangSpec(shapes=(Shape(resources={"CPU": 1}, labels=SPOT),)))
    job = tide.client.submit(spec).job.id
    eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    (member,) = tide.client.lease(job).members

    deadline_s = time.time() + 6.0
    give_notice(live.run_dir, member.node_id, deadline_s)

    eventually(lambda: tide.client.lease(job).members[0].leaves_at_s == deadline_s, within_s=5.0)
    assert tide.client.lease(job).members[0].state is MemberState.LEAVING
    eventually(lambda: tide.client.lease(job).members[0].incarnation > member.incarnation)
    assert time.time() >= deadline_s
    assert member.node_id not in {node.id for node in tide.status().nodes if node.state is NodeState.READY}
    eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    tide.client.release(job)


def test_a_gang_that_waits_says_for_what(tide: rt.Tide, eventually: Callable[..., None]) -> None:
    """Four of two CPUs are all that the fleet has; a second gang of them waits, and says behind what."""
    shape = Shape(members=4, resources={"CPU": 2}, labels={"ray.io/market-type": "on-demand"})
    spec = JobSpec(kind=JobKind.GANG, name="big", gang=GangSpec(shapes=(shape,)), heartbeat_timeout_s=60)
    first, second = (tide.client.submit(spec).job.id for _ in range(2))
    eventually(lambda: tide.job(second).view.waiting is not None and tide.job(first).state is not JobState.QUEUED)
    why = tide.job(second).why()
    assert "number 1 in the queue" in why
    assert "4 x" in why or first in why
    for job in (second, first):
        tide.client.stop(job)
    eventually(lambda: tide.job(first).view.job.is_final and tide.job(second).view.job.is_final)


def test_idle_nodes_go_away_by_themselves(tide: rt.Tide, eventually: Callable[..., None]) -> None:
    eventually(lambda: not tide.status().nodes, within_s=120.0)
    report = tide.cost()
    assert report.billed_micro_usd == report.booked_ended_micro_usd > 0
