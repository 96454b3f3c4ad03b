"""One real embedded cluster for the whole session: a real Ray head, real raylets, the real controller and API.

The root conftest takes its fixtures from here, so that every folder of tests has the same one. What is heavy is
imported when it is used: most test runs never start it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    import raytide as rt
    from raytide.control.bootstrap.cluster_record import LocalCluster

NAME = "live"
LAST_LINES = 25
OPERATORS = {"AWS_SECRET_ACCESS_KEY": "the operator's own", "OPERATORS_OWN": "nobody else's"}
"""Variables of the shell that starts the cluster, which no job may see."""
HOSTED_KEY = {"EXAMPLE_HOSTED_KEY": "sk-of-the-hosted-api"}
"""The operator's key for the one hosted API that the cluster may ask."""


def ray_nodes(of: LocalCluster) -> list[dict[str, Any]]:
    """All nodes that Ray remembers, the dead and the head included. Over HTTP: this process has no token of Ray's."""
    query = {"detail": True, "limit": 10_000}
    found = httpx.get(f"{of.dashboard_url}/api/v0/nodes", params=query, headers=of.ray_headers, timeout=30).json()
    return list(found["data"]["result"]["result"])


def kill_raylet(of: LocalCluster, node_id: str) -> None:
    """The node's other processes are left to notice it."""
    import psutil

    from raytide.autoscaler.providers.local.files import NodeFolder

    node = NodeFolder(of.run_dir / "nodes" / node_id).process()
    assert node is not None
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one of its others that has just ended
            if "raylet/raylet" in " ".join(process.cmdline()):
                process.kill()


def files_below(folder: Path) -> list[Path]:
    """Returns all files below a folder of a running cluster. `Path.rglob` raises if a node's folder goes meanwhile."""
    found = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return [path for path in found if path.is_file()]


def last_log_lines(of: LocalCluster) -> str:
    """Returns the ends of the logs that tell why a cluster did nothing: the controller's warnings, and all that Serve's
    controller says."""
    found: list[str] = []
    for file in [
        of.run_dir / "logs/controller.log",
        *of.ray_temp_dir.glob("session_latest/logs/serve/controller_*.log"),
    ]:
        if file.exists():
            lines = file.read_text(errors="replace").splitlines()
            found += [f"{file.name}:", *[line for line in lines if '"level": "info"' not in line][-LAST_LINES:]]
    return "\n".join(line[:400] for line in found)


def replica_pids(of: LocalCluster) -> list[int]:
    """The processes of this cluster's replicas."""
    import psutil

    from raytide.control.bootstrap.cluster_record import MARK

    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        title = " ".join(process.info["cmdline"] or [process.info["name"]])
        if "ServeReplica" in title:
            try:
                if process.environ().get(MARK) == of.cluster_id:
                    found.append(process.pid)
            except psutil.Error:  # it ended
                continue
    return found


def settled_replica_pids(of: LocalCluster, count: int, eventually: Callable[..., None]) -> list[int]:
    """The processes of this cluster's replicas, once there are so many: a deleted endpoint's end a moment after it."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = replica_pids(of)
        return len(found) == count

    eventually(are_there)
    return found


def through_both_gateways(holds: Callable[[], bool]) -> bool:
    """Returns whether it holds each time, each over a connection of its own, to one of the two processes."""
    return all(holds() for _ in range(16))


@pytest.fixture(scope="session")
def hosted_socket() -> Iterator[socket.socket]:
    """The address of the hosted API. Nobody listens there but for the tests that do."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def hosted_url(bound: socket.socket) -> str:
    host, port = bound.getsockname()
    return f"http://{host}:{port}/v1"


def _config(folder: Path, hosted: str) -> Path:
    """Writes the default cluster, which may also ask a hosted API and keeps nodes until the next test wants them."""
    from raytide.control.bootstrap.local import DEFAULT_CONFIG

    api = f"{{base_url: {hosted!r}, api_key_env: {next(iter(HOSTED_KEY))}}}"
    text = Path(DEFAULT_CONFIG).read_text()
    assert "  raytide:\n" in text
    assert text.count("idle_timeout_s: 10\n") == 2
    changed = text.replace("  raytide:\n", f"  raytide:\n    gateway: {{hosted: [{api}]}}\n")
    changed = changed.replace("idle_timeout_s: 10\n", "idle_timeout_s: 30\n")
    (folder / "cluster.yaml").write_text(changed)
    return folder / "cluster.yaml"


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, hosted_socket: socket.socket) -> Iterator[LocalCluster]:
    from raytide.control.bootstrap import local
    from raytide.core.io.process import Process

    before = os.environ.get("RAYTIDE_HOME")
    os.environ["RAYTIDE_HOME"] = str(tmp_path_factory.mktemp("home"))
    try:
        with pytest.MonkeyPatch.context() as shell:
            for name, value in {**OPERATORS, **HOSTED_KEY}.items():
                shell.setenv(name, value)
            config = _config(tmp_path_factory.mktemp("cluster"), hosted_url(hosted_socket))
            started = local.up(config, name=NAME, timeout_s=400.0, owner=Process.of(os.getpid()))
        yield started
    finally:
        local.down(NAME)
        if before is None:
            del os.environ["RAYTIDE_HOME"]
        else:
            os.environ["RAYTIDE_HOME"] = before


@pytest.fixture
def tide(live: LocalCluster) -> Iterator[rt.Client]:
    import raytide as rt
    from raytide.control.client import ApiClient

    with rt.Client(ApiClient.from_run_dir(live.run_dir)) as connected:
        yield connected


@pytest.fixture
def raytide_cli(live: LocalCluster) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own."""

    def run(*args: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "raytide.cli", *args]
        environment = {**os.environ, "RAYTIDE_CLUSTER_NAME": NAME, "PYTHONPATH": live.environment()["PYTHONPATH"]}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)

    return run


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for something. `within_s` is for a quiet machine: a busy one is given three times as long."""

    def wait(what: Callable[[], object], *, within_s: float = 90.0, every_s: float = 0.2) -> None:
        longest_s = 3 * within_s
        deadline = time.monotonic() + longest_s
        while not what():
            assert time.monotonic() < deadline, f"it did not happen within {longest_s:g} s"
            time.sleep(every_s)

    return wait
