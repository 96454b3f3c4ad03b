"""Own machines for real: sshd processes, each a node with a real raylet, under the real controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.control.bootstrap.test_local_real import command
from tests.sshd_fixture import SshdHosts, sshd_hosts

import raytide as rt
from raytide.autoscaler.providers.local.files import MARK, NodeFolder
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.io.process import marked

pytestmark = pytest.mark.cluster

NAME = "own"
STAY = """
import os, signal
print("attempt", os.environ["RAYTIDE_ATTEMPT"], "on", os.environ["RAYTIDE_NODE"], flush=True)
signal.pause()
"""


def cluster_yaml(hosts: SshdHosts) -> dict[str, Any]:
    """Returns a file whose cloud is a fake, so that only own machines join."""
    small = {"CPU": 2, "object_store_memory": 80_000_000}
    return {
        "cluster_name": NAME,
        "provider": {"type": "fake"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "own": {"resources": small, "node_config": {}, "min_workers": 1, "max_workers": 4, "idle_timeout_s": 600},
        },
        "metadata": {
            "raytide": {
                "node_types": {"own": {"power_w": 200}},
                "hosts": hosts.section(1, 2, usd_per_kwh=0.3),
            }
        },
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LocalCluster, SshdHosts]]:
    with sshd_hosts(tmp_path / "hosts") as hosts:
        for n in (1, 2):
            hosts.start(n)
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(cluster_yaml(hosts)))
        with local.temporary(tmp_path / "home", tmp_path / "own.yaml", NAME) as started:
            yield started, hosts
        assert all(folder.end() is not None for n in (1, 2) for folder in folders(hosts, n).values())


def folders(hosts: SshdHosts, n: int) -> dict[str, NodeFolder]:
    found = (hosts.home(n) / "raytide" / "hosts").glob("*/*/*/machine.json")
    return {file.parent.name: NodeFolder(file.parent) for file in found}


def kill_raylet(folder: NodeFolder) -> None:
    (raylet,) = [each for each in marked(MARK, folder.mark) if command(each.pid).endswith("/raylet")]
    os.kill(raylet.pid, signal.SIGKILL)


def test_own_machines_come_up_run_jobs_and_are_replaced_when_they_fail(
    cluster: tuple[LocalCluster, SshdHosts], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    started, hosts = cluster
    client = ApiClient.from_run_dir(started.run_dir)

    def ready() -> dict[str, str]:
        return {node.address: node.id for node in client.status().nodes if node.state == "ready"}

    eventually(lambda: ready().keys() == {hosts.address(1)})
    assert client.status().nodes[0].price_micro_usd_h == 60_000  # 200 W at $0.30
    (tmp_path / "stay.py").write_text(STAY)
    tide = rt.Client(client)
    run = tide.run(tmp_path / "stay.py", cpus=1, working_dir=tmp_path)

    def runs_on(attempt: int, n: int) -> bool:
        return any(f"attempt {attempt} on {folder.path}" in run.logs() for folder in folders(hosts, n).values())

    eventually(lambda: runs_on(1, 1))

    # another controller adopts the node as it is
    first = folders(hosts, 1)[ready()[hosts.address(1)]]
    before = first.process()
    controller = started.process("controller")
    assert controller is not None
    controller.send(signal.SIGKILL)
    eventually(lambda: started.process("controller") != controller)
    eventually(lambda: ready().keys() == {hosts.address(1)})
    assert before is not None and first.process() == before and before.alive

    # a killed raylet costs its machine a quarantine, and the next one takes over
    kill_raylet(first)
    eventually(lambda: ready().keys() == {hosts.address(2)})
    eventually(lambda: runs_on(2, 2))
    eventually(lambda: marked(MARK, first.mark) == [])
    eventually(lambda: len(client.status().errors) == 1)
    (warning,) = client.status().errors
    assert "host h1 is in quarantine until" in warning and "killed by SIGKILL" in warning
    command = [sys.executable, "-m", "raytide.cli", "nodes", "release", "h1", "--cluster", NAME]
    done = subprocess.run(command, env=started.environment(), capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "h1: it may be a node again\n"), done.stderr
    eventually(lambda: client.status().errors == ())

    run.stop()
    eventually(lambda: run.refresh().state == "stopped")
    tide.close()

    # a node that is replaced drains and ends on its machine alone
    order = {"id": "order-1-of-test", "kind": "replace_node", "subject": ready()[hosts.address(2)]}
    client.call("POST", "/v1/orders", order)
    eventually(lambda: ready().keys() == {hosts.address(1)})
    (second,) = folders(hosts, 2).values()
    eventually(lambda: second.end() is not None)
    assert marked(MARK, second.mark) == []

    # without ssh a node goes on as long as Ray reaches it
    hosts.stop(1)
    eventually(lambda: any("cannot be reached" in error for error in client.status().errors))
    assert ready().keys() == {hosts.address(1)}
    hosts.start(1)
    eventually(lambda: client.status().errors == ())

    # the end of the cluster is the end of its nodes
    (node_id,) = ready().values()
    closed = local.down(NAME)
    end = folders(hosts, 1)[node_id].end()
    assert closed is not None and closed.differences == ()
    assert end is not None and end.reason == "terminated"
