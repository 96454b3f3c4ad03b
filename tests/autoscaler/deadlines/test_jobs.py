"""Jobs with a deadline, decided by the controller's own functions: in time whatever spot does, and cheaper for it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler.deadlines.deadline_world import SOLID, SPOT, Story, spells

from raytide.autoscaler.deadlines import jobs as deadline_jobs
from raytide.autoscaler.deadlines.jobs import PREFERS_ON_DEMAND, spot_forecasts, with_market_constraints
from raytide.autoscaler.spot.pool_availability import PoolAvailability
from raytide.control.views import from_json, to_json
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobSpec, JobState
from raytide.core.objects.node import MARKET_LABEL, CapacityType, Node, NodeState, fits
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Pool, Snapshot

NOW_S = datetime(2026, 11, 21, 20, tzinfo=UTC).timestamp()
HOUR_S = 3600.0
NOWHERE = [[False]] * 2
SOON = [[True] * 600] * 2


def job(left_h: float, work_h: float | None = None, **more: object) -> Job:
    gang = GangSpec(shapes=(Shape(resources={"GPU": 1.0}),))
    deadline = datetime.fromtimestamp(NOW_S + left_h * HOUR_S, UTC)
    fields = {"kind": "train", "name": "j", "gang": gang, "deadline": deadline, "estimate_h": work_h, **more}
    return Job("job-1", JobSpec.parse(fields, where="job"), "ada", JobState.QUEUED, NOW_S)


def stance(
    job: Job,
    *,
    on: CapacityType | None = None,
    pools: tuple[Pool, ...] = (),
    types: tuple[object, ...] = (),
    is_alone: bool = True,
) -> MarketConstraint:
    """`on`: where its gang runs now, alone or with another."""
    views, leases = (), ()
    if on is not None:
        node_type = SPOT if on is CapacityType.SPOT else SOLID
        node = Node("node-1", node_type.name, "a", on, 1, NodeState.READY, NOW_S - 400.0, ready_at_s=NOW_S - 300.0)
        views = (NodeView(node, node_type.resources, {}, node_type.all_labels("a")),)
        member = Member(0, MemberState.READY, "node-1")
        leases = (Lease("lease-1", job.id, job.spec.gang.shapes[0], LeaseState.ACTIVE, (member,)),)
        leases += () if is_alone else (replace(leases[0], id="lease-2", job_id="job-2"),)
    seen = Snapshot(NOW_S, types or (SPOT, SOLID), views, (job,), leases, pools=pools)  # type: ignore[arg-type]
    return with_market_constraints(seen).stances[job.id]


NO_SPOT = tuple(Pool(SPOT.name, zone, 3, NOW_S + 900.0, "none left") for zone in SPOT.zones)


def test_with_time_to_spare_it_runs_on_spot_and_says_until_when() -> None:
    found = stance(job(12, 3))
    assert (found.markets, found.is_urgent) == ((CapacityType.SPOT,), False)
    assert found.reason == "on spot: 3.1 h of work, due Nov 22 08:00 UTC, on demand from Nov 22 04:39 UTC at the latest"


def test_without_spot_it_waits_while_there_is_time_and_then_runs_on_demand() -> None:
    waits = stance(job(12, 3), pools=NO_SPOT)
    assert waits.markets == () and waits.reason.startswith("waits for spot: 3.1 h of work, due Nov 22 08:00 UTC")
    late = stance(job(3.3, 3), pools=NO_SPOT)
    assert (late.markets, late.is_urgent) == ((CapacityType.ON_DEMAND, CapacityType.SPOT), True)
    assert late.reason.endswith("; no time is left for another attempt on spot")


def test_on_demand_is_left_for_spot_only_by_who_can_be_moved_and_never_to_wait() -> None:
    assert stance(job(12, 3), on=CapacityType.ON_DEMAND).markets == (CapacityType.SPOT,)
    assert stance(job(12, 3, preemptible=False), on=CapacityType.ON_DEMAND).markets == PREFERS_ON_DEMAND
    stays = stance(job(12, 3), on=CapacityType.ON_DEMAND, pools=NO_SPOT)
    assert stays.markets == PREFERS_ON_DEMAND and not stays.is_urgent


def test_spot_is_left_for_on_demand_when_time_runs_out() -> None:
    found = stance(job(3.2, 3), on=CapacityType.SPOT)
    assert (found.markets, found.is_urgent) == (PREFERS_ON_DEMAND, True)
    assert found.reason.startswith("on spot, moves to on demand: 3.1 h of work")


def test_who_has_another_shape_for_on_demand_leaves_spot_for_it_when_time_runs_out() -> None:
    spot = Shape(resources={"GPU": 1.0}, labels={MARKET_LABEL: "spot"})
    wide = Shape(members=2, resources={"GPU": 0.5})
    late = job(3.2, 3, gang=GangSpec(shapes=(spot, wide)))
    assert stance(late, on=CapacityType.SPOT).markets == PREFERS_ON_DEMAND
    assert stance(job(3.2, 3, gang=GangSpec(shapes=(spot,))), on=CapacityType.SPOT).markets == (CapacityType.SPOT,)


def test_who_shares_his_node_is_told_that_he_stays_there() -> None:
    found = stance(job(3.2, 3), on=CapacityType.SPOT, is_alone=False)
    assert found.markets == (CapacityType.SPOT,)
    assert found.reason.startswith("on spot: 3.1 h of work") and found.reason.endswith(
        "; it cannot be moved from there"
    )
    assert stance(job(12, 3), on=CapacityType.ON_DEMAND, is_alone=False).markets == PREFERS_ON_DEMAND


def test_work_that_nobody_knows_is_done_on_demand_where_that_is_to_be_had() -> None:
    found = stance(job(12))
    assert (found.markets, found.work_s) == (PREFERS_ON_DEMAND, None)
    assert "estimate_h would give it" in found.reason


def test_its_own_word_counts_for_more_than_its_estimate() -> None:
    told = replace(job(12, 3), progress={"left_s": 11 * HOUR_S, "redo_s": 900.0})
    found = stance(told)
    assert found.work_s == pytest.approx(11 * 1.05 * HOUR_S)
    assert found.is_urgent


@pytest.mark.parametrize(
    "told",
    [
        {"left_s": 1e15}, {"left_s": 9e11}, {"left_s": 10**400}, {"left_s": float("nan")}, {"left_s": float("inf")},
        {"step": 1, "steps": 10**13}, {"step": 1, "steps": 10**12}, {"step": 1, "steps": 10**400},
        {"left_s": 60.0, "redo_s": 1e308}, {"left_s": 60.0, "redo_s": 9e11}, {"left_s": 60.0, "redo_s": float("inf")},
    ],
)  # fmt: skip
def test_no_report_stops_the_judgement(told: dict[str, float]) -> None:
    fixed = replace(job(12, 1e300, preemptible=False), progress=told, spell_since_s=NOW_S - 100.0)
    found = stance(fixed, on=CapacityType.SPOT)
    assert found.work_s is not None and 0.0 <= found.work_s < 2e9


def test_a_job_that_is_late_goes_on_like_any_other() -> None:
    found = stance(job(-1, 3), on=CapacityType.SPOT)
    assert (found.is_urgent, found.markets) == (False, None)
    assert found.reason.startswith("late: it was due Nov 21 19:00 UTC")


def test_without_a_cheaper_spot_type_there_is_nothing_to_wait_for() -> None:
    assert stance(job(12, 3), types=(SOLID,)).reason.endswith("; no spot node type holds it")
    dear = SPOT.model_copy(update={"price_micro_usd_h": SOLID.price_micro_usd_h})
    assert stance(job(12, 3), types=(dear, SOLID)).reason.endswith("; spot is no cheaper")
    tied = {"gang": GangSpec(shapes=(Shape(resources={"GPU": 1.0}, labels={MARKET_LABEL: "on-demand"}),))}
    assert stance(job(12, 3, **tied)).markets == PREFERS_ON_DEMAND


def test_the_same_snapshot_is_judged_the_same_and_jobs_without_a_deadline_are_left_alone() -> None:
    assert stance(job(12, 3)) == stance(job(12, 3))
    plain = replace(job(12), spec=job(12).spec.model_copy(update={"deadline": None}))
    seen = Snapshot(NOW_S, (SPOT, SOLID), jobs=(plain,))
    assert with_market_constraints(seen) is seen


def test_a_pool_that_refuses_is_there_for_whom_a_ready_node_of_it_has_room_and_is_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[object] = []
    monkeypatch.setattr(deadline_jobs, "fits", lambda *at: bool(looks.append(at)) or fits(*at))
    node = Node(
        "node-1", SPOT.name, "b", CapacityType.SPOT, 1, NodeState.READY, NOW_S - 400.0, ready_at_s=NOW_S - 300.0
    )
    free = NodeView(node, SPOT.resources, SPOT.resources, SPOT.all_labels("b"))
    jobs = tuple(replace(job(12, 3), id=f"job-{at}") for at in range(5))
    seen = with_market_constraints(Snapshot(NOW_S, (SPOT, SOLID), (free,), jobs, pools=NO_SPOT))
    assert {found.markets for found in seen.stances.values()} == {(CapacityType.SPOT,)}
    assert len(looks) == 1


def test_what_is_known_of_spot_and_what_was_decided_survive_the_way_to_another_process() -> None:
    seen = Snapshot(NOW_S, (SPOT, SOLID), jobs=(job(12, 3),))
    seen = with_market_constraints(replace(seen, spot=spot_forecasts(PoolAvailability(), seen)))
    assert seen.spot[0].pools == ("v100.spot/a", "v100.spot/b")
    there = from_json(Snapshot, json.loads(json.dumps(to_json(seen))))
    assert (there.spot, there.stances) == (seen.spot, seen.stances)
    assert with_market_constraints(there).stances == seen.stances


@settings(max_examples=6, deadline=None)
@given(
    up=st.tuples(*[st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=6)] * 2),
    slack_min=st.integers(16, 90),
    reports=st.booleans(),
)
def test_no_spot_market_makes_a_job_late(up: tuple[list[tuple[bool, int]], ...], slack_min: int, reports: bool) -> None:
    """On demand can be had; a start on it, the first at least, takes up to a quarter of an hour."""
    zones = [[is_up for is_up, ticks in zone for _ in range(ticks)] for zone in up]
    story = Story(zones, work_s=40 * 60.0, slack_s=slack_min * 60.0, reports=reports).run()
    assert story.late_s == 0.0


def test_without_any_spot_it_costs_what_it_costs_on_demand() -> None:
    story = Story(NOWHERE, work_s=HOUR_S, slack_s=2 * HOUR_S).run()
    assert story.late_s == 0.0
    assert story.cost <= 1.03


def test_where_spot_stays_it_costs_what_spot_costs() -> None:
    story = Story(SOON, work_s=HOUR_S, slack_s=2 * HOUR_S).run()
    assert story.late_s == 0.0
    assert story.cost <= 0.31
    assert story.markets == {(CapacityType.SPOT,)}


def test_on_zones_that_come_and_go_it_is_in_time_and_cheaper_than_on_demand() -> None:
    stories = [
        Story([spells(seed + zone, 600, 1.0, 0.7) for zone in range(2)], work_s=2 * HOUR_S, slack_s=HOUR_S).run()
        for seed in (0, 2)
    ]
    assert [story.late_s for story in stories] == [0.0] * 2
    assert max(story.cost for story in stories) <= 1.05
    assert sum(story.cost for story in stories) / 2 <= 0.75


def test_jobs_with_the_same_shapes_share_one_look_at_the_offerings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original = deadline_jobs._offerings_for
    monkeypatch.setattr(deadline_jobs, "_offerings_for", lambda *args: calls.append(args) or original(*args))
    jobs = tuple(replace(job(12, 3), id=f"job-{number}") for number in range(50))
    with_market_constraints(Snapshot(NOW_S, (SPOT, SOLID), (), jobs))
    assert len(calls) == 1


def test_many_deadlines_share_a_few_value_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tick of many jobs must not solve a table for each of them."""
    deadline_jobs._table.cache_clear()
    steps: list[float] = []
    original = deadline_jobs.solve
    monkeypatch.setattr(deadline_jobs, "solve", lambda *a, **k: steps.append(k["restart_s"]) or original(*a, **k))
    days = [1.5 ** (number * 7 % 11) for number in range(33)]  # from a day to two months, in no order
    jobs = tuple(replace(job(24 * each, 12 * each), id=f"job-{number}") for number, each in enumerate(days))
    seen = Snapshot(NOW_S, (SPOT, SOLID), (), jobs)
    first = with_market_constraints(seen)
    assert list(first.stances) == [each.id for each in jobs]
    assert len(steps) == 2
    steps.clear()
    with_market_constraints(replace(seen, at_s=NOW_S + 1.0))
    assert not steps


@pytest.mark.parametrize("days", [20, 30, 60, 365])
def test_a_job_with_a_far_deadline_and_time_to_spare_runs_on_spot_too(days: int) -> None:
    far = job(24 * days, 12 * days)
    for on in (None, CapacityType.SPOT, CapacityType.ON_DEMAND):
        assert stance(far, on=on).markets == (CapacityType.SPOT,)


def test_a_table_is_solved_once_in_a_tick_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_jobs._table.cache_clear()
    steps: list[float] = []
    original = deadline_jobs.solve
    monkeypatch.setattr(deadline_jobs, "solve", lambda *a, **k: steps.append(k["restart_s"]) or original(*a, **k))
    told = [{"left_s": 60.0, "redo_s": 60.0 * 1.3 ** (number % 27)} for number in range(54)]
    jobs = tuple(replace(job(20, 3), id=f"job-{number}", progress=each) for number, each in enumerate(told))
    with_market_constraints(Snapshot(NOW_S, (SPOT, SOLID), (), jobs))
    assert len(steps) == len(set(steps)) > 12
