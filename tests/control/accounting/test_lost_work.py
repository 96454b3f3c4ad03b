"""Work is lost to what struck the gang when its driver broke off; by its own fault it stays its cost."""

from __future__ import annotations

from dataclasses import replace

from tests.queue.cluster import gpus, job

from raytide.control.accounting.lost_work import (
    CAUSE_WINDOW_S,
    book_losses,
    lost_nodes,
    on_disruption,
    on_preemption,
    settled_losses,
)
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind

S = 1_000_000
MINE = Entry("node-1", 0, 100 * S, EntryKind.JOB, "job-1", "blue", 1, 1000)


def told(seconds: float, known_s: float = 0.0) -> Job:
    one = replace(job(1, state=JobState.RUNNING), held_s=100.0, lost_s=known_s)
    return replace(one, progress={"lost_s": seconds, "lost_at_s": 100.0})


def moved(one: Job, now_s: float = 110.0) -> list[tuple[str, int]]:
    found = book_losses([one], [MINE], lambda *_: (), now_s)
    assert [after.lost_s for after in found.jobs] == [one.progress["lost_s"]]
    return [(e.cause, e.amount_micro_usd) for e in found.entries if e.kind is EntryKind.WASTE]


def test_what_struck_it_when_it_broke_off_is_the_cause() -> None:
    one = on_disruption(told(20.0), ["job-7", "job-8"], 95.0)
    assert settled_losses([one], 101.0) == {"job-1"}
    assert moved(one) == [("job-7, job-8", 200)]
    assert settled_losses([replace(one, lost_s=20.0)], 101.0) == frozenset(), "it is in the books"


def test_a_cause_that_is_not_seen_yet_is_waited_for_and_then_there_is_none() -> None:
    one = told(20.0)
    assert settled_losses([one], 100.0 + CAUSE_WINDOW_S) == frozenset()
    assert settled_losses([one], 101.0 + CAUSE_WINDOW_S) == {"job-1"}
    assert settled_losses([replace(one, state=JobState.SUCCEEDED)], 101.0) == {"job-1"}
    assert moved(one) == []
    assert moved(on_disruption(one, ["job-7"], 100.0 - 2 * CAUSE_WINDOW_S)) == [], "that was another time"


def test_what_was_lost_to_a_node_stays_so_when_the_gang_is_asked_to_give_way_soon_after() -> None:
    struck_first = on_disruption(told(20.0), ["node-2"], 95.0)
    assert moved(on_preemption(struck_first, ["job-7"], 105.0)) == [("node-2", 200)]
    assert moved(on_disruption(on_preemption(told(20.0), ["job-7"], 85.0), ["node-2"], 96.0)) == [("node-2", 200)]
    assert moved(on_preemption(on_disruption(told(20.0), ["node-2"], 95.0 - 2 * CAUSE_WINDOW_S), ["job-7"], 95.0)) == [
        ("job-7", 200)
    ]


def test_what_it_loses_after_it_told_of_the_lost_node_is_lost_to_who_asked() -> None:
    first = replace(told(20.0, known_s=20.0), progress={"lost_s": 20.0, "lost_at_s": 50.0})
    again = replace(
        on_preemption(on_disruption(first, ["node-2"], 45.0), ["job-7"], 80.0),
        progress={"lost_s": 25.0, "lost_at_s": 90.0},
    )
    assert moved(again) == [("job-7", 50)]
    assert on_preemption(on_disruption(first, ["node-2"], 70.0), ["job-7"], 80.0).struck_by == "node-2", (
        "it has not told of that yet"
    )


def test_nodes_that_are_lost_at_about_the_same_time_are_one_cause() -> None:
    one = on_disruption(on_disruption(told(20.0), ["node-2"], 95.0), ["node-3", "node-2"], 98.0)
    assert moved(one) == [("node-2, node-3", 200)]


def test_only_what_is_new_is_lost_and_a_new_driver_counts_from_nothing() -> None:
    assert moved(on_disruption(told(20.0, known_s=15.0), ["job-7"], 100.0)) == [("job-7", 50)]
    assert moved(on_disruption(told(10.0, known_s=15.0), ["job-7"], 100.0)) == [("job-7", 100)]


def test_no_more_is_lost_than_the_time_that_it_held_its_gang() -> None:
    assert moved(on_disruption(replace(told(1e12), held_s=50.0), ["job-7"], 100.0)) == [("job-7", 500)]


def test_a_driver_that_does_not_say_both_how_much_and_when_says_nothing() -> None:
    halves = {"lost_s": 5.0}, {"lost_at_s": 5.0}, {"lost_s": "much", "lost_at_s": 5.0}
    absurd = [{"lost_s": 5.0, "lost_at_s": 5.0, name: 10**400} for name in ("lost_s", "lost_at_s")]
    for said in (*halves, *absurd):
        assert settled_losses([on_disruption(replace(job(1), progress=said), ["job-7"], 5.0)], 500.0) == frozenset()


def test_nodes_are_lost_from_under_members_that_had_not_been_asked_to_give_way() -> None:
    ready = Member(0, MemberState.READY, "node-1")
    leaving = Member(1, MemberState.LEAVING, "node-2", gives_way=True)
    coming = Member(2, MemberState.ASSIGNED, "node-3")
    before = Lease("lease-1", "job-1", gpus(1, members=3), LeaseState.ACTIVE, (ready, leaving, coming))
    after = replace(before, members=(Member(0), Member(1, MemberState.PARKED), Member(2)))
    assert lost_nodes(before, after) == ("node-1",)
    assert lost_nodes(before, before) == ()
    one = job(1)
    assert on_disruption(one, (), 5.0) is one
