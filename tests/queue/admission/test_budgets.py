"""Budgets stop spending in the decision itself: soft ones leave spot and a team's own quota, hard ones nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.queue.cluster import H100, brief, gpus, job, team
from tests.stores import new_store

from raytide.control.reconcile.decide import decide
from raytide.core.money import micro_usd, month_of
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Action, Admit, Drain, Launch, Preempt, Wait
from raytide.core.objects.snapshot import Limits, NodeView, Snapshot
from raytide.core.objects.team import Team
from raytide.core.state import Changes
from raytide.queue.admission.scheduler import GRACE_S, admission_state, schedule

OWNED = NodeType(name="owned", resources={"GPU": 8.0}, price_micro_usd_h=micro_usd(8), max_nodes=4)
SPOT = NodeType(
    name="spot", resources={"GPU": 8.0}, price_micro_usd_h=micro_usd(16), max_nodes=4, market=CapacityType.SPOT
)
"""Dearer, so that nobody takes it of his own will."""
LABEL = "ray.io/market-type"
SOFT = {"budget": {"soft_usd": 50, "hard_usd": 100}}


def snapshot(*jobs: Job, teams: tuple[Team, ...], **more: object) -> Snapshot:
    return replace(Snapshot(1000.0, (OWNED, SPOT), jobs=jobs, teams=teams), **more)  # type: ignore[arg-type]


def running(number: int, **more: object) -> tuple[Job, Lease, NodeView]:
    """On a node of its own."""
    one = job(number, gpus(8), state=JobState.RUNNING, **more)
    node = Node(f"node-{number}", "owned", "local", OWNED.market, OWNED.price_micro_usd_h, NodeState.READY, 0.0,
                started_at_s=0.0, ready_at_s=1.0, ray_node_id=f"ray-{number}")  # fmt: skip
    member = Member(0, MemberState.READY, node.id, node.ray_node_id, placement_group_id="pg")
    lease = Lease(f"lease-{number}", one.id, gpus(8), LeaseState.ACTIVE, (member,))
    return one, lease, NodeView(node, OWNED.resources, {"GPU": 0.0}, OWNED.all_labels("local"))


def with_running(
    *held: tuple[Job, Lease, NodeView], waiting: tuple[Job, ...] = (), teams: tuple[Team, ...]
) -> Snapshot:
    jobs, leases, views = zip(*held, strict=True)
    return snapshot(*jobs, *waiting, teams=teams, leases=leases, nodes=views, next_lease=100, next_node=100)


def bought(s: Snapshot) -> list[str]:
    return [action.node_type for action in decide(s).actions if isinstance(action, Launch)]


def said(s: Snapshot) -> list[tuple[str, str]]:
    """The decision for each job."""
    found: list[tuple[str, str]] = []
    for action in decide(s).actions:
        if isinstance(action, Admit | Preempt):
            found.append((action.job_id, type(action).__name__.lower()))
        elif isinstance(action, Wait) and action.subject.startswith("job-"):
            found.append((action.subject, action.constraint))
    return found


def reason(s: Snapshot) -> str:
    (wait,) = [action for action in decide(s).actions if isinstance(action, Wait)]
    return f"{wait.reason} {wait.remedy}"


def test_below_its_soft_limit_a_team_buys_what_is_cheapest_and_beyond_it_spot_only() -> None:
    for spent, market in ((49.0, "owned"), (51.0, "spot")):
        assert bought(snapshot(job(1, gpus(8)), teams=(team("blue", spent, **SOFT),))) == [market]


def test_beyond_its_soft_limit_a_team_gets_nothing_that_asks_for_on_demand() -> None:
    s = snapshot(job(1, gpus(8, **{LABEL: "on-demand"})), teams=(team("blue", 51.0, **SOFT),))
    assert (said(s), bought(s)) == ([("job-1", "budget")], [])
    assert "team blue is beyond its soft budget and may use spot nodes only" in reason(s)


def test_beyond_its_soft_limit_a_team_keeps_to_its_own_quota() -> None:
    borrower = team("blue", 51.0, quota={"GPU": 8}, **SOFT)
    s = snapshot(job(1, gpus(8)), job(2, gpus(1)), teams=(borrower, team("red", quota={"GPU": 8})))
    assert said(s) == [("job-1", "admit"), ("job-2", "budget")]
    assert said(replace(s, teams=(replace(borrower, spent_micro_usd=0), s.teams[1]))) == [
        ("job-1", "admit"),
        ("job-2", "admit"),
    ]


def test_the_soft_limit_of_a_parent_holds_for_its_teams() -> None:
    tree = (team("org", 51.0, **SOFT), team("blue", parent="org"), team("red"))
    assert bought(snapshot(job(1, gpus(8)), teams=tree)) == ["spot"]
    assert bought(snapshot(job(1, gpus(8), team="red"), teams=tree)) == ["owned"]


def test_a_job_has_a_soft_limit_of_its_own() -> None:
    mine, other = job(1, gpus(8), soft_budget_usd=5), job(2, gpus(8))
    s = snapshot(mine, other, teams=(team("blue"),), spent={"job-1": micro_usd(6)})
    assert sorted(bought(s)) == ["owned", "spot"]
    asks = job(1, gpus(8, **{LABEL: "on-demand"}), soft_budget_usd=5)
    assert "job-1 is beyond its soft budget" in reason(replace(s, jobs=(asks,)))


def test_what_the_budget_of_one_job_keeps_it_from_the_next_one_still_gets() -> None:
    held = running(1, priority="low")
    spot = OWNED.model_copy(update={"market": CapacityType.SPOT})
    waiting = [job(2, gpus(8, **{LABEL: "spot"}), soft_budget_usd=5), job(3, gpus(8, **{LABEL: "spot"}))]
    node = replace(held[2], labels=spot.all_labels("local"))
    teams = (team("blue", quota={"GPU": 0}), team("red", quota={"GPU": 8}))
    s = with_running((*held[:2], node), waiting=tuple(waiting), teams=teams)
    s = replace(s, node_types=(spot.model_copy(update={"max_nodes": 1}),), spent={"job-2": micro_usd(6)})
    assert {("job-2", "quota"), ("job-3", "admit")} < {*said(s)}, "it may borrow"
    dear = OWNED.model_copy(update={"name": "dear", "price_micro_usd_h": micro_usd(100), "max_nodes": 1})
    full, (low, lease, there) = running(1, priority="high", preemptible=False), running(2, priority="low")
    there = replace(there, node=replace(there.node, type="dear"))
    waiting = [job(3, gpus(8), budget_usd=4), job(4, gpus(8))]
    s = with_running(full, (low, lease, there), waiting=tuple(waiting), teams=())
    s = replace(s, node_types=(OWNED.model_copy(update={"max_nodes": 1}), dear))
    assert {("job-3", "budget"), ("job-4", "admit")} < {*said(s)}, "it may sit where it is dear"


def test_a_hard_limit_admits_nothing_and_drains_with_time_for_a_checkpoint() -> None:
    held, fixed = running(1), running(2, preemptible=False)
    s = with_running(held, fixed, waiting=(job(3, gpus(8)),), teams=(team("blue", 99.9, **SOFT),))
    assert said(s) == [("job-1", "preempt"), ("job-3", "budget")]
    actions: tuple[Action, ...] = decide(s).actions
    (preempt,) = [action for action in actions if isinstance(action, Preempt)]
    assert preempt.leaves_at_s == s.at_s + GRACE_S
    assert "the budget of team blue, $100 this month, is spent" in preempt.reason
    assert not [action for action in actions if isinstance(action, Drain | Launch)], "nothing is taken from under it"


def test_a_hard_limit_drains_only_once_little_is_left() -> None:
    """Three minutes of what is burnt, which is $16 an hour."""
    held = (running(1), running(2))
    assert said(with_running(*held, teams=(team("blue", 99.1, **SOFT),))) == []
    assert said(with_running(*held, teams=(team("blue", 99.3, **SOFT),))) == [
        ("job-1", "preempt"),
        ("job-2", "preempt"),
    ]


def test_a_job_beyond_its_own_limit_is_preempted_alone_and_not_admitted_again() -> None:
    held, other = running(1, budget_usd=10), running(2)
    s = with_running(held, other, teams=(team("blue"),))
    assert said(replace(s, spent={"job-1": micro_usd(9)})) == []
    assert said(replace(s, spent={"job-1": micro_usd(9.7)})) == [("job-1", "preempt")]
    again = snapshot(job(1, gpus(8), budget_usd=10), teams=(team("blue"),), spent={"job-1": micro_usd(9.7)})
    assert (said(again), bought(again)) == ([("job-1", "budget")], [])
    more = replace(again, jobs=(job(1, gpus(8), budget_usd=20),))
    assert said(more) == [("job-1", "admit")]


@pytest.mark.parametrize(("month", "decided"), [(11, "budget"), (12, "admit")])
def test_a_new_month_begins_with_nothing_spent(tmp_path: Path, month: int, decided: str) -> None:
    """All kinds count: what the team's endpoints cost too."""
    store = new_store(tmp_path)
    at_us = int(datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp()) * 1_000_000
    end_us = at_us + 2 * 3_600_000_000
    store.commit(
        Changes(0.0, entries=(Entry("node-1", at_us, end_us, EntryKind.ENDPOINT, "m", "blue", 1, micro_usd(99)),))
    )
    now_us = int(datetime(2026, month, 30, 23, 30, tzinfo=UTC).timestamp()) * 1_000_000
    spent = store.books.spent(["job-1"], month_of(now_us))
    store.close()
    blue = replace(team("blue", **SOFT), spent_micro_usd=spent.teams_month.get("blue", 0))
    shape: Shape = gpus(8)
    assert said(snapshot(job(1, shape), teams=(blue,))) == [("job-1", decided)]


@pytest.mark.parametrize(("limit", "decided"), [("budget_usd", "preempt"), ("soft_budget_usd", "")])
def test_a_jobs_budget_by_the_month_counts_this_month_alone(limit: str, decided: str) -> None:
    """It reserves like any other job: costs before this month are not outstanding."""
    monthly = {limit: 10, "budget_per": "month"}
    mine, *seats = running(1, **monthly)
    held = replace(mine, reserved_micro_usd=micro_usd(308)), *seats
    s = with_running(held, teams=(team("blue", **SOFT),))
    old = replace(s, spent={"job-1": micro_usd(300)}, spent_month={"job-1": micro_usd(2)})
    assert said(old) == []
    assert admission_state(old).budgets.committed["blue"] == micro_usd(8)
    late = replace(old, spent={"job-1": micro_usd(308)}, spent_month={"job-1": micro_usd(10)})
    assert [what for _, what in said(late)] == ([decided] if decided else [])
    again = snapshot(job(1, gpus(8), **monthly), teams=(team("blue"),), spent={"job-1": micro_usd(308)})
    spent = replace(again, spent_month={"job-1": micro_usd(10)})
    if limit == "budget_usd":
        assert said(spent) == [("job-1", "budget")]
        assert "has cost $10.00 of its budget of $10 this month. Wait for the next month" in reason(spent)
        nearly = replace(again, spent_month={"job-1": micro_usd(9.9)})
        assert "has cost $9.90 of its budget of $10 this month; less than three minutes of it are left." in reason(
            nearly
        )
    else:
        assert (bought(spent), bought(again)) == (["spot"], ["owned"])
    assert said(again) == [("job-1", "admit")], "a new month"


def test_what_a_refused_job_would_have_bought_is_not_counted_against_the_next_one() -> None:
    dear = H100.model_copy(update={"resources": {"GPU": 8.0}})
    cheap = NodeType(name="cheap", resources={"CPU": 8.0}, price_micro_usd_h=micro_usd(1))
    teams = (team("blue"), team("red"), team("green", quota={"H100": 16}, lend={"H100": 0}))
    waiting = (job(1, gpus(8)), job(2, Shape(resources={"CPU": 4.0}), team="red"))
    for limits in (Limits(hard_micro_usd_h=micro_usd(80)), Limits(launches_per_min=1)):
        s = Snapshot(1000.0, (dear, cheap), jobs=waiting, teams=teams, limits=limits)
        assert brief(schedule(s)) == [("job-1", "quota"), ("job-2", "admit")], limits
