from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from raytide.control.accounting.lost_work import book_losses, on_disruption
from raytide.core.bounds import MOST_REPORTED_CHARS
from raytide.core.errors import ConfigError, ConflictError, NotFoundError, QuotaError, StorageError, UsageError
from raytide.core.money import to_us
from raytide.core.objects.endpoint import UPDATE_FAILED, EndpointState, Replicas, ServeSpec
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.plan import Launch, Plan, Wait
from raytide.core.objects.snapshot import Pool
from raytide.core.state import Changes, Event, Store, tables
from raytide.core.state.caps import check_live_jobs
from raytide.core.state.database import Database
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.core.state.write import KEPT_PLANS, transitions

SHAPE = Shape(members=2, min_members=1, resources={"CPU": 1.5, "GPU": 1.0}, labels={"ray.io/market-type": "spot"})
SPEC = JobSpec(
    kind=JobKind.TRAIN,
    name="naïve run",
    team="blue",
    gang=GangSpec(shapes=(SHAPE, Shape(resources={"CPU": 8.0})), form_timeout_s=12.5),
    config={"steps": 10, "nested": {"lr": 3e-4, "names": ["a", None]}},
)
NODE = Node(
    id="node-12",
    type="spot-a",
    zone="z1",
    market=CapacityType.SPOT,
    price_micro_usd_h=918_000,
    state=NodeState.DRAINING,
    requested_at_s=1.1,
    started_at_s=2.2,
    ready_at_s=3.3,
    drain_deadline_s=99.9,
    ray_node_id="ab" * 28,
    address="10.0.0.7",
    reason="reclaimed",
)
LEASE = Lease(
    "lease-3",
    "job-1",
    SHAPE,
    LeaseState.ACTIVE,
    (
        Member(0, MemberState.LEAVING, "node-12", "ab" * 28, "10.0.0.7", "cd" * 18, 4, 99.9),
        Member(1),
    ),
    epoch=5,
    form_timeout_s=12.5,
    created_at_s=10.123456789,
    forming_since_s=11.0,
    reason="one leaves",
)
SERVE = ServeSpec(
    name="tiny", model="/models/tiny", team="blue", replicas=Replicas(min=2, max=4), engine={"dtype": "float32"}
)
INTERVAL = OpenInterval(
    "node-12",
    918_000,
    2_200_000,
    5_000_000,
    (Share(EntryKind.IDLE, "", "", 0.25), Share(EntryKind.JOB, "job-1", "blue", 0.75)),
)


def entry(**changes: object) -> Entry:
    return replace(Entry("node-12", 0, 10, EntryKind.JOB, "job-1", "blue", 918_000, 3), **changes)  # type: ignore[arg-type]


def admitted(job: Job) -> Job:
    return replace(job, state=JobState.ADMITTED, admitted_at_s=7.0, reason="it fits")


def test_a_job_comes_back_as_it_went_in(store: Store) -> None:
    job = store.submit_job(SPEC, "ada", 1.25)
    assert job == Job("job-1", SPEC, "ada", JobState.QUEUED, 1.25)
    assert store.job("job-1") == job
    assert store.load().jobs == (job,)


def test_what_the_controller_commits_is_what_it_loads(store: Store) -> None:
    job = admitted(store.submit_job(SPEC, "ada", 1.0))
    endpoint = replace(
        store.save_endpoint(SERVE, "ada", 2.0), state=EndpointState.RUNNING, target_replicas=3, low_since_s=8.5
    )
    pool = Pool("spot-a", "z1", 3, 60.5, "no stock")
    store.commit(
        Changes(9.0, (job,), (LEASE,), (NODE,), (endpoint,), (pool,), (entry(),), (INTERVAL,), plan=Plan(9.0, ()))
    )
    records = store.load()
    assert records.jobs == (job,)
    assert records.leases == (LEASE,)
    assert records.nodes == (NODE,)
    assert records.endpoints == (endpoint,)
    assert records.pools == (pool,)
    assert records.intervals == {"node-12": INTERVAL}
    assert (records.next_node, records.next_lease) == (13, 4)
    assert store.books.entries() == (entry(),)
    assert store.books.intervals() == (INTERVAL,)
    assert store.lease_of("job-1") == LEASE
    assert store.nodes() == (NODE,)


def test_what_is_final_is_not_loaded_but_can_be_read(store: Store) -> None:
    job = store.submit_job(SPEC, "ada", 1.0)
    store.save_endpoint(SERVE, "ada", 1.0)
    ended = replace(job, state=JobState.SUCCEEDED, ended_at_s=5.0)
    gone, released = replace(NODE, state=NodeState.GONE, ended_at_s=6.0), replace(LEASE, state=LeaseState.RELEASED)
    deleted = replace(store.endpoint("tiny"), state=EndpointState.DELETED, ended_at_s=7.0)
    store.commit(Changes(9.0, (ended,), (released,), (gone,), (deleted,)))
    records = store.load()
    assert (records.jobs, records.leases, records.nodes, records.endpoints) == ((), (), (), ())
    assert store.job("job-1") == ended
    assert store.lease_of("job-1") == released
    assert store.nodes() == (gone,)
    assert store.endpoints() == ()
    assert store.endpoints(ended=True) == (deleted,)


def test_an_open_interval_is_loaded_until_it_is_closed_also_of_a_node_that_is_gone(store: Store) -> None:
    store.commit(Changes(1.0, nodes=(replace(NODE, state=NodeState.GONE),), intervals=(INTERVAL,)))
    assert store.load().intervals == {"node-12": INTERVAL}
    store.commit(Changes(2.0, entries=(entry(),), closed=("node-12",)))
    assert store.load().intervals == {}


def test_ids_are_never_given_twice(store: Store, url: str) -> None:
    store.commit(Changes(1.0, nodes=(NODE,)))
    store.commit(Changes(2.0, nodes=(replace(NODE, id="node-2"),)))
    assert store.load().next_node == 13
    ids = {store.submit_job(SPEC, "ada", 1.0).id for _ in range(3)}
    again = Store.open(url)
    assert again.submit_job(SPEC, "ada", 1.0).id == "job-4"
    assert ids == {"job-1", "job-2", "job-3"}
    again.close()


def test_jobs_submitted_at_once_from_many_threads_have_different_ids(store: Store) -> None:
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(store.submit_job(SPEC, "ada", 1.0).id)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == sorted(f"job-{n}" for n in range(1, 13))


def test_submitting_again_with_the_same_key_returns_the_first_job(store: Store) -> None:
    first = store.submit_job(SPEC, "ada", 1.0, key="k")
    assert store.submit_job(SPEC, "ada", 2.0, key="k") == first
    assert store.submit_job(SPEC, "bob", 2.0, key="k") == first, "it is their team's"
    assert store.submit_job(SPEC.model_copy(update={"team": "red"}), "ada", 2.0, key="k").id == "job-2"


def test_two_requests_with_one_key_at_once_are_one_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def check_together(*args: object) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits for this one's commit
            both.wait(0.5)

    monkeypatch.setattr("raytide.core.state.store.check_live_jobs", check_together)
    with ThreadPoolExecutor(2) as threads:
        jobs = list(threads.map(lambda user: store.submit_job(SPEC, user, 1.0, key="k"), ("ada", "bob")))
    assert jobs[0] == jobs[1]
    assert len(store.load().jobs) == 1


def test_requests_at_once_do_not_pass_the_limit_of_live_jobs_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def check_together(*args: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        check_live_jobs(*args)

    def submitted(user: str) -> bool:
        try:
            store.submit_job(SPEC, user, 1.0, most_live=1)
        except QuotaError:
            return False
        return True

    monkeypatch.setattr("raytide.core.state.store.check_live_jobs", check_together)
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(submitted, ("ada", "bob"))) == [False, True]


def test_the_loss_of_a_thousand_nodes_at_once_is_booked(store: Store) -> None:
    """As in an outage of a zone. A commit that the database refuses would stop the controller for good."""
    names = [f"node-{7 * number}" for number in range(1000, 2000)]
    one = replace(store.submit_job(SPEC, "ada", 1.0), progress={"lost_s": 20.0, "lost_at_s": 100.0}, held_s=100.0)
    of_earlier_release = replace(one, struck_at_s=95.0, struck_by=", ".join(names))
    for node_id, struck in (("node-1", on_disruption(one, names, 95.0)), ("node-2", of_earlier_release)):
        booked = Entry(node_id, 0, 100_000_000, EntryKind.JOB, "job-1", "blue", 1, 1000)
        losses = book_losses([struck], [booked], lambda *_: (), 110.0)
        store.commit(Changes(110.0, jobs=losses.jobs, entries=(booked, *losses.entries)))
    wasted = [entry for entry in store.books.entries() if entry.kind is EntryKind.WASTE]
    assert [entry.amount_micro_usd for entry in wasted] == [200, 200]
    assert all(entry.cause.startswith("node-7000, node-7007") for entry in wasted)


def test_a_key_names_what_was_asked_for_with_it(store: Store) -> None:
    first = store.submit_job(SPEC, "ada", 1.0, key="k", digest="abc")
    assert store.submit_job(SPEC, "ada", 2.0, key="k", digest="abc") == first
    with pytest.raises(ConflictError, match="key k of team blue was used for job-1"):
        store.submit_job(SPEC, "ada", 2.0, key="k", digest="def")
    assert store.jobs() == (first,)


def test_what_a_commit_touched_is_found_without_reading_the_rest(store: Store) -> None:
    jobs = [store.submit_job(SPEC, "ada", 1.0) for _ in range(3)]
    before = store.census.version()
    store.commit(Changes(2.0, jobs=(admitted(jobs[1]),), leases=(replace(LEASE, job_id="job-3"),)))
    after = store.census.version()
    assert after > before
    assert store.census.touched_since(before) == {"job-2", "job-3"}
    assert store.census.touched_since(after) == set()
    store.commit(Changes(3.0, nodes=(NODE,)))
    assert store.census.version() == after


def test_heartbeats_of_many_jobs_are_written_together(store: Store) -> None:
    jobs = [store.submit_job(SPEC, "ada", 1.0) for _ in range(3)]
    store.heartbeats({jobs[0].id: 5.0, jobs[2].id: 4.0, "job-99": 5.0})
    assert [store.job(job.id).heartbeat_at_s for job in jobs] == [5.0, None, 4.0]


def test_the_api_and_the_controller_do_not_undo_each_other(store: Store, url: str) -> None:
    """The controller commits what it loaded before the API wrote."""
    api = Store.open(url)
    job = store.submit_job(SPEC, "ada", 1.0)
    endpoint = store.save_endpoint(SERVE, "ada", 1.0)
    api.request_stop("job-1")
    api.report("job-1", {"step": 3}, 4.0)
    api.release("job-1", error="it broke")
    bigger = SERVE.model_copy(update={"replicas": Replicas(min=1, max=9)})
    api.save_endpoint(bigger, "ada", 2.0)
    api.request_delete("tiny")
    store.commit(
        Changes(5.0, (admitted(job),), endpoints=(replace(endpoint, state=EndpointState.RUNNING, target_replicas=4),))
    )
    after = api.job("job-1")
    assert (after.state, after.stop_requested, after.progress, after.heartbeat_at_s) == (
        JobState.ADMITTED,
        True,
        {"step": 3},
        4.0,
    )
    assert after.released_by_driver == "it broke"
    assert (api.endpoint("tiny").state, api.endpoint("tiny").spec, api.endpoint("tiny").target_replicas) == (
        EndpointState.DELETING,
        bigger,
        4,
    )
    api.close()


def test_reports_add_up_and_keep_numbers_that_json_lacks(store: Store) -> None:
    store.submit_job(SPEC, "ada", 1.0)
    store.report("job-1", {"step": 1, "loss": 2.5, "who": "a\0b"}, 2.0)
    store.report("job-1", {"step": 2, "loss": float("nan")}, 3.0)
    job = store.job("job-1")
    assert job.progress == {"step": 2, "loss": "nan", "who": "a\0b"}
    assert job.heartbeat_at_s == 3.0
    assert store.heartbeat("job-1", 4.0).heartbeat_at_s == 4.0


def test_a_report_in_any_script_may_have_as_many_characters(store: Store) -> None:
    store.submit_job(SPEC, "ada", 1.0)
    text = "\u753b" * MOST_REPORTED_CHARS
    store.report("job-1", {"error": text}, 2.0)
    assert store.job("job-1").progress == {"error": text}
    with pytest.raises(UsageError, match="larger than 16 KiB"):
        store.report("job-1", {"more": text}, 3.0)


def test_a_reason_with_a_nul_is_kept_without_it(store: Store) -> None:
    job = store.submit_job(SPEC, "ada", 1.0)
    store.commit(Changes(2.0, (replace(job, reason="core\0dump"),)))
    assert store.job("job-1").reason == "coredump"


def test_transitions_become_events_and_nothing_else_does(store: Store) -> None:
    job = store.submit_job(SPEC, "ada", 1.0)
    store.commit(Changes(7.0, (admitted(job),), nodes=(NODE,), events=(Event(7.0, "fleet", "", "odd", "noted"),)))
    store.commit(Changes(8.0, (admitted(job),), nodes=(replace(NODE, state=NodeState.GONE, reason="ended"),)))
    assert store.events("job-1") == (
        Event(1.0, "job-1", "", "queued", "submitted by ada"),
        Event(7.0, "job-1", "queued", "admitted", "it fits"),
    )
    assert [(e.from_state, e.to_state) for e in store.events("node-12")] == [("", "draining"), ("draining", "gone")]
    assert store.events("fleet")[0].reason == "noted"
    assert [e.subject for e in store.events(limit=1)] == ["node-12"]


def test_a_commit_that_books_twice_writes_nothing_at_all(store: Store) -> None:
    job = store.submit_job(SPEC, "ada", 1.0)
    store.commit(Changes(2.0, entries=(entry(),)))
    with pytest.raises(ConflictError, match="refused a row"):
        store.commit(
            Changes(3.0, (admitted(job),), nodes=(NODE,), entries=(entry(subject="x"), entry(amount_micro_usd=4)))
        )
    assert store.load().jobs == (job,)
    assert store.load().nodes == ()
    assert store.books.entries() == (entry(),)


def test_a_reversal_is_not_a_second_booking(store: Store) -> None:
    store.commit(Changes(2.0, entries=(entry(), entry(amount_micro_usd=-3, is_reversal=True))))
    assert store.books.booked("job") == {"job-1": 0}


def test_what_jobs_and_teams_spent_is_found_by_a_key_and_not_by_a_scan(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/state.db")
    database.upgrade()
    said: list[tuple[str, object]] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *args: said.append((args[2], args[3])))
    LedgerQueries(database).spent(["job-1", "job-2"], "2026-11")
    with database.read() as c:
        for statement, values in [each for each in said if "totals" in each[0]]:
            (*_, how), *_ = c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()  # type: ignore[arg-type]
            assert "SEARCH totals USING INDEX" in how
    database.engine.dispose()


def test_the_jobs_of_the_month_are_summed_once_and_then_only_what_is_booked(store: Store) -> None:
    october, november = datetime(2026, 10, 31, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)
    said: list[str] = []
    sa.event.listen(store._db.engine, "before_cursor_execute", lambda *args: said.append(args[2]))

    def book(node_id: str, at: datetime, team: str, amount: int, **more: Any) -> None:
        from_us = to_us(at.timestamp())
        changes = {"node_id": node_id, "from_us": from_us, "to_us": from_us + 10, "team": team, **more}
        store.commit(Changes(1.0, entries=(entry(**changes, amount_micro_usd=amount),)))

    def spent(month: str = "2026-11") -> dict[str, int]:
        said.clear()
        return dict(store.books.spent([], month).teams_month)

    def summed() -> bool:
        return any("totals" in statement for statement in said)

    assert (spent(), summed()) == ({}, True)
    book("node-1", november, "blue", 5)
    book("node-2", october, "blue", 100)
    book("node-3", november, "red", 7)
    assert (spent(), summed()) == ({"blue": 5, "red": 7}, False)
    book("node-3", november, "red", -2, is_reversal=True)
    assert (spent(), summed()) == ({"blue": 5, "red": 5}, False)
    assert (spent("2026-10"), summed()) == ({"blue": 100}, True)
    assert (spent(), summed()) == ({"blue": 5, "red": 5}, True)


def test_what_is_read_all_the_time_does_not_scan_what_has_ended(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/state.db")
    said: list[tuple[str, Any]] = []
    sa.event.listen(store._db.engine, "before_cursor_execute", lambda *args: said.append((args[2], args[3])))
    store.load()
    store.nodes(live=True)
    store.jobs(active=True)
    store.census.live_jobs()
    store.census.live_members()
    store.overview.jobs(ended_after_s=1.0, limit=2000)
    store.overview.entries(subject="job-1", limit=100)
    store.books.entries(subject="job-1", ending_after_us=1)
    store.books.entries(node_id="node-1", ending_after_us=1)
    store.remove_old_jobs(1.0)
    with store._db.read() as c:
        asked = [each for each in said if each[0].startswith("SELECT")]
        plans = {text: c.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all() for text, values in asked}
    grown = tuple(f"SCAN {table}" for table in ("jobs", "leases", "members", "nodes", "entries"))
    assert [text for text, steps in plans.items() if any(step[3].startswith(grown) for step in steps)] == []
    store.close()


def test_any_number_of_jobs_can_be_named(store: Store) -> None:
    made = store.submit_job(SPEC, "ada", 1.0)
    ids = [f"job-{number}" for number in range(2, 70_000)]
    assert store.jobs_of([*ids, made.id]) == (made,)
    assert store.jobs_of([]) == ()


def test_more_ids_than_a_statement_can_name_are_read_booked_and_committed(store: Store) -> None:
    """SQLite names 250,000 values in one statement at most, PostgreSQL 65,535."""
    made = store.submit_job(SPEC, "ada", 1.0)
    ids = [*(f"job-{number}" for number in range(2, 250_002)), made.id]
    lease = replace(LEASE, members=())
    store.commit(Changes(2.0, leases=(lease,), entries=(entry(),), intervals=(INTERVAL,)))
    assert store.census.leases(ids) == {made.id: lease}
    assert store.books.booked("job", only=ids) == {made.id: 3}
    assert store.books.spent(ids, "1970-01").jobs == {made.id: 3}
    store.commit(Changes(3.0, closed=(*ids, INTERVAL.node_id)))
    assert store.books.intervals() == ()
    with store._db.read() as c:
        queued = [replace(made, id=job_id) for job_id in ids]
        assert len(transitions(c, tables.jobs.c.id, queued, 1.0)) == 250_000


def test_all_live_nodes_are_read_however_many_there_are(store: Store) -> None:
    nodes = tuple(replace(NODE, id=f"node-{number}") for number in range(1, 1501))
    store.commit(Changes(1.0, nodes=nodes))
    store.commit(Changes(2.0, nodes=(replace(nodes[0], state=NodeState.GONE),)))
    assert len(store.nodes(live=True)) == 1499
    assert sum(node.price_micro_usd_h for node in store.nodes(live=True)) == 1499 * NODE.price_micro_usd_h
    assert [node.id for node in store.nodes(limit=2)] == ["node-1500", "node-1499"]


def test_sums_group_by_each_column(store: Store) -> None:
    store.commit(
        Changes(
            1.0,
            entries=(
                entry(),
                entry(from_us=10, to_us=20, amount_micro_usd=4),
                entry(node_id="node-2", kind=EntryKind.ENDPOINT, subject="tiny", team="red", amount_micro_usd=2**40),
                entry(node_id="node-2", kind=EntryKind.IDLE, subject="", team="", amount_micro_usd=5),
            ),
        )
    )
    books = store.books
    assert books.booked("job") == {"job-1": 7}
    assert books.booked("endpoint") == {"tiny": 2**40}
    assert books.booked("team") == {"blue": 7, "red": 2**40, "": 5}
    assert books.booked("node") == {"node-12": 7, "node-2": 2**40 + 5}
    lines = {(line.kind, line.subject, line.team): line.amount_micro_usd for line in books.lines()}
    assert lines == {("job", "job-1", "blue"): 7, ("endpoint", "tiny", "red"): 2**40, ("idle", "", ""): 5}
    assert [line.amount_micro_usd for line in books.lines(since_us=10)] == [4]
    assert [e.from_us for e in books.entries(node_id="node-12", ending_after_us=10)] == [10]
    assert [e.subject for e in books.entries(subject="tiny")] == ["tiny"]


def test_how_old_all_jobs_but_a_share_ever_got(store: Store) -> None:
    assert store.census.oldest_s(0.1, 5.0) == 0.0
    jobs = [store.submit_job(SPEC, "ada", float(n)) for n in range(10)]
    done = [replace(job, state=JobState.SUCCEEDED, ended_at_s=30.0) for job in jobs[:5]]
    store.commit(Changes(30.0, jobs=tuple(done)))
    ages = [store.census.oldest_s(share / 10, 100.0) for share in range(10)]
    assert ages == [95.0, 94.0, 93.0, 92.0, 91.0, 30.0, 29.0, 28.0, 27.0, 26.0]


def test_old_finished_jobs_are_removed_in_batches_and_their_costs_stay(store: Store) -> None:
    jobs = [store.submit_job(SPEC, "ada", 0.0) for _ in range(5)]
    lease = replace(LEASE, id="lease-1", job_id=jobs[0].id, state=LeaseState.RELEASED)
    done = [replace(job, state=JobState.SUCCEEDED, ended_at_s=10.0 * number) for number, job in enumerate(jobs[:4])]
    booked = entry(subject=jobs[0].id)
    store.commit(Changes(1.0, jobs=tuple(done), leases=(lease,), entries=(booked,)))
    from raytide.core.state.write import remove_jobs

    with store._db.write() as c:
        assert remove_jobs(c, 25.0, limit=2) == 2
    assert [job.id for job in store.jobs()] == [job.id for job in jobs[:1:-1]]
    assert store.lease_of(jobs[0].id) is None
    assert store.events("lease-1") == store.events(jobs[0].id) == ()
    assert store.remove_old_jobs(25.0) == 1
    assert store.remove_old_jobs(25.0) == 0
    assert [job.id for job in store.jobs()] == [jobs[4].id, jobs[3].id], "unfinished and recent jobs stay"
    assert store.books.booked("job") == {jobs[0].id: booked.amount_micro_usd}
    assert store.census.oldest_s(0.0, 50.0) == 50.0
    assert store.census.oldest_s(0.5, 50.0) == 30.0, "removed jobs do not count"
    assert store.submit_job(SPEC, "ada", 60.0).id == "job-6", "ids are never reused"


def test_jobs_are_paged_newest_first(store: Store) -> None:
    for team in ("blue", "red", "blue"):
        job = store.submit_job(SPEC.model_copy(update={"team": team}), "ada", 1.0)
    store.commit(Changes(2.0, (replace(job, state=JobState.FAILED),)))
    assert [j.id for j in store.jobs()] == ["job-3", "job-2", "job-1"]
    assert [j.id for j in store.jobs(limit=1, offset=1)] == ["job-2"]
    assert [j.id for j in store.jobs(active=True)] == ["job-2", "job-1"]
    assert [j.id for j in store.jobs(team="blue")] == ["job-3", "job-1"]


def test_a_plan_that_decides_the_same_again_is_stored_once(store: Store) -> None:
    launch = Launch("node-1", "spot-a", "z1", "lease-1", "it needs one")
    store.commit(Changes(1.0, plan=Plan(1.0, (Wait("job-1", "capacity", "full"),))))
    store.commit(Changes(2.0, plan=Plan(2.0, (launch,))))
    store.commit(Changes(3.0, plan=Plan(3.0, (launch,))))
    assert [(p.at_s, p.last_at_s) for p in store.plans()] == [(1.0, 1.0), (2.0, 3.0)]
    assert [p.at_s for p in store.plans(since_s=2.5)] == [2.0]
    assert [p.at_s for p in store.plans(limit=1, until_s=1.5)] == [1.0]
    assert store.plans(limit=1)[0].actions[0]["node_id"] == "node-1"


def test_only_the_newest_plans_are_kept(store: Store) -> None:
    for second in range(5):
        store.commit(Changes(second, plan=Plan(second, (Wait("job-1", "capacity", f"{second}"),))))
    assert len(store.plans(limit=KEPT_PLANS)) == 5
    from raytide.core.state import write as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEPT_PLANS", 3)
        store.commit(Changes(9.0, plan=Plan(9.0, ())))
    assert [p.at_s for p in store.plans()] == [3.0, 4.0, 9.0]


def test_only_the_newest_events_of_each_subject_are_kept_and_every_entry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.core.state.write.KEPT_EVENTS", 3)
    for second in range(1, 8):
        event = Event(float(second), "node-1", "a", "b", f"{second}")
        other = (Event(1.0, "node-2", "", "a"),) if second == 1 else ()
        store.commit(Changes(second, entries=(entry(from_us=second, to_us=second + 1),), events=(event, *other)))
    assert [event.reason for event in store.events("node-1")] == ["5", "6", "7"]
    assert len(store.events("node-2")) == 1
    assert len(store.books.entries()) == 7


def test_an_endpoint_lives_and_can_be_made_again_after_its_end(store: Store) -> None:
    assert store.save_endpoint(SERVE, "ada", 1.0).target_replicas == 2
    assert store.request_delete("tiny").state is EndpointState.DELETING
    with pytest.raises(ConflictError, match="tiny is being deleted"):
        store.save_endpoint(SERVE, "bob", 2.0)
    deleted = replace(store.endpoint("tiny"), state=EndpointState.DELETED, ended_at_s=3.0, reason="asked")
    store.commit(Changes(3.0, endpoints=(deleted,)))
    again = store.save_endpoint(SERVE, "bob", 4.0)
    assert (again.user, again.state, again.created_at_s, again.ended_at_s) == (
        "bob",
        EndpointState.DEPLOYING,
        4.0,
        None,
    )


def test_an_endpoint_that_failed_is_created_anew_when_it_is_asked_for_again(store: Store) -> None:
    first = store.save_endpoint(SERVE, "ada", 1.0)
    assert store.save_endpoint(SERVE, "ada", 2.0).created_at_s == 1.0
    store.commit(Changes(3.0, endpoints=(replace(first, state=EndpointState.FAILED, reason="no config.json"),)))
    again = store.save_endpoint(SERVE, "ada", 4.0)
    assert (again.created_at_s, again.state, again.reason) == (4.0, EndpointState.DEPLOYING, "")
    assert store.events("tiny")[-1] == Event(4.0, "tiny", "failed", "deploying", "requested by ada")


def test_a_spec_whose_update_failed_is_tried_anew_when_it_is_asked_for_again(store: Store) -> None:
    """The same spec would otherwise be no change, and Serve would never try it again."""
    first = store.save_endpoint(SERVE, "ada", 1.0)
    running = replace(first, state=EndpointState.RUNNING, reason=f"{UPDATE_FAILED}the store was away")
    store.commit(Changes(3.0, endpoints=(running,)))
    again = store.save_endpoint(SERVE, "ada", 4.0)
    assert (again.created_at_s, again.state, again.reason) == (4.0, EndpointState.RUNNING, "")


def test_another_team_cannot_take_over_an_endpoint_by_its_name(store: Store) -> None:
    mine = store.save_endpoint(SERVE, "ada", 1.0)
    with pytest.raises(ConflictError, match=f"belongs to team {SERVE.team}"):
        store.save_endpoint(SERVE.model_copy(update={"team": "theirs", "model": "/other"}), "eve", 2.0)
    assert store.endpoint("tiny") == mine


@pytest.mark.parametrize("verb", ["job", "request_stop", "release"])
def test_an_unknown_job_is_named(store: Store, verb: str) -> None:
    with pytest.raises(NotFoundError, match="job-9"):
        getattr(store, verb)("job-9")


def test_unknown_names_are_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="job-9"):
        store.report("job-9", {}, 1.0)
    with pytest.raises(NotFoundError, match="nope"):
        store.endpoint("nope")
    with pytest.raises(NotFoundError, match="nope"):
        store.request_delete("nope")
    assert store.lease_of("job-9") is None


def test_the_package_loads_without_sqlalchemy_until_the_store_is_named() -> None:
    code = "import sys, raytide.core.state as s; assert not {0}; s.Store; assert {0}".format(
        "'sqlalchemy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": _root()})
    with pytest.raises(ImportError):
        from raytide.core.state import Stor  # type: ignore[attr-defined] # noqa: F401


@pytest.mark.parametrize("url", ["nonsense", "mysql://h/d", "sqlite://"])
def test_a_url_that_cannot_hold_state_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open(url)
    assert "sqlite:////path" in caught.value.hint


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is not a database, it only looks like a file" * 100)
    with pytest.raises(StorageError, match=r"state\.db"):
        Store.open(f"sqlite:///{tmp_path}/state.db")


def test_a_full_disk_is_a_clear_error_and_what_was_written_before_stays(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/state.db")
    store.submit_job(SPEC, "ada", 1.0)
    with store._db.read() as c:
        pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
        c.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # of this connection, which the pool hands out again
    big = SPEC.model_copy(update={"config": {"x": "y" * 1_000_000}})
    with pytest.raises(StorageError, match="full") as caught:
        store.submit_job(big, "ada", 1.0)
    assert "no partial write" in caught.value.hint
    assert store.job("job-1").spec == SPEC
    store.close()


def _root() -> str:
    import raytide

    return str(Path(next(iter(raytide.__path__))).parent)
