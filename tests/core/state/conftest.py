"""The store's tests run on SQLite, and on a throw-away PostgreSQL server where its binaries and driver are there."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import new_store

from raytide.core.state import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A server's URL, its database left open as `{}`; reached through a socket in a folder of its own, no port."""
    binaries = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    initdb = shutil.which("initdb") or (binaries[-1] if binaries else None)
    if initdb is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL's binaries and psycopg")
    as_user = _unprivileged()
    # Not below pytest's folders: those are closed to the user that the server runs as. Short: it holds a socket.
    folder = Path(tempfile.mkdtemp(prefix="raytide-pg-"))
    folder.chmod(0o777)
    pg_ctl, data = str(Path(initdb).with_name("pg_ctl")), folder / "data"
    _run(as_user, initdb, "-D", str(data), "-U", "raytide", "-A", "trust", "--no-sync")
    options = f"-k {folder} -c listen_addresses= -c fsync=off"
    _run(as_user, pg_ctl, "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql:///{{}}?host={folder}&user=raytide"
    finally:
        _run(as_user, pg_ctl, "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


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


def _unprivileged() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    return {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}


def _run(as_user: dict[str, object], *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, **as_user)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
