"""`raytide why` names the first unmet constraint and the nearest change that would meet it, for twelve waiting
gangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.queue.cluster import H100, Cluster, gpus, job, team, told

from raytide.control.views import Waiting
from raytide.core.objects.job import JobState
from raytide.core.objects.node import CapacityType, NodeType
from raytide.core.objects.snapshot import Pool, Snapshot
from raytide.queue.admission.scheduler import GRACE_S
from raytide.queue.admission.start_forecast import forecast_starts

H = {"ray.io/accelerator-type": "H100"}


def why(job_id: str, snapshot: Snapshot) -> Waiting:
    found = told(job_id, snapshot)
    assert found is not None
    return found


def test_1_no_node_is_large_enough() -> None:
    c = Cluster()
    found = why(c.submit(gpus(16, **H)), c.snapshot)
    assert found.constraint == "impossible"
    assert found.reason == "no node type fits it: needs 16 x H100 on one node; the largest is 8 x H100 (h100x8)."
    assert found.remedy == "Ask for 8, or add a node type."


def test_2_the_whole_fleet_is_too_small() -> None:
    c = Cluster()
    found = why(c.submit(gpus(8, members=3)), c.snapshot)
    assert found.constraint == "impossible"
    assert "the whole fleet holds 2 (2 x h100x8)" in found.reason
    assert found.remedy == "Ask for 2, or raise max_nodes."


def test_3_no_node_has_the_label() -> None:
    c = Cluster()
    found = why(c.submit(gpus(1, **{"ray.io/accelerator-type": "A100"})), c.snapshot)
    assert found.constraint == "impossible"
    assert "the fleet has H100" in found.reason
    assert found.remedy == "Ask for another ray.io/accelerator-type, or add a node type."


def test_4_no_node_has_all_labels_at_once() -> None:
    spot = NodeType(name="l4", resources={"GPU": 1.0}, market=CapacityType.SPOT, price_micro_usd_h=1, max_nodes=4)
    waits = job(1, gpus(1, **H, **{"ray.io/market-type": "spot"}))
    found = why(waits.id, Snapshot(0.0, (H100, spot), jobs=(waits,)))
    assert found.constraint == "impossible"
    assert "none has all of them" in found.reason
    assert found.remedy == "Drop a label, or add a node type."


def test_5_the_pools_are_out_of_stock() -> None:
    waits = job(1, gpus(8))
    pool = Pool("h100x8", "local", 3, 4000.0, "no capacity")
    found = why(waits.id, Snapshot(1000.0, (H100,), jobs=(waits,), pools=(pool,)))
    assert found.constraint == "stock"
    assert "h100x8 in local; the next attempt is at 01:06:40 UTC" in found.reason
    assert "add a zone or a node type" in found.remedy


def test_6_others_hold_the_room() -> None:
    c = Cluster()
    c.submit(gpus(8, members=2), preemptible=False)
    c.step()
    found = why(c.submit(gpus(8)), c.snapshot)
    assert found.constraint == "capacity"
    assert "needs 1 x (8 GPU), 0 fit now; h100x8 is held by job-1" in found.reason
    assert "raise max_nodes of h100x8" in found.remedy


def test_7_it_would_take_the_room_of_one_before_it() -> None:
    c = Cluster(nodes=1)
    c.submit(gpus(1, members=4), kind="gang")
    c.step()
    c.submit(gpus(8), kind="gang")
    found = why(c.submit(gpus(1), kind="gang"), c.snapshot)
    assert found.constraint == "behind"
    assert "would take room that job-2 waits for" in found.reason
    assert "A preemptible job may start before." in found.remedy


def test_8_the_team_has_used_its_quota_and_others_theirs() -> None:
    c = Cluster(teams=(team("blue", quota={"H100": 4}), team("red", quota={"H100": 12})))
    c.submit(gpus(4, members=3, **H), team="red", preemptible=False)
    c.submit(gpus(4, **H), preemptible=False)
    c.step()
    found = why(c.submit(gpus(4, **H)), c.snapshot)
    assert found.constraint == "quota"
    assert found.reason == (
        "team blue has 4 of its 4 H100 in use and it needs 4; 0 more are available, borrowing included."
    )
    assert "raise the quota of blue" in found.remedy


def test_9_the_team_may_not_borrow_so_much() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 4}, borrow={"GPU": 2}),))
    found = why(c.submit(gpus(8)), c.snapshot)
    assert found.constraint == "quota"
    assert "it needs 8; 6 more are available" in found.reason


def test_10_what_cannot_be_preempted_may_not_borrow() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 4}),))
    found = why(c.submit(gpus(8), kind="gang"), c.snapshot)
    assert found.constraint == "quota"
    assert "a job that cannot be preempted may not borrow" in found.reason
    assert found.remedy == "Submit it as preemptible, or wait for the team's own quota."
    assert told(c.submit(gpus(8), kind="gang", preemptible=True), c.snapshot) is None


def test_11_the_budget_of_the_team_is_spent_or_reserved() -> None:
    c = Cluster(teams=(team("blue", spent_usd=30.0, budget={"hard_usd": 100}),))
    found = why(c.submit(gpus(8)), c.snapshot)  # an hour of a whole node is 80 dollars
    assert found.constraint == "budget"
    assert found.reason == "team blue has spent or reserved $30.00 of $100 this month; an hour of this job is $80.00."
    assert "raytide budget set blue" in found.remedy
    soft = Cluster(teams=(team("blue", spent_usd=30.0, budget={"soft_usd": 20}),))
    assert why(soft.submit(gpus(1)), soft.snapshot).constraint == "impossible"
    assert "market-type=spot" in why(soft.submit(gpus(1)), soft.snapshot).reason


def test_12_the_budget_of_the_job_is_spent() -> None:
    c = Cluster()
    waits = c.submit(gpus(1), budget_usd=5)
    c.spent = {waits: 5_000_000}
    found = why(waits, c.snapshot)
    assert found.constraint == "budget"
    assert found.reason == "job-1 has cost $5.00 of its budget of $5."
    assert found.remedy == "Give it more: `raytide budget set job-1 USD`."


def test_others_are_preempted_for_it_until_when() -> None:
    c = Cluster(nodes=1)
    c.submit(gpus(8), priority="low")
    c.step()
    high = c.submit(gpus(8), priority="high")
    c.step()
    found = why(high, c.snapshot)
    assert (c.jobs[high].state, found.constraint, found.wait_s) == (JobState.ADMITTED, "starting", GRACE_S)
    assert found.reason == "job-1 yields to it and is usable until 00:17:10 UTC."


@pytest.mark.parametrize(("step", "wait_s"), [(25, 300.0), (50, 100.0)])
def test_the_wait_is_what_those_that_run_have_left(step: int, wait_s: float) -> None:
    c = Cluster(nodes=1)
    first = c.submit(gpus(8), config={"steps": 100}, preemptible=False)
    c.step()
    c.step(100.0)
    c.jobs[first] = replace(c.jobs[first], progress={"step": step})
    assert c.jobs[first].remaining_s(c.now_s) == wait_s
    second, third = c.submit(gpus(8)), c.submit(gpus(8))
    assert why(second, c.snapshot).wait_s == wait_s
    assert why(third, c.snapshot).wait_s is None, "nobody knows how long the second runs"
    assert forecast_starts(c.snapshot) == {second: wait_s}


def test_a_job_beyond_its_teams_members_is_not_forecast_before_others_end() -> None:
    c = Cluster()
    first = c.submit(gpus(1), estimate_h=1.0)
    c.step()
    second, other = c.submit(gpus(1), estimate_h=1.0), c.submit(gpus(1), team="red", estimate_h=1.0)
    capped = replace(c.snapshot, team_members=1)
    left_s = c.jobs[first].remaining_s(c.now_s)
    assert forecast_starts(capped) == {other: 0.0, second: left_s}
