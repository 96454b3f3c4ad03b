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
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    import psycopg

    server: str = request.getfixturevalue("postgres_server")
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return server.format(name)


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
