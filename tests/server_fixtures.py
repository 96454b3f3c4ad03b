"""Throw-away servers for tests: a real PostgreSQL and a real Redis, where their programs are there."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytide.core.io.process import free_port

TOOLS = Path(sys.prefix) / "tools" / "bin"


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


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """The port of a Redis on 127.0.0.1 whose default user has the password `redis`."""
    found = shutil.which("redis-server", path=os.pathsep.join([str(TOOLS), os.environ["PATH"]]))
    if found is None:
        pytest.skip("there is no redis-server here: `./dev setup` fetches it (Debian: redis-server)")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "redis"]
    options += ["--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen([found, *options], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "redis.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait(60)


def _unprivileged() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    return {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}


def _run(as_user: dict[str, object], *command: str) -> None:
    """Runs a program without what this process knows, such as Ray's token: its user may be that of a test's script."""
    kept = ("PATH", "LANG", "LC_ALL", "TZ", "RAYTIDE_TEST_SESSION")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    done = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, cwd="/", timeout=240, env=environment, **as_user
    )
    assert done.returncode == 0, done.stdout + done.stderr
