from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from raytide.core.errors import ConflictError
from raytide.core.state import Store
from raytide.core.state.database import Database
from raytide.core.state.tables import metadata


def test_the_migrations_lead_to_the_tables_that_the_code_uses(url: str) -> None:
    database = Database(url)
    database.upgrade()
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.engine.dispose()


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
