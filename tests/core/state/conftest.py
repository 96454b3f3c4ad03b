"""The store's tests run on SQLite, and on a throw-away PostgreSQL server where its binaries and driver are there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server_fixtures import postgres_server
from tests.stores import new_store

from raytide.core.state import Store

__all__ = ["postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database; one with the present schema for tests of a `store`, so that it is not migrated again."""
    is_migrated = "store" in request.fixturenames
    if request.param == "sqlite":
        if is_migrated:
            new_store(tmp_path).close()
        return f"sqlite:///{tmp_path}/state.db"
    import psycopg

    server: str = request.getfixturevalue("postgres_server")
    name = f"t{uuid.uuid4().hex}"
    template = request.getfixturevalue("migrated_template") if is_migrated else "template1"
    with psycopg.connect(server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")  # type: ignore[arg-type]
    return server.format(name)


@pytest.fixture(scope="session")
def migrated_template(postgres_server: str) -> str:
    """The name of a database with the present schema, for others to be copied from."""
    import psycopg

    with psycopg.connect(postgres_server.format("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated")
    Store.open(postgres_server.format("migrated")).close()
    return "migrated"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store.open(url)
    yield store
    store.close()
