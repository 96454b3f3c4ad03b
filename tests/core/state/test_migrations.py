from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext

from raytide.core.errors import ConflictError
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, Spent
from raytide.core.state import Changes, Store
from raytide.core.state.database import _MIGRATIONS, Database
from raytide.core.state.tables import metadata

US = 1_000_000


def test_the_migrations_lead_to_the_tables_that_the_code_uses(url: str) -> None:
    database = Database(url)
    database.upgrade()
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.engine.dispose()


def test_what_an_older_release_booked_is_summed_and_its_jobs_are_kept(url: str, tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/now.db")
    spec = JobSpec(kind=JobKind.GANG, name="old", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    job = store.submit_job(spec, "ana", 1.0)
    lease = Lease("lease-1", job.id, spec.gang.shapes[0], LeaseState.WAITING, (Member(0),))
    nov, dec = 1_700_000_000 * US, 1_702_000_000 * US
    booked = [Entry("node-1", at, at + US, EntryKind.JOB, job.id, "blue", 1, 7) for at in (nov, nov + US, dec)]
    done = replace(store.submit_job(spec, "ana", 1.0), state=JobState.SUCCEEDED, ended_at_s=9.0)
    store.commit(Changes(2.0, jobs=(done,), leases=(lease,), entries=tuple(booked)))
    store.close()
    _copy_as_of("0001", Database(f"sqlite:///{tmp_path}/now.db"), Database(url))
    with closing(Store.open(url)) as store:
        assert store.books.spent([job.id], "2023-11") == Spent({job.id: 21}, {job.id: 14}, {"blue": 14})
        assert (store.job(job.id), store.job(done.id), store.lease_of(job.id)) == (job, done, lease)
        assert store.census.oldest_s(0.0, now_s=4.0) == 8.0


def test_a_key_that_two_users_of_a_team_used_stays_with_their_newest_job(url: str, tmp_path: Path) -> None:
    """An older release kept keys by user."""
    spec = JobSpec(kind=JobKind.GANG, name="old", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    store = Store.open(f"sqlite:///{tmp_path}/now.db")
    for user, team, key in (("ana", "blue", "a"), ("bob", "blue", "b"), ("ana", "red", "c"), ("ana", "red", None)):
        store.submit_job(spec.model_copy(update={"team": team}), user, 1.0, key=key)
    store.close()
    now, then = Database(f"sqlite:///{tmp_path}/now.db"), Database(url)
    _copy_as_of("0005", now, then)
    with then.write() as c:
        c.execute(sa.text("UPDATE jobs SET client_key = 'k', \"user\" = id WHERE number < 4"))
    then.engine.dispose()
    with closing(Store.open(url)) as store:
        blue, red = (spec.model_copy(update={"team": team}) for team in ("blue", "red"))
        assert store.submit_job(blue, "ana", 2.0, key="k", digest="any").id == "job-2"
        assert store.submit_job(red, "ana", 2.0, key="k", digest="any").id == "job-3"


def _copy_as_of(revision: str, now: Database, then: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with now.read() as source, then.write() as target:
        config.attributes["connection"] = target
        command.upgrade(config, revision)
        tables = sa.MetaData()
        tables.reflect(target)
        for table in tables.sorted_tables:
            if table.name in metadata.tables:
                known = metadata.tables[table.name].c
                for row in source.execute(sa.select(*(known[column.name] for column in table.c))).mappings().all():
                    target.execute(table.insert(), {**row})
    now.engine.dispose()
    then.engine.dispose()


def test_a_state_from_a_newer_release_is_refused_and_left_alone(url: str) -> None:
    Store.open(url).close()
    database = Database(url)
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConflictError, match=r"newer raytide \(schema 9999\)"):
        Store.open(url)
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    database.engine.dispose()


def test_a_head_that_waits_leaves_the_state_to_a_leader_of_an_older_release(url: str, tmp_path: Path) -> None:
    """The leader's controller and API open the state again when they restart."""
    now = Database(f"sqlite:///{tmp_path}/now.db")
    now.upgrade()
    _copy_as_of("0012", now, Database(url))
    versions = []
    for upgrades in (False, True):
        Store.open(url, upgrades=upgrades).close()
        with closing(Database(url)) as database, database.read() as c:
            versions.append(c.execute(sa.text("SELECT version_num FROM alembic_version")).scalar())
    assert (versions[0], versions[1] > "0012") == ("0012", True)
    with closing(Store.open(f"sqlite:///{tmp_path}/new.db", upgrades=False)) as store:
        assert store.jobs() == ()


def test_two_that_open_at_once_both_find_the_finished_schema(url: str) -> None:
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            store = Store.open(url)
            store.load()
            store.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
