"""`raytide up` for real, as far as one machine allows: Ray's launcher and updater, a Ray head, raytide's head process,
a worker that the controller buys and sets up in each of two regions, a region that does not answer, a notice, the end.

Only the cloud (cloud/one_machine.py) and ssh and rsync (cloud/) are stand-ins: commands run here, each machine's in a
home and on an address of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.autoscaler.providers.notices.metadata_server import MetadataServer

from raytide.control.bootstrap.loopback import claim
from raytide.control.client import ApiClient
from raytide.core.io.process import free_port, kill_marked

pytestmark = pytest.mark.cluster

STANDINS = Path(__file__).parents[1] / "cloud"
PLATFORM = Path(__file__).parents[3] / "platform"
SMALL = "--object-store-memory=80000000 --include-log-monitor=false"


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.close()


@pytest.fixture
def k() -> Iterator[int]:
    """127.0.K.*, for this test alone."""
    k, held = claim({k: [(f"127.0.{k}.1", port) for port in (7400, 8265)] for k in range(150, 200)})
    with held:
        yield k


@pytest.fixture
def far() -> Iterator[int]:
    """127.0.K.* of the further region."""
    far, held = claim({far: [(f"127.0.{far}.1", port) for port in (7400, 8265)] for far in range(200, 240)})
    with held:
        yield far


@pytest.fixture
def environment(tmp_path: Path, metadata: MetadataServer, k: int, far: int) -> Iterator[dict[str, str]]:
    """Yields the environment of every machine. Paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="rt-up-") as short:
        (Path(short) / "ray").mkdir()
        here = ("RAY_", "RAYTIDE_API", "RAYTIDE_HOME")
        own = {name: value for name, value in os.environ.items() if not name.startswith(here)}
        yield {
            **own,
            "PATH": os.pathsep.join([str(STANDINS), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(PLATFORM), str(STANDINS)]),
            "STANDIN_LOG": str(tmp_path / "log"),
            "STANDIN_MACHINES": str(tmp_path),
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "SPT_NOENV": "1",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
        }
        for n in range(1, 6):
            kill_marked("STANDIN_IP", f"127.0.{k}.{n}")
            kill_marked("STANDIN_IP", f"127.0.{far}.{n}")


def cluster_yaml(tmp_path: Path, k: int, far: int) -> dict[str, Any]:
    """Returns the shipped file with addresses and ports, since all machines are this one; never `ray stop`."""
    gcs = free_port()
    none = ("cluster_synced_files", "initialization_commands")
    no_set_up = ("setup_commands", "head_setup_commands", "worker_setup_commands")
    head = f"--head --no-monitor --port={gcs} --dashboard-host=127.0.0.1 --num-cpus=0"
    common = f"--node-ip-address=$MACHINE_IP --min-worker-port=0 --max-worker-port=0 {SMALL}"
    worker = f"--address=$RAY_HEAD_IP:{gcs} --dashboard-agent-listen-port=0"
    here = {"type": "external", "module": "one_machine.OneMachine", "state": str(tmp_path / "state"), "k": k}
    west = {
        "provider": {**here, "state": str(tmp_path / "west"), "k": far},
        "available_node_types": {
            "cpu1.west": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 1, "max_workers": 1}
        },
        "worker_start_ray_commands": [f"RAY_AUTH_MODE=token ray start {worker} {common}"],
    }
    node_types = {
        "cpu1.spot": {"market": "spot", "price_usd_h": 0.01},
        "cpu1.west": {"price_usd_h": 0.02, "zones": ["west-1"]},
    }
    return {
        **{key: [] for key in (*none, *no_set_up)},
        "file_mounts": {},
        "docker": {},
        "cluster_name": "tide",
        "max_workers": 2,
        "provider": here,
        "auth": {"ssh_user": "nobody"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "cpu1.spot": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 1, "max_workers": 2},
        },
        "head_start_ray_commands": [
            "(umask 077; ray get-auth-token --generate > /dev/null)",
            f"RAY_AUTH_MODE=token ray start {head} --dashboard-agent-listen-port={free_port()} {common}",
            "RAY_AUTH_MODE=token raytide head ~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            f"RAY_AUTH_MODE=token ray start {worker} {common}",
            "raytide watch-notices aws",
        ],
        "metadata": {"raytide": {"node_types": node_types, "providers": {"west": west}}},
    }


def test_up_brings_a_head_that_buys_sets_up_drains_on_notice_and_ends_its_nodes(
    tmp_path: Path,
    k: int,
    far: int,
    environment: dict[str, str],
    metadata: MetadataServer,
    eventually: Callable[..., None],
) -> None:
    file = tmp_path / "tide.yaml"
    file.write_text(yaml.safe_dump(cluster_yaml(tmp_path, k, far)))

    def raytide(*args: str) -> Any:
        command = [sys.executable, "-m", "raytide.cli", *args, "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    assert raytide("up", str(file)) == {"name": "tide", "head": f"127.0.{k}.1"}
    home = tmp_path / f"127.0.{k}.1" / ".raytide"
    client = ApiClient.from_run_dir(home / "clusters" / "tide")

    def states() -> dict[str, str]:
        return {node.id: str(node.state) for node in client.status().nodes}

    eventually(lambda: states() == {"node-1": "ready", "node-2": "ready"})
    types = {node.type: node for node in client.status().nodes}
    node, west = types["cpu1.spot"], types["cpu1.west"]
    tokens = [tmp_path / f"127.0.{number}" / ".ray" / "auth_token" for number in (f"{k}.1", f"{k}.2", f"{far}.1")]
    assert tokens[0].read_text() == tokens[1].read_text() == tokens[2].read_text() != ""
    assert [token.stat().st_mode & 0o777 for token in tokens] == [0o600, 0o600, 0o600]
    with httpx.Client(base_url=client.status().ray, trust_env=False, timeout=60.0) as dashboard:
        assert dashboard.get("/api/jobs/").status_code == 401
        assert dashboard.get("/api/jobs/", headers={"Authorization": f"Bearer {tokens[1].read_text()}"}).is_success

    assert (node.market, node.address) == ("spot", f"127.0.{k}.2")
    assert (west.zone, west.address) == ("west-1", f"127.0.{far}.1")

    # the further region does not answer: its node stays, and the other goes on
    kept = (tmp_path / "west").rename(tmp_path / "kept")
    (tmp_path / "west").mkdir()
    eventually(lambda: any("provider west: " in error for error in client.status().errors))
    metadata.interrupt(at=datetime.fromtimestamp(time.time() + 60, UTC).isoformat())
    eventually(lambda: node.id not in states())
    metadata.pages.clear()
    decided = [action for plan in client.plans(limit=1000) for action in plan["actions"]]
    drain = next(action for action in decided if action["action"] == "drain")
    assert (drain["node_id"], drain["kind"], drain["reason"]) == (node.id, "notice", "the provider takes it back")
    assert states()[west.id] == "ready"
    (tmp_path / "west").rmdir()
    kept.rename(tmp_path / "west")
    eventually(lambda: not any("provider west" in error for error in client.status().errors))
    assert states()[west.id] == "ready"

    environment["RAYTIDE_HOME"] = str(home)
    assert raytide("down", "--name", "tide") == {"name": "tide", "state": "down", "differences": []}
    machines = json.loads((tmp_path / "state").read_text()) | json.loads((tmp_path / "west").read_text())
    assert [ip for ip, tags in machines.items() if tags is not None] == [f"127.0.{k}.1"]
