"""One record whose handling raises, computes for ever or cannot be read stops nobody: it is left out, and says why."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.control.api.test_routes import LOCAL
from tests.control.test_controller import Loop

from raytide.control import controller as controller_module
from raytide.control.api.services.metrics.cluster import cluster_samples
from raytide.control.reconcile.decide import decide_constrained
from raytide.control.reconcile.quarantine import (
    RETRY_S,
    Quarantine,
    StageOvertimeError,
    _raise_after,
    without_subjects,
)
from raytide.control.views import Live, from_json
from raytide.core.errors import StorageError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint import EndpointState, ServeSpec
from raytide.core.objects.job import JobState
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import Snapshot
from raytide.core.telemetry.catalogue.control import QUARANTINED
from raytide.queue.lifecycle import jobs

Decide = Callable[[Snapshot], Plan]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.store.close()


def live(loop: Loop) -> Live:
    return from_json(Live, json.loads((loop.folder / "live.json").read_text()))


class NoTrouble:
    def free_bytes(self) -> int:
        return 1

    def troubles(self) -> tuple[()]:
        return ()


def gauge(loop: Loop) -> dict[str, float]:
    found = cluster_samples(loop.store, live(loop), NoTrouble(), load_cluster(LOCAL), (), ())  # type: ignore[arg-type]
    return {sample.labels[0]: sample.value for sample in found if sample.metric is QUARANTINED}


def poisoned(*jobs: str, error: type[BaseException] = AssertionError) -> Decide:
    """A decision that one of these jobs breaks."""

    def decide(seen: Snapshot) -> Plan:
        for job in seen.jobs:
            if job.id in jobs:
                raise error(f"no case for {job.id}")
        return decide_constrained(seen)

    return decide


class TestDecisions:
    def test_a_job_that_breaks_the_decision_is_left_out_and_the_others_run(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, bad, after = loop.submit(), loop.submit(members=1), loop.submit(members=1)
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(bad))
        loop.until(lambda: loop.state(before) is loop.state(after) is JobState.RUNNING)
        assert loop.state(bad) is JobState.QUEUED
        waits = live(loop).waiting[bad]
        assert waits.constraint == "quarantined"
        assert f"no case for {bad}" in waits.reason
        assert f"raytide stop {bad}" in waits.remedy
        assert gauge(loop) == {"job": 1, "endpoint": 0}

    def test_a_job_that_holds_nodes_keeps_them_while_it_is_left_out(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = loop.submit(members=2)
        loop.until(lambda: loop.state(bad) is JobState.RUNNING)
        held = {member.node_id for member in loop.store.lease_of(bad).usable}  # type: ignore[union-attr]
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(bad))
        other = loop.submit(members=2)
        loop.until(lambda: loop.state(other) is JobState.RUNNING)
        loop.tick(300)
        assert loop.state(bad) is JobState.RUNNING
        lease = loop.store.lease_of(bad)
        assert lease is not None and {member.node_id for member in lease.usable} == held
        theirs = loop.store.lease_of(other)
        assert theirs is not None and not held & {member.node_id for member in theirs.usable}
        loop.finish(bad)
        loop.finish(other)
        loop.until(loop.nothing_runs)
        loop.check_ledger()

    def test_many_are_found_within_a_few_passes(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        every = [loop.submit(members=1) for _ in range(60)]
        bad = set(every[::3])
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(*bad))
        loop.tick(12)
        assert {subject for subject, what in live(loop).waiting.items() if what.constraint == "quarantined"} == bad
        assert any(loop.state(job) is not JobState.QUEUED for job in every)

    @pytest.mark.parametrize("group", [2, 3])
    def test_jobs_that_only_together_break_the_decision_cost_the_newest_of_them(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch, group: int
    ) -> None:
        """Each of them alone is fine, so the older ones run; the newest waits until one of them has ended."""
        first, *others = [loop.submit(members=1) for _ in range(7)]
        together = [first, *others[2::2]][:group]
        newest = together[-1]

        def broken(seen: Snapshot) -> Plan:
            if {job.id for job in seen.jobs} >= set(together):
                raise ArithmeticError("these jobs do not go together")
            return decide_constrained(seen)

        monkeypatch.setattr(controller_module, "decide_constrained", broken)
        rest = {first, *others} - {newest}
        loop.until(lambda: all(loop.state(job) is JobState.RUNNING for job in rest))
        assert loop.state(newest) is JobState.QUEUED
        assert live(loop).quarantined == {newest: "job"}
        assert "do not go together" in live(loop).waiting[newest].reason
        loop.finish(first)
        loop.tick()
        loop.clock.advance(RETRY_S * 8)
        loop.until(lambda: loop.state(newest) is JobState.RUNNING)
        assert live(loop).quarantined == {}

    def test_an_endpoint_and_a_job_that_break_it_together_cost_the_job(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop.store.save_endpoint(ServeSpec(name="served", model="m"), "ana", loop.clock.now_s())
        bad, good = loop.submit(members=1), loop.submit(members=1)

        def broken(seen: Snapshot) -> Plan:
            assert not (seen.endpoints and any(job.id == bad for job in seen.jobs))
            return decide_constrained(seen)

        monkeypatch.setattr(controller_module, "decide_constrained", broken)
        loop.until(lambda: loop.state(good) is JobState.RUNNING)
        loop.until(lambda: loop.store.endpoint("served").state is EndpointState.RUNNING)
        assert live(loop).quarantined == {bad: "job"}

    def test_one_that_is_stopped_ends(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = loop.submit()
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(bad))
        loop.tick(3)
        loop.store.request_stop(bad)
        loop.tick(3)
        assert loop.state(bad) is JobState.STOPPED
        assert gauge(loop) == {"job": 0, "endpoint": 0}

    def test_it_is_tried_again_after_a_while(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = loop.submit()
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(bad))
        loop.tick(3)
        monkeypatch.setattr(controller_module, "decide_constrained", decide_constrained)
        loop.tick(3)
        assert loop.state(bad) is JobState.QUEUED, "it was not tried yet"
        loop.clock.advance(RETRY_S)
        loop.until(lambda: loop.state(bad) is JobState.RUNNING)
        assert live(loop).quarantined == {}

    def test_each_failure_doubles_the_wait_whatever_its_owner_changes(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two stages see it: one that passes before the one that fails must not count as success."""
        bad = loop.submit()
        monkeypatch.setattr(controller_module, "decide_constrained", poisoned(bad))
        tries: list[float] = []
        put = Quarantine._add

        def count(self: Quarantine, *args: Any) -> None:
            tries.append(args[-1])
            put(self, *args)

        monkeypatch.setattr(Quarantine, "_add", count)
        for _ in range(8):
            loop.tick()
            loop.clock.advance(RETRY_S / 2)
        waits = [after - before for before, after in pairwise(tries)]
        assert waits[0] >= RETRY_S
        assert waits[1] >= 2 * RETRY_S
        tries.clear()
        for number in range(20):
            loop.store.save_spec(bad, loop.store.job(bad).spec.model_copy(update={"budget_usd": number + 1.0}))
            loop.tick()
        assert len(tries) <= 2, "each change bought a search"

    def test_without_any_record_at_fault_the_tick_goes_on_and_says_so(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = loop.submit()
        loop.until(lambda: loop.state(job) is JobState.RUNNING)

        def broken(seen: Snapshot) -> Plan:
            raise ZeroDivisionError("the decision itself is broken")

        monkeypatch.setattr(controller_module, "decide_constrained", broken)
        loop.tick(2)
        assert any("the decision itself is broken" in error for error in live(loop).errors)
        loop.until(lambda: bool(loop.world.running))
        loop.finish(job)
        loop.tick(2)
        assert loop.state(job) is JobState.SUCCEEDED, "what needs no decision goes on"

    def test_a_decision_that_never_ends_is_cut_off(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        good, bad = loop.submit(), loop.submit()

        def endless(seen: Snapshot) -> Plan:
            while any(job.id == bad for job in seen.jobs):
                pass
            return decide_constrained(seen)

        loop.controller._quarantine = Quarantine(limit_s=0.5)
        monkeypatch.setattr(controller_module, "decide_constrained", endless)
        loop.until(lambda: loop.state(good) is JobState.RUNNING)
        assert "took more than" in live(loop).waiting[bad].reason

    def test_a_step_that_swallows_the_error_of_its_limit_is_cut_off_by_the_next_one(self) -> None:
        def hang() -> None:
            with suppress(StageOvertimeError):
                threading.Event().wait(120.0)
            threading.Event().wait(120.0)

        with pytest.raises(StageOvertimeError), _raise_after(1.0):
            hang()


class TestRecords:
    def test_a_job_whose_own_step_raises_stays_as_it_is(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        bad, good = loop.submit(members=1), loop.submit(members=1)
        advance = jobs.advance

        def broken(job: Any, *args: Any, **options: Any) -> Any:
            if job.id == bad:
                raise RecursionError("too deep")
            return advance(job, *args, **options)

        monkeypatch.setattr(jobs, "advance", broken)
        loop.until(lambda: loop.state(good) is JobState.RUNNING)
        assert "too deep" in live(loop).waiting[bad].reason

    def test_a_fault_that_lasts_for_many_ticks_counts_once_until_the_retry(self, loop: Loop) -> None:
        job = loop.store.job(loop.submit())
        quarantine = Quarantine()

        def broken() -> None:
            raise OSError("the disk is away for a moment")

        for tick in range(8):
            quarantine.begin_tick({job.id: job}, {}, tick / 2)
            quarantine.guard(job, broken, None, tick / 2)
            quarantine.end_tick(None, tick / 2)
        assert quarantine.held[job.id].failures == 1
        assert quarantine.held[job.id].retry_at_s == RETRY_S
        quarantine.begin_tick({job.id: job}, {}, RETRY_S)
        for _ in range(2):  # two steps of the tick that retries it
            quarantine.guard(job, broken, None, RETRY_S)
        assert quarantine.held[job.id].retry_at_s == RETRY_S + 2 * RETRY_S
        quarantine.begin_tick({job.id: job}, {}, 3 * RETRY_S)
        quarantine.guard(job, lambda: None, None, 3 * RETRY_S)
        quarantine.end_tick(None, 3 * RETRY_S)
        assert quarantine.held == {}

    def test_an_endpoint_is_a_record_too(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("bad", "good"):
            loop.store.save_endpoint(ServeSpec(name=name, model="m"), "ana", loop.clock.now_s())

        def broken(seen: Snapshot) -> Plan:
            assert all(view.endpoint.name != "bad" for view in seen.endpoints)
            return decide_constrained(seen)

        monkeypatch.setattr(controller_module, "decide_constrained", broken)
        loop.until(lambda: loop.store.endpoint("good").state is EndpointState.RUNNING)
        assert live(loop).quarantined == {"bad": "endpoint"}
        assert "raytide serve --delete bad" in live(loop).waiting["bad"].remedy

    def test_a_stored_spec_that_this_release_refuses_fails_its_job_and_nothing_else(self, loop: Loop) -> None:
        bad, good = loop.submit(), loop.submit()
        loop.store.save_endpoint(ServeSpec(name="old", model="m"), "ana", loop.clock.now_s())
        with loop.store._db.write() as c:
            c.execute(
                sa.text("update jobs set spec = :spec where id = :id"), {"spec": '{"kind": "\\ud800"}', "id": bad}
            )
            c.execute(sa.text("update endpoints set spec = '[[]]' where name = 'old'"))
        loop.until(lambda: loop.state(good) is JobState.RUNNING)
        job = loop.store.job(bad)
        assert job.state is JobState.FAILED
        assert "cannot be read any more" in job.reason
        old = loop.store.endpoint("old")
        assert old.state is EndpointState.FAILED
        assert "cannot be read any more" in old.reason
        loop.store.request_delete("old")
        loop.until(lambda: not loop.store.endpoints())


def test_what_is_left_out_leaves_nothing_of_its_nodes_to_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = loop.submit(members=2)
    loop.until(lambda: loop.state(job) is JobState.RUNNING)
    seen: list[Snapshot] = []

    def spy(snapshot: Snapshot) -> Plan:
        seen.append(snapshot)
        return decide_constrained(snapshot)

    monkeypatch.setattr(controller_module, "decide_constrained", spy)
    loop.tick()
    rest = without_subjects(seen[0], {job})
    assert rest.jobs == rest.leases == ()
    assert all(amount == 0 for view in rest.nodes for amount in view.available.values())
    assert all(view.idle_s == 0 and view.busy for view in rest.nodes)


def test_a_node_that_ends_while_the_ledger_cannot_be_read_is_booked_later(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = loop.submit(members=1)
    loop.until(lambda: loop.state(job) is JobState.RUNNING)
    read, failed = loop.store.books.entries, list[object]()

    def entries(**which: Any) -> Any:
        if not failed:
            failed.append(which)
            raise StorageError("the connection was lost.", hint="Try again.")
        return read(**which)

    monkeypatch.setattr(loop.store.books, "entries", entries)
    loop.finish(job)
    loop.until(loop.nothing_runs)
    loop.tick(3)
    assert failed and loop.store.books.intervals() == ()
    loop.check_ledger()
