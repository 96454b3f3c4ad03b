"""A job that is ended at any moment of any life: it ends once, says why, leaves nothing, and its bill adds up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.control.test_controller import Loop

from raytide.core.objects.gang import GangSpec, LeaseState, Shape
from raytide.core.objects.job import FINAL_STATES, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import EntryKind
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus

SPOT = {"ray.io/market-type": "spot"}
"""The fleet has six such nodes, of one CPU each."""

DEEDS = ("wait", "lost node", "notice", "shrunk", "preempted", "back", "empty pools", "told", "driver died")
ENDS = ("stopped", "failed", "died", "done")


class Life:
    """The life of an elastic trainer, in a world that does not leave it alone."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.lost_s = loop, 0.0
        self.job = self._submit("mine", 4, 2, "low")
        self.others: list[str] = []

    def deed(self, what: str) -> None:
        lease = self.loop.store.lease_of(self.job)
        usable = lease.usable if lease is not None and lease.state is not LeaseState.RELEASED else ()
        match what:
            case "lost node" if usable:
                self.loop.world.end(usable[-1].node_id, "reclaimed")
                self._tell_of_a_loss()
            case "notice" if usable:
                self.loop.world.noticed[usable[0].node_id] = self.loop.clock.now_s() + 5.0
            case "shrunk" | "preempted" if len(self.others) < 3:
                self.others.append(self._submit("other", 2 if what == "shrunk" else 6, None, "high"))
                self._tell_of_a_loss()
            case "back" if self.others:
                self.loop.store.request_stop(self.others.pop())
            case "empty pools":
                self.loop.world.stocked_out ^= {"cpu1.spot"}
            case "told":
                self._tell_of_a_loss()
            case "driver died" if self._key() in self.loop.world.running:
                self.loop.world.running[self._key()] = DriverStatus(self._key(), "died", "killed")

    def end(self, how: str) -> None:
        key, store = self._key(), self.loop.store
        if how == "stopped" or key not in self.loop.world.running:
            store.request_stop(self.job)
        elif how == "failed":
            self.loop.world.running[key] = DriverStatus(key, "failed", "bad data")
        elif how == "died":
            for restart in range(100):
                again = DriverKey(self.job, restart)
                self.loop.world.running[again] = DriverStatus(again, "died", "out of memory")
        else:
            self.loop.world.running[key] = DriverStatus(key, "succeeded", "all steps are done")

    def _tell_of_a_loss(self) -> None:
        self.lost_s += 3.0
        now_s = self.loop.clock.now_s()
        self.loop.store.report(self.job, {"lost_s": self.lost_s, "lost_at_s": now_s}, now_s)

    def _key(self) -> DriverKey:
        return DriverKey(self.job, self.loop.store.job(self.job).restarts)

    def _submit(self, name: str, members: int, at_least: int | None, priority: str) -> str:
        gang = GangSpec(shapes=(Shape(members=members, min_members=at_least, resources={"CPU": 1.0}, labels=SPOT),))
        spec = JobSpec(kind=JobKind.TRAIN, name=name, gang=gang, priority=priority, max_restarts=3)
        return self.loop.store.submit_job(spec, "ana", self.loop.clock.now_s()).id


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    life=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(1, 20)), max_size=8),
    how=st.sampled_from(ENDS),
    fuse=st.none() | st.integers(0, 6),
)
def test_a_job_that_is_ended_at_any_moment_says_why_leaves_nothing_and_its_bill_adds_up(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, int]], how: str, fuse: int | None
) -> None:
    """`fuse`: the controller is killed too, at the n-th call after the end was asked for."""
    loop = Loop(tmp_path_factory.mktemp("loop"))
    mine = Life(loop)
    for what, ticks in life:
        mine.deed(what)
        loop.tick(ticks)
    was_over = loop.state(mine.job) in FINAL_STATES
    mine.end(how)
    loop.world.fuse = fuse
    loop.tick(4)
    loop.world.fuse, loop.world.stocked_out = None, set()
    loop.until(lambda: loop.state(mine.job) in FINAL_STATES)
    for other in mine.others:
        loop.store.request_stop(other)
    loop.until(loop.nothing_runs)
    loop.tick(2)

    job = loop.store.job(mine.job)
    ends = [event.to_state for event in loop.store.events(mine.job, limit=1000) if event.to_state in FINAL_STATES]
    assert ends == [job.state], "it ends once"
    assert job.ended_at_s is not None and job.reserved_micro_usd == 0
    lease = loop.store.lease_of(mine.job)
    assert lease is None or lease.state is LeaseState.RELEASED
    said = {
        JobState.STOPPED: "stopped on request",
        JobState.SUCCEEDED: "all steps are done",
        JobState.FAILED: "bad data" if how == "failed" else "max_restarts allows no more",
    }
    assert was_over or said[job.state] in job.reason
    _check_books(loop, mine.job)


def _check_books(loop: Loop, job: str) -> None:
    entries = loop.store.books.entries()
    wasted = [entry for entry in entries if entry.kind is EntryKind.WASTE and entry.subject == job]
    assert all(entry.cause and entry.amount_micro_usd > 0 for entry in wasted)
    assert max(Counter((entry.node_id, entry.from_us) for entry in wasted).values(), default=1) == 1, "lost twice"
    paid: Counter[str] = Counter()
    for entry in entries:
        if entry.subject == job and entry.kind is EntryKind.JOB:
            paid[entry.node_id] += entry.amount_micro_usd
    assert all(amount >= 0 for amount in paid.values()), "more was lost than it had cost"
    loop.check_ledger()
    loop.store.close()
