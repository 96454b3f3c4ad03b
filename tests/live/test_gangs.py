"""Gangs on real raylets: from nothing to running, notices, deaths, and drivers that came through `ray job submit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raytide as rt
from raytide.autoscaler.nodes.lifecycle import ENDED_BY_PROVIDER, TAKEN_BACK
from raytide.autoscaler.providers.local.spot import give_notice, set_stockouts
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.gang import GangSpec, LeaseState, MemberState, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.objects.node import NodeState
from raytide.core.state import Store

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
SPOT = {"ray.io/market-type": "spot"}


def test_a_notice_lets_a_member_leave_and_raytide_ends_the_node_at_its_deadline(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    spec = JobSpec(kind=JobKind.GANG, name="noticed", gang=GangSpec(shapes=(Shape(resources={"CPU": 1}, labels=SPOT),)))
    job = tide.client.submit(spec).job.id
    eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    (member,) = tide.client.lease(job).members

    deadline_s = time.time() + 10.0
    give_notice(live.run_dir, member.node_id, deadline_s)

    def is_leaving() -> bool:
        now = tide.client.lease(job).members[0]
        return (now.state, now.leaves_at_s) == (MemberState.LEAVING, deadline_s)

    eventually(is_leaving, every_s=0.05)
    eventually(lambda: tide.client.lease(job).members[0].incarnation > member.incarnation)
    assert time.time() >= deadline_s
    assert member.node_id not in {node.id for node in tide.status().nodes if node.state is NodeState.READY}
    eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    tide.client.release(job)


def test_a_gang_that_waits_says_for_what(tide: rt.Client, eventually: Callable[..., None]) -> None:
    """Four of two CPUs are all that the fleet has; a second gang of them waits, and says behind what."""
    shape = Shape(members=4, resources={"CPU": 2}, labels={"ray.io/market-type": "on-demand"})
    spec = gang("big", shape)
    first, second = (tide.client.submit(spec).job.id for _ in range(2))
    eventually(lambda: tide.job(second).view.waiting is not None and tide.job(first).state is not JobState.QUEUED)

    def says_behind_what() -> bool:
        why = tide.job(second).why()
        return "number 1 in the queue" in why and ("4 x" in why or first in why)

    eventually(says_behind_what)
    for job in (second, first):
        tide.client.stop(job)
    eventually(lambda: tide.job(first).view.job.is_final and tide.job(second).view.job.is_final)


def test_a_gang_of_two_times_eight_gpus_forms_whole_from_no_node_at_all(
    tide: rt.Client, eventually: Callable[..., None]
) -> None:
    eventually(lambda: not any(node.type == "gpu8" for node in tide.status().nodes))
    job = tide.client.submit(gang("gpus", Shape(members=2, resources={"GPU": 8}))).job.id
    usable: list[int] = []

    def is_active() -> bool:
        if tide.job(job).state is JobState.QUEUED:
            return False
        usable.append(len((lease := tide.client.lease(job)).usable))
        return lease.state is LeaseState.ACTIVE

    eventually(is_active)
    assert set(usable) <= {0, 2}, "I3: all of it, or nothing"
    nodes = {node.id: node for node in tide.status().nodes}
    lease = tide.client.lease(job)
    members = lease.members
    assert [nodes[member.node_id].type for member in members] == ["gpu8", "gpu8"]
    assert members[0].node_id != members[1].node_id
    launches = [launch for _, launch in launches_for(lease.id, tide)]
    assert len(launches) >= 2, "two, and two more where a raylet did not start"
    assert {a["cost_micro_usd_h"] for a in launches} == {2_000_000}
    assert all("needs 2 x (8 GPU)" in a["reason"] for a in launches)
    tide.client.release(job)


def test_idle_nodes_go_away_by_themselves_and_every_other_was_drained_or_taken(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    eventually(lambda: not tide.status().nodes, within_s=120.0)

    def is_booked() -> bool:
        report = tide.cost()
        return report.billed_micro_usd == report.booked_ended_micro_usd > 0

    eventually(is_booked)
    store = Store.open(live.state_url)
    try:
        ends = {node.id: node.reason for node in store.nodes(limit=10_000) if node.ready_at_s is not None}
    finally:
        store.close()
    known = ("drained and empty", "its deadline has passed", "idle for", ENDED_BY_PROVIDER, TAKEN_BACK, "its Ray node")
    assert {node_id: why for node_id, why in ends.items() if not any(words in why for words in known)} == {}, "I1"
    assert any("idle for" in why for why in ends.values())


def test_an_exhausted_pool_is_left_for_the_next_one_by_the_next_decisions(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    eventually(lambda: not tide.status().nodes)  # the test above has waited for that
    set_stockouts(live.run_dir, [("cpu1.spot", "*")])
    try:
        job = tide.client.submit(gang("fallback", Shape(members=2, resources={"CPU": 1}))).job.id
        eventually(lambda: tide.job(job).state is not JobState.QUEUED)
        eventually(lambda: tide.client.lease(job).state is LeaseState.ACTIVE)
    finally:
        set_stockouts(live.run_dir, ())
    lease = tide.client.lease(job)
    tide.client.release(job)
    bought = launches_for(lease.id, tide)
    spot, solid = ([item for item in bought if item[1]["node_type"] == name] for name in ("cpu1.spot", "cpu2"))
    assert solid[0][0] - spot[-1][0] <= 2, bought
    refused = solid[0][1]["rejected"][:2]
    assert sorted(item["choice"] for item in refused) == ["cpu1.spot in local-a", "cpu1.spot in local-b"]
    assert all("backs off until" in item["reason"] for item in refused)


def test_two_gangs_of_six_on_eight_gpus_run_one_after_the_other_and_neither_is_ever_half_placed(
    live: LocalCluster, tide: rt.Client, eventually: Callable[..., None]
) -> None:
    holder = tide.client.submit(gang("holder", Shape(resources={"GPU": 8}))).job.id
    eventually(lambda: tide.job(holder).state is JobState.RUNNING)
    set_stockouts(live.run_dir, [("gpu8", "*")])  # these eight are all that there are
    try:
        six = gang("six", Shape(members=6, resources={"GPU": 1}))
        both = [tide.client.submit(six).job.id for _ in range(2)]
        seen: dict[str, list[int]] = {job: [] for job in both}

        def active() -> list[str]:
            for job in both:
                lease = tide.job(job).view.lease
                seen[job].append(0 if lease is None or tide.job(job).view.job.is_final else len(lease.usable))
            return [job for job in both if seen[job][-1] == 6]

        tide.client.release(holder)
        eventually(active, every_s=0.05)
        (first,) = active()
        eventually(lambda: active() and tide.job(other(both, first)).view.waiting is not None)
        assert seen[other(both, first)][-1] == 0
        tide.client.release(first)
        eventually(lambda: active() == [other(both, first)], every_s=0.05)
        tide.client.release(other(both, first))
    finally:
        set_stockouts(live.run_dir, ())
    assert {held for counts in seen.values() for held in counts} == {0, 6}, "I3: all of it, or nothing"


def other(both: list[str], one: str) -> str:
    return next(job for job in both if job != one)


def gang(name: str, shape: Shape) -> JobSpec:
    """Nobody asks for its lease but now and then these tests, which stop it."""
    return JobSpec(kind=JobKind.GANG, name=name, gang=GangSpec(shapes=(shape,)), heartbeat_timeout_s=600)


def launches_for(lease_id: str, tide: rt.Client) -> list[tuple[int, dict[str, Any]]]:
    """With the number of the decision that made each."""
    return [
        (at, action)
        for at, plan in enumerate(tide.client.plans(limit=200))
        for action in plan["actions"]
        if action["action"] == "launch" and action["subject"] == lease_id
    ]
