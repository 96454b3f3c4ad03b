"""The API's reads do not grow with the number of jobs: statements and rows are counted, not time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.control.conftest import NoMachines
from tests.stores import new_store

from raytide.control.api.auth import Caller
from raytide.control.api.services.service import ApiService
from raytide.control.views import Live, to_json
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.state import Changes, Store, codec, tables

LOCAL = Path(__file__).parents[3] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
SHAPE = Shape(members=1, resources={"CPU": 1})
SPEC = JobSpec(kind=JobKind.GANG, name="many", gang=GangSpec(shapes=(SHAPE,)))
ANA = Caller("ana", "default")
QUEUED, DONE = 5_000, 5_000


@dataclass
class Reads:
    statements: int = 0
    rows: int = 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Half of the jobs are over, each with a lease and an entry; the other half wait."""
    opened = new_store(tmp_path_factory.mktemp("scale"))
    done = {"state": JobState.SUCCEEDED, "admitted_at_s": 2.0, "ended_at_s": 3.0}
    jobs = [codec.new_job(number, SPEC, "ana", 1.0, None) for number in range(1, DONE + QUEUED + 1)]
    with opened._db.write() as c:
        c.execute(tables.jobs.insert(), [{**job, "admitted_at_s": None, "ended_at_s": None} for job in jobs])
        c.execute(tables.jobs.update().where(tables.jobs.c.number <= DONE).values(**done))
    leases = [Lease(f"lease-{n}", f"job-{n}", SHAPE, LeaseState.RELEASED, (Member(0),)) for n in range(1, DONE + 1)]
    entries = [Entry("node-1", n, n + 1, EntryKind.JOB, f"job-{n}", "default", 1, 1) for n in range(1, DONE + 1)]
    opened.commit(Changes(at_s=4.0, leases=tuple(leases), entries=tuple(entries)))
    yield opened
    opened.close()


@pytest.fixture
def desk(store: Store, tmp_path: Path) -> ApiService:
    live = tmp_path / "live.json"
    queue = tuple(f"job-{number}" for number in range(DONE + 1, DONE + QUEUED + 1))
    live.write_text(json.dumps(to_json(Live(9.0, queue=queue))))
    return ApiService(
        store=store,
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=None,  # type: ignore[arg-type]
        clock=VirtualClock(10.0),
        live=live,
        serve_url="",
        ray_url="",
        ray_environment={},
    )


@contextmanager
def counted(store: Store) -> Iterator[Reads]:
    reads, engine = Reads(), store._db.engine

    def row(cursor: object, values: tuple[Any, ...]) -> tuple[Any, ...]:
        reads.rows += 1
        return values

    def checkout(connection: Any, record: object, proxy: object) -> None:
        connection.row_factory = row

    def execute(connection: object, cursor: object, statement: str, *_: object) -> None:
        reads.statements += statement.startswith("SELECT")

    def checkin(connection: Any, record: object) -> None:
        if connection is not None:
            connection.row_factory = None

    listeners: dict[str, Callable[..., None]] = {
        "checkout": checkout,
        "checkin": checkin,
        "after_cursor_execute": execute,
    }
    for name, listener in listeners.items():
        sa.event.listen(engine, name, listener)
    try:
        yield reads
    finally:
        for name, listener in listeners.items():
            sa.event.remove(engine, name, listener)


def test_one_job_among_ten_thousand_is_shown_with_its_place_in_a_few_rows(desk: ApiService, store: Store) -> None:
    with counted(store) as reads:
        view = desk.jobs.job(f"job-{DONE + 7}", ANA)
    assert view.position == 7
    assert 0 < reads.rows <= 10
    assert 0 < reads.statements <= 6


def test_a_page_of_jobs_reads_as_often_as_one_job_and_no_more_rows_than_it_shows(
    desk: ApiService, store: Store
) -> None:
    with counted(store) as one:
        assert len(desk.jobs.page(ANA, 1, QUEUED)) == 1
    with counted(store) as page:
        views = desk.jobs.page(ANA, 100, QUEUED)
    assert [view.cost_micro_usd for view in views] == [1] * 100
    assert all(view.lease is not None and len(view.lease.members) == 1 for view in views)
    assert page.statements == one.statements
    assert page.rows <= 5 * 100


def test_the_status_counts_jobs_without_reading_them(desk: ApiService, store: Store) -> None:
    with counted(store) as reads:
        status = desk.status(Caller("root", "*"))
    assert status.jobs == {"queued": QUEUED, "succeeded": DONE}
    assert status.cost_micro_usd == DONE
    assert 0 < reads.rows <= 10


def test_metrics_count_jobs_without_reading_them(desk: ApiService, store: Store) -> None:
    with counted(store) as reads:
        text = desk.metrics().decode()
    assert f'raytide_jobs{{kind="gang",state="queued",team="default"}} {QUEUED}.0' in text
    assert reads.rows <= 10
