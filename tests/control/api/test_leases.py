"""Waiting for leases: statements of the store are counted, not time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

import pytest
import sqlalchemy as sa
from starlette.types import Message
from tests.control.api.test_scale import SHAPE, SPEC

from raytide.control.api.services.leases import LeasePolls, PolledLease
from raytide.core.clock import VirtualClock
from raytide.core.errors import DeniedError, LeaseLostError, NotFoundError
from raytide.core.objects.gang import Lease, LeaseState, Member
from raytide.core.objects.job import Job, JobState
from raytide.core.state import Changes, Store, codec, tables

WAITERS = 1_000
LONG_S = 60.0


@dataclass
class Counted:
    reads: int = 0
    writes: int = 0


@contextmanager
def counted(store: Store) -> Iterator[Counted]:
    found = Counted()

    def execute(connection: object, cursor: object, statement: str, *_: object) -> None:
        found.reads += statement.startswith("SELECT")
        found.writes += statement.startswith(("UPDATE", "INSERT", "DELETE"))

    sa.event.listen(store._db.engine, "after_cursor_execute", execute)
    try:
        yield found
    finally:
        sa.event.remove(store._db.engine, "after_cursor_execute", execute)


@pytest.fixture
def leases(store: Store, monkeypatch: pytest.MonkeyPatch) -> LeasePolls:
    """Returns the polls of a thousand jobs that wait; the watcher looks when a test says so."""
    jobs = [codec.new_job(number, SPEC, "ana", 1.0, None) for number in range(1, WAITERS + 1)]
    with store._db.write() as c:
        c.execute(tables.jobs.insert(), jobs)
    monkeypatch.setattr(LeasePolls, "_keep_watching", lambda self: None)
    return LeasePolls(store, VirtualClock(100.0))


async def silent() -> Message:
    """A client that neither sends anything nor goes away."""
    await asyncio.Event().wait()
    raise AssertionError


def anybody(job: Job) -> None:
    pass


def poll(
    leases: LeasePolls, job_id: str, newer_than: int = -1, timeout_s: float = LONG_S
) -> asyncio.Task[bytes | None]:
    return asyncio.create_task(leases.wait(job_id, anybody, newer_than, timeout_s, silent))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 -- it waits for the state of what is tested
        await asyncio.sleep(0.001)


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120.0):
            await work

    asyncio.run(bounded())


def granted(store: Store, number: int, epoch: int = 0) -> Lease:
    lease = Lease(f"lease-{number}", f"job-{number}", SHAPE, LeaseState.ACTIVE, (Member(0),), epoch=epoch)
    store.commit(Changes(2.0, leases=(lease,)))
    return lease


def test_a_thousand_that_wait_cost_one_read_a_look_and_one_write_a_second(leases: LeasePolls, store: Store) -> None:
    async def work() -> None:
        polls = [poll(leases, f"job-{number}") for number in range(1, WAITERS + 1)]
        await until(lambda: len(leases._waiting) == WAITERS)
        await leases._refresh()
        with counted(store) as quiet:
            for _ in range(10):
                await leases._refresh()
        assert (quiet.reads, quiet.writes) == (10, 0)
        with counted(store) as beats:
            leases._start_beats()
            assert leases._beater is not None
            await leases._beater
        assert (beats.reads, beats.writes) == (0, 1), "one statement for all of them"
        assert {job.heartbeat_at_s for job in store.jobs(limit=WAITERS)} == {100.0}
        with counted(store) as changed:
            granted(store, 7)
            writes = changed.reads
            await leases._refresh()
            assert json.loads(await polls[6] or b"")["id"] == "lease-7"
        assert changed.reads - writes <= 8, "and nobody else's lease is read"
        assert sum(each.done() for each in polls) == 1
        with counted(store) as again:
            polls[6] = poll(leases, "job-7", newer_than=0)
            await until(lambda: len(leases._waiting) == WAITERS)
        assert (again.reads, again.writes) == (0, 0), "what nothing changed is answered from memory"
        for each in polls:
            each.cancel()

    run(work())


def test_a_change_is_told_whenever_it_comes(leases: LeasePolls, store: Store) -> None:
    """Also when it comes between the first read and the wait, or while the watcher reads."""

    async def work() -> None:
        first = poll(leases, "job-1")
        await until(lambda: "job-1" in leases._waiting)
        granted(store, 2)
        await leases._refresh()
        granted(store, 1)
        second = poll(leases, "job-1", newer_than=0)  # answered from memory: it waits
        await until(lambda: len(leases._waiting["job-1"]) == 2)
        granted(store, 1, epoch=1)
        await leases._refresh()
        assert [json.loads(await each or b"")["epoch"] for each in (first, second)] == [1, 1]

    run(work())


def test_who_looks_while_the_watcher_reads_misses_nothing(leases: LeasePolls, store: Store) -> None:
    async def work() -> None:
        read, waiting = leases._read_changed, poll(leases, "job-1")
        await until(lambda: "job-1" in leases._waiting)
        late = leases._read(["job-2"])["job-2"]
        granted(store, 2)

        def slow(seen: dict[str, PolledLease], version: int) -> dict[str, PolledLease]:
            found = read(seen, version)
            leases._leases["job-2"], leases._is_grown = late, True  # arrives while the watcher reads what changed
            return found

        leases._read_changed = slow  # type: ignore[method-assign]
        await leases._refresh()
        other = poll(leases, "job-2")
        await until(lambda: "job-2" in leases._waiting)
        await leases._refresh()
        assert json.loads(await other or b"")["id"] == "lease-2"
        waiting.cancel()

    run(work())


def test_the_end_of_a_job_ends_the_wait_and_time_does_too(leases: LeasePolls, store: Store) -> None:
    async def work() -> None:
        lost, late = poll(leases, "job-1"), poll(leases, "job-2", timeout_s=0.01)
        assert json.loads(await late or b"")["state"] == "waiting"
        await until(lambda: "job-1" in leases._waiting)
        store.commit(Changes(3.0, jobs=(replace(store.job("job-1"), state=JobState.STOPPING, reason="asked"),)))
        await leases._refresh()
        with pytest.raises(LeaseLostError, match="job-1 is stopping"):
            await lost
        with pytest.raises(NotFoundError):
            await poll(leases, "job-99999")
        assert leases._waiting == {}

    run(work())


def test_who_may_not_see_a_job_is_refused_also_from_memory(leases: LeasePolls) -> None:
    def nobody(job: Job) -> None:
        raise DeniedError("no")

    async def work() -> None:
        mine = poll(leases, "job-1")
        await until(lambda: "job-1" in leases._waiting)
        for timeout_s in (0.0, LONG_S):
            with pytest.raises(DeniedError):
                await leases.wait("job-1", nobody, -1, timeout_s, silent)
        mine.cancel()

    run(work())


def test_a_driver_that_hangs_up_is_noticed_without_asking_it(leases: LeasePolls, store: Store) -> None:
    async def work() -> None:
        async def gone() -> Message:
            return {"type": "http.disconnect"}

        assert await leases.wait("job-1", anybody, -1, LONG_S, gone) is None
        leases._start_beats()
        assert leases._beater is not None
        await leases._beater
        assert store.job("job-1").heartbeat_at_s == -100.0
        mine = poll(leases, "job-1")
        await until(lambda: "job-1" in leases._waiting)
        leases._start_beats()
        await leases._beater
        assert store.job("job-1").heartbeat_at_s == 100.0, "it asked again"
        mine.cancel()

    run(work())


def test_the_watcher_ends_when_nobody_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.control.api.services.leases._KEPT_S", 0.0)
    monkeypatch.setattr("raytide.control.api.services.leases.POLL_S", 0.001)
    monkeypatch.setattr("raytide.control.api.services.leases.BEAT_S", 0.001)
    job = store.submit_job(SPEC, "ana", 1.0)
    leases = LeasePolls(store, VirtualClock(100.0))

    async def work() -> None:
        waits = poll(leases, job.id)
        await until(lambda: store.job(job.id).heartbeat_at_s == 100.0)
        granted(store, 1)
        assert json.loads(await waits or b"")["id"] == "lease-1"
        assert leases._watcher is not None
        with suppress(asyncio.CancelledError):
            await leases._watcher
        assert leases._leases == {}

    run(work())


def test_the_watcher_outlives_a_time_without_a_free_connection(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody answers the polls that wait or writes their heartbeats, and their gangs count as dead."""
    monkeypatch.setattr("raytide.control.api.services.leases.POLL_S", 0.001)
    job = store.submit_job(SPEC, "ana", 1.0)
    leases = LeasePolls(store, VirtualClock(100.0))
    refresh, pool, failed = leases._refresh, store._db.engine.pool, list[Exception]()

    async def noted() -> None:
        try:
            await refresh()
        except Exception as error:
            failed.append(error)
            raise

    async def work() -> None:
        waits = poll(leases, job.id)
        await until(lambda: job.id in leases._waiting)
        with ExitStack() as held, monkeypatch.context() as patch:
            patch.setattr(pool, "_timeout", 0.01)
            with suppress(sa.exc.TimeoutError):
                while True:
                    held.enter_context(store._db.engine.connect())
            await until(lambda: bool(failed))
        granted(store, 1)
        async with asyncio.timeout(20):
            assert json.loads(await waits or b"")["id"] == "lease-1"

    monkeypatch.setattr(leases, "_refresh", noted)
    run(work())


def test_a_preempted_gang_hears_that_it_is_queued_and_of_its_next_lease(leases: LeasePolls, store: Store) -> None:
    """Each lease counts its epochs from zero."""

    async def work() -> None:
        running = replace(store.job("job-1"), state=JobState.RUNNING)
        lease = granted(store, 1, epoch=2)
        waiting = poll(leases, "job-1", newer_than=2)
        await until(lambda: "job-1" in leases._waiting)
        released = replace(lease, state=LeaseState.RELEASED, epoch=4)
        store.commit(Changes(3.0, jobs=(replace(running, state=JobState.QUEUED),), leases=(released,)))
        await leases._refresh()
        async with asyncio.timeout(60):
            queued = json.loads(await waiting or b"")
        assert (queued["state"], queued["epoch"]) == ("waiting", -1)
        store.commit(Changes(4.0, jobs=(running,), leases=(replace(lease, id="lease-2", epoch=1),)))
        async with asyncio.timeout(60):
            assert json.loads(await poll(leases, "job-1", newer_than=2) or b"")["id"] == "lease-2"

    run(work())
