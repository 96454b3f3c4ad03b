"""Preemption: after a checkpoint, spare members before whole gangs, borrowers before others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.queue.cluster import Cluster, brief, gpus, team

from raytide.core.objects.gang import MemberState, Shape
from raytide.core.objects.job import JobState
from raytide.core.objects.plan import Grow, Preempt, Shrink
from raytide.core.objects.snapshot import MarketConstraint
from raytide.queue.admission.scheduler import GRACE_S, SETTLE_S, _grow, admission_state, schedule
from raytide.queue.lifecycle.attained_service import COOL_DOWN_S, MAX_PREEMPTIONS
from raytide.scheduling.diagnosis import Unschedulable


def test_a_higher_class_shrinks_an_elastic_gang_in_place_and_it_grows_back() -> None:
    c = Cluster()
    low = c.submit(gpus(2, members=8, at_least=2), priority="low")
    c.step()
    assert c.running() == {low: 8}
    high = c.submit(gpus(4, members=2), priority="high")
    actions = c.step()
    (shrink,) = [action for action in actions if isinstance(action, Shrink)]
    assert (shrink.job_id, len(shrink.members), shrink.leaves_at_s) == (low, 4, c.now_s + GRACE_S)
    assert c.held(low) == 8, "they are usable for a while"
    assert c.running() == {low: 8}
    c.step(GRACE_S)
    assert c.running() == {low: 4, high: 2}
    assert c.jobs[low].state is JobState.RUNNING
    c.end(high)
    c.step(1.0)
    assert c.held(low) == 4, "not at once: a seat that was given away settles first"
    (grow,) = [action for action in c.step(SETTLE_S) if isinstance(action, Grow)]
    assert (grow.job_id, len(grow.members)) == (low, 4)
    assert c.running() == {low: 8}


def test_no_gang_grows_while_a_job_waits_for_the_fleets_limit() -> None:
    c = Cluster()
    low = c.submit(gpus(8, members=2, at_least=1), priority="low")
    c.step()
    high = c.submit(gpus(8), priority="high")
    c.step()
    c.step(GRACE_S)
    c.end(high)
    c.now_s += SETTLE_S
    state = admission_state(c.snapshot)
    order = range(len(state.jobs))
    assert [grow.job_id for grow in _grow(state, order)] == [low]
    waits = c.submit(gpus(8))
    for constraint in ("rate", "budget"):
        state = admission_state(c.snapshot)
        row = next(row for row, job in enumerate(state.jobs) if job.id == waits)
        state.refused[row] = Unschedulable(constraint, "the fleet would cost more.", "")  # type: ignore[arg-type]
        assert list(_grow(state, order)) == []


def test_a_gang_that_cannot_shrink_is_preempted_whole_and_queued_again() -> None:
    c = Cluster()
    low = c.submit(gpus(8, members=2), priority="low")
    c.step()
    high = c.submit(gpus(8), priority="high")
    assert brief(c.step()) == [(low, "preempt"), (high, "admit")]
    assert c.running() == {low: 2}
    c.step(GRACE_S / 2)
    assert brief(c.step()) == [], "nobody else is asked meanwhile"
    assert brief(c.step(GRACE_S / 2)) == [(low, "capacity")]
    assert c.running() == {high: 1}
    assert (c.jobs[low].state, c.jobs[low].preemptions, c.jobs[low].preempted_at_s) == (JobState.QUEUED, 1, c.now_s)
    assert "preempted by job-2" in c.jobs[low].reason
    c.end(high)
    c.step(1.0)
    assert c.running() == {low: 2}


def test_what_cannot_be_preempted_is_left_alone() -> None:
    c = Cluster()
    held = c.submit(gpus(8, members=2), priority="low", preemptible=False)
    c.step()
    high = c.submit(gpus(8), priority="high")
    assert brief(c.step()) == [(high, "capacity")]
    assert c.running() == {held: 2}


def test_the_fewest_victims_are_preempted_the_lowest_first() -> None:
    c = Cluster(nodes=1)
    small = [c.submit(gpus(2), priority="low") for _ in range(4)]
    c.step()
    high = c.submit(gpus(4), priority="high")
    decided = brief(c.step())
    assert decided == [(small[3], "preempt"), (small[2], "preempt"), (high, "admit")]


def test_only_victims_that_help_are_preempted() -> None:
    c = Cluster()
    whole = c.submit(gpus(8), priority="low")
    parts = [c.submit(gpus(4), priority="low") for _ in range(2)]
    c.step()
    high = c.submit(gpus(8), priority="high")
    gone = {job_id for job_id, what in brief(c.step()) if what == "preempt"}
    assert gone in ({whole}, set(parts)), "one node is enough"
    assert c.lease(high) is not None


def test_a_gang_that_has_to_give_its_rest_keeps_nothing_that_it_could_have_spared() -> None:
    c = Cluster(nodes=1)
    fixed = c.submit(gpus(2), preemptible=False)
    low = c.submit(gpus(2, members=3, at_least=2), priority="low")
    c.step()
    high = c.submit(gpus(4), priority="high")
    assert brief(c.step()) == [(low, "preempt"), (high, "admit")]
    c.step(GRACE_S)
    assert c.running() == {fixed: 1, high: 1}


def test_a_preempted_job_preempts_no_other_during_its_cool_down() -> None:
    c = Cluster(nodes=1)
    first = c.submit(gpus(8))
    c.step()
    c.jobs[first] = replace(c.jobs[first], attained_gpu_s=1e6)
    second = c.submit(gpus(8))
    c.step()
    c.step(GRACE_S)
    assert c.running() == {second: 1}
    c.jobs[second] = replace(c.jobs[second], attained_gpu_s=1e9, held_s=1e9)
    assert brief(c.step(1.0)) == [(first, "capacity")]
    assert brief(c.step(COOL_DOWN_S)) == [(second, "preempt"), (first, "admit")]


def test_a_job_is_not_preempted_more_than_max_preemptions_times() -> None:
    c = Cluster(nodes=1)
    low = c.submit(gpus(8), priority="low")
    c.jobs[low] = replace(c.jobs[low], preemptions=MAX_PREEMPTIONS)
    c.step()
    high = c.submit(gpus(8), priority="high")
    assert brief(c.step()) == [(high, "capacity")]


def test_a_lender_takes_back_its_own_in_one_round_whatever_the_order() -> None:
    c = Cluster(teams=(team("blue", quota={"H100": 8}), team("red", quota={"H100": 8})))
    label = {"ray.io/accelerator-type": "H100"}
    borrowed = [c.submit(gpus(4, **label), team="red", priority="high") for _ in range(4)]
    c.step()
    assert c.running() == dict.fromkeys(borrowed, 1)
    mine = c.submit(gpus(4, members=2, **label), team="blue", priority="low")
    decided = brief(c.step())
    assert [what for _, what in decided] == ["preempt", "preempt", "admit"]
    assert {job_id for job_id, what in decided if what == "preempt"} == {borrowed[2], borrowed[3]}
    c.step(GRACE_S)
    assert c.held(mine) == 2
    assert len(c.running()) == 3


def test_jobs_within_their_quota_are_placed_before_borrowers() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 8}), team("red", quota={"GPU": 8})))
    much = c.submit(gpus(8, members=2, at_least=1), team="red", priority="high")
    mine = c.submit(gpus(1), team="blue", priority="low")
    assert brief(c.step()) == [(much, "admit"), (mine, "admit")]
    assert c.running() == {much: 1, mine: 1}, "it took what was left"
    assert brief(c.step(1.0)) == [], "nothing is given back that was just taken"


def test_a_borrower_does_not_preempt_a_team_within_its_quota_whatever_the_classes() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 4}), team("red"), team("green", quota={"GPU": 1})))
    within, borrowed = c.submit(gpus(4), team="blue", priority="low"), c.submit(gpus(4), team="green", priority="low")
    c.step()
    high = c.submit(gpus(8), team="red", priority="high")
    assert brief(c.step()) == [(high, "quota")]
    less = c.submit(gpus(4), team="red", priority="high")
    assert brief(c.step()) == [(borrowed, "preempt"), (high, "quota"), (less, "admit")]
    own = c.submit(gpus(4), team="blue", priority="high")
    c.step()
    c.step(GRACE_S)
    assert c.running() == {less: 1, own: 1}, "within a team its classes count"
    assert c.jobs[within].state is JobState.QUEUED


def test_small_jobs_of_a_team_do_not_pass_a_large_one_by_asking_for_less_than_its_own() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 4}), team("red", quota={"GPU": 4})))
    large = c.submit(gpus(6), team="blue", priority="high")
    small = c.submit(gpus(4), team="blue")
    assert brief(c.step()) == [(large, "admit"), (small, "quota")]


def test_members_that_wait_for_a_node_return_their_quota_to_the_lender_at_once() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 8}), team("red")))
    first = c.submit(gpus(8), team="red", priority="low")
    c.step()
    second = c.submit(gpus(8), team="red", priority="high")
    assert brief(c.step()) == [(first, "preempt"), (second, "admit")]
    mine = c.submit(gpus(8), team="blue", priority="low")
    assert brief(c.step(1.0)) == [(second, "preempt"), (mine, "admit")]
    c.step(1.0)
    assert c.jobs[second].state is JobState.QUEUED
    c.step(GRACE_S)
    assert c.running() == {mine: 1}


def test_no_gang_grows_into_quota_that_its_owner_waits_for() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 8}), team("red", quota={"GPU": 8})))
    red = c.submit(gpus(4, members=4, at_least=1), team="red")
    c.step()
    first = c.submit(gpus(8), team="blue")
    c.step()
    c.step(GRACE_S)
    assert c.running() == {red: 2, first: 1}
    c.end(first)
    second = c.submit(gpus(8), team="blue")
    c.jobs[second] = replace(c.jobs[second], preempted_at_s=c.now_s)
    other = c.submit(gpus(4), team="red")
    c.step(SETTLE_S)
    assert c.held(second) == 1, "cooling down, it takes what is free"
    assert (c.held(red), c.held(other)) == (2, 0)


@pytest.mark.parametrize("why", ["impossible", "it waits for spot", "no money"])
def test_a_job_that_could_not_start_keeps_no_other_from_borrowing(why: str) -> None:
    red = team("red", spent_usd=100.0, quota={"GPU": 12}, budget={"hard_usd": 100} if why == "no money" else {})
    c = Cluster(teams=(team("blue", quota={"GPU": 4}), red))
    label = {"ray.io/accelerator-type": "B200"} if why == "impossible" else {}
    waits = c.submit(gpus(1, **label), team="red", priority="high")
    if why == "it waits for spot":
        c.stances[waits] = MarketConstraint((), False, 9e9, 1.0, 8e9, "waits for spot")
    elastic = c.submit(gpus(1, members=12, at_least=1))
    assert (elastic, "admit") in brief(c.step())
    assert c.running() == {elastic: 12}


def test_what_cannot_start_takes_nothing_of_its_teams_own_from_its_other_jobs() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 4}), team("red", quota={"GPU": 4})))
    much = c.submit(gpus(8), team="red", priority="high")
    never = c.submit(gpus(1, **{"ray.io/accelerator-type": "B200"}), priority="high")
    mine = c.submit(gpus(4))
    assert brief(c.step()) == [(mine, "admit"), (much, "quota"), (never, "impossible")]


def test_quota_that_no_owner_waits_for_can_be_borrowed() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 2}), team("red", quota={"GPU": 6, "CPU": 64})))
    c.submit(Shape(resources={"CPU": 64.0}))
    c.step()
    waits = c.submit(Shape(resources={"CPU": 64.0}), team="red")
    c.jobs[waits] = replace(c.jobs[waits], preempted_at_s=c.now_s)
    elastic = c.submit(gpus(1, members=6, at_least=1))
    c.step()
    assert (c.held(waits), c.held(elastic)) == (0, 6), "cooling down, it takes what is free"


@pytest.mark.parametrize("less", [MemberState.ASSIGNED, MemberState.FORMING, MemberState.LEAVING])
def test_a_gang_that_shrinks_keeps_its_ready_members(less: MemberState) -> None:
    c = Cluster()
    low = c.submit(gpus(8, members=2, at_least=1), priority="low")
    c.step()
    lease = c.lease(low)
    assert lease is not None
    first, second = lease.members
    c.leases[lease.id] = replace(lease, members=(replace(first, state=less), second))
    c.submit(gpus(8), priority="high")
    (shrink,) = [action for action in schedule(c.snapshot) if isinstance(action, Shrink)]
    assert shrink.members == (0,)


def test_a_team_without_quota_holds_nonpreemptible_jobs_only_beyond_all_quotas() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 8}), team("free")))
    free = c.submit(gpus(4, members=4, at_least=2), team="free", preemptible=False)
    c.step()
    assert c.held(free) == 2
    mine = c.submit(gpus(4, members=2), team="blue", priority="low")
    c.step()
    assert c.running() == {free: 2, mine: 2}


def test_a_team_beyond_its_quota_does_not_reclaim_from_borrowers() -> None:
    c = Cluster(nodes=1, teams=(team("blue", quota={"GPU": 4}), team("red", quota={"GPU": 4})))
    for _ in range(2):
        c.submit(gpus(4), team="red")
    c.step()
    much = c.submit(gpus(6), team="blue", priority="low")
    assert brief(c.step()) == [(much, "quota")]


def test_gangs_of_six_on_eight_never_half_hold() -> None:
    c = Cluster(nodes=1)
    first, second = c.submit(gpus(1, members=6), kind="gang"), c.submit(gpus(1, members=6), kind="gang")
    assert brief(c.step()) == [(first, "admit"), (second, "capacity")]
    for _ in range(5):
        c.step(10.0)
        assert c.running() == {first: 6}
    c.end(first)
    c.step(1.0)
    assert c.running() == {second: 6}


def test_what_is_preempted_goes_on_with_its_service_counted() -> None:
    c = Cluster(nodes=1)
    low = c.submit(gpus(8), priority="low")
    c.step()
    c.submit(gpus(8), priority="high")
    c.step(100.0)
    c.step(GRACE_S)
    c.step(500.0)
    assert (c.jobs[low].attained_gpu_s, c.jobs[low].held_s) == (8 * 130.0, 130.0)
    assert [type(a) for a in c.step() if isinstance(a, Preempt)] == []


def test_a_storm_is_decided_in_parts_and_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def storm(most: int) -> tuple[Cluster, list[list[tuple[str, str]]]]:
        monkeypatch.setattr("raytide.queue.admission.preemption.MOST_PREEMPTORS", most)
        c = Cluster()
        for _ in range(15):
            c.submit(gpus(1), priority="low")
        elastic = c.submit(gpus(1, members=2, at_least=1), priority="low")
        c.step()
        assert c.held(elastic) == 1, "its other seat is parked"
        for _ in range(12):
            c.submit(gpus(1), priority="high")
        c.now_s += SETTLE_S
        decisions = [brief(c.step()) for _ in range(3)]
        c.step(GRACE_S)
        return c, decisions

    whole, (at_once, *after) = storm(100)
    parts, decisions = storm(5)
    assert after == [[], []]
    kinds = [Counter(kind for _, kind in decision) for decision in decisions]
    assert [(kind["admit"], kind["preempt"], kind["behind"]) for kind in kinds] == [(5, 5, 7), (5, 5, 2), (2, 2, 0)]
    assert not any(kind["grow"] for kind in kinds), "nobody grows while some are not yet looked at"
    assert parts.running() == whole.running()
    assert {said for decision in decisions for said in decision if said[1] != "behind"} == set(at_once)
