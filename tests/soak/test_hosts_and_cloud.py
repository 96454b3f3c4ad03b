"""Four own machines and a cloud in one cluster, with real raylets: the queue bursts at load and drains home; a killed
raylet and a pulled cable cost each job of theirs a new attempt elsewhere.

Each own machine is an sshd in a network namespace of its own, which needs root (tests/network_fixture.py); without it,
test_lost_hosts.py stops a machine's processes in place of its cable. The cloud is a stand-in of Ray's interface, whose
machines are real nodes here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.control.bootstrap.test_hosts_real import folders, kill_raylet
from tests.control.bootstrap.test_ray_up_real import STANDINS
from tests.network_fixture import PrivateNetwork, private_network
from tests.sshd_fixture import SshdHosts, sshd_hosts

import raytide as rt
from raytide.autoscaler.providers.local.files import MARK
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import GCS_PORT_BASE
from raytide.control.bootstrap.loopback import FIRST_K
from raytide.control.client import ApiClient
from raytide.core.io.process import kill_marked, marked

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

LONG_S = 240.0
NAME = "both"
HOSTS = ("h1", "h2", "h3", "h4")
CLOUD_K = 60
STAY = """
import os, signal
print("at", os.environ.get("RAYTIDE_NODE", "cloud"), flush=True)
signal.pause()
"""
DISPATCH = """#!/bin/sh
case "$*" in
  *@127.0.{k}.*) exec {standins}/ssh "$@" ;;
esac
exec {ssh} "$@"
"""


def cluster_yaml(hosts: SshdHosts, tmp_path: Path) -> dict[str, Any]:
    """Returns a file with four own machines, and a cloud's at a hundred times their price."""
    small = {"CPU": 2, "object_store_memory": 80_000_000}
    own = {"resources": small, "node_config": {}, "min_workers": 0, "max_workers": 4, "idle_timeout_s": 900}
    options = "--min-worker-port=0 --max-worker-port=0 --object-store-memory=80000000 --include-log-monitor=false"
    join = f"--address=$RAY_HEAD_IP:{GCS_PORT_BASE + FIRST_K} --node-ip-address=$MACHINE_IP"
    cloud = {
        "provider": {"type": "external", "module": "one_machine.OneMachine", "k": CLOUD_K}
        | {"state": str(tmp_path / "cloud")},
        "auth": {"ssh_user": "nobody"},
        "available_node_types": {"rented": {**own, "resources": {"CPU": 2}, "max_workers": 2, "idle_timeout_s": 10}},
        "worker_start_ray_commands": [f"ray start {join} --dashboard-agent-listen-port=0 {options}"],
    }
    return {
        "cluster_name": NAME,
        "provider": {"type": "fake"},
        "head_node_type": "head",
        "available_node_types": {"head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, "own": own},
        "metadata": {
            "raytide": {
                "node_types": {"own": {"price_usd_h": 0.01}, "rented": {"price_usd_h": 1.0, "zones": ["cloud-1"]}},
                "hosts": hosts.section(1, 2, 3, 4),
                "providers": {"cloud": cloud},
                "limits": {"moves_after_s": 10},
                "pass_environment": ["RAYTIDE_TEST_SESSION"],
            }
        },
    }


@dataclass
class Both:
    """A cluster of own machines and a cloud, and what a test asks of it."""

    tide: rt.Client
    client: ApiClient
    hosts: SshdHosts
    network: PrivateNetwork
    tmp_path: Path
    eventually: Callable[..., None]

    def submit(self) -> rt.Run:
        return self.tide.run(self.tmp_path / "stay.py", cpus=2, working_dir=self.tmp_path, preemptible=True)

    def stop(self, run: rt.Run) -> None:
        """Stops a job, and returns once its machine is free."""
        run.stop()
        self.eventually(lambda: run.refresh().state == "stopped", within_s=LONG_S)

    def places(self, run: rt.Run) -> list[str]:
        """Returns where each attempt of a job began: the name of an own machine, or `cloud`."""
        assert run.refresh().state != "failed", run.logs()
        lines = [line.split() for line in run.logs().splitlines()]
        return [_place(Path(words[1]), self.hosts.folder) for words in lines if words[:1] == ["at"]]

    def rented(self) -> list[str]:
        """Returns the machines that run in the cloud, as the cloud knows them."""
        state = self.tmp_path / "cloud"
        machines = json.loads(state.read_text()) if state.exists() else {}
        return [address for address, tags in machines.items() if tags is not None]

    def release(self, host: str) -> None:
        """Ends the quarantine of a machine that failed, as its operator does after a look."""
        self.eventually(lambda: self.is_quarantined(host), within_s=LONG_S)
        order = {"id": f"order-of-{host}", "kind": "release_node", "subject": host}
        self.client.call("POST", "/v1/orders", order)
        self.eventually(lambda: not self.is_quarantined(host), within_s=LONG_S)

    def is_quarantined(self, host: str) -> bool:
        return any(f"host {host} is in quarantine" in error for error in self.client.status().errors)


def _place(printed: Path, folder: Path) -> str:
    return printed.relative_to(folder.resolve()).parts[0] if printed.is_absolute() else "cloud"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]) -> Iterator[Both]:
    (tmp_path / "stay.py").write_text(STAY)
    path = [str(tmp_path / "bin"), os.environ["PATH"]]
    dispatch = tmp_path / "bin" / "ssh"
    dispatch.parent.mkdir()
    dispatch.write_text(DISPATCH.format(k=CLOUD_K, standins=STANDINS, ssh=shutil.which("ssh")))
    dispatch.chmod(0o755)
    (tmp_path / "bin" / "rsync").symlink_to(STANDINS / "rsync")
    for name, value in {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(STANDINS),
        "STANDIN_LOG": str(tmp_path / "log"),
        "STANDIN_MACHINES": str(tmp_path / "machines"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(STANDINS))  # `down` asks the cloud from this process
    with private_network() as network, sshd_hosts(tmp_path / "hosts", network.enter) as hosts:
        for n in (1, 2, 3, 4):
            hosts.start(n)
        (tmp_path / "both.yaml").write_text(yaml.safe_dump(cluster_yaml(hosts, tmp_path)))
        try:
            with local.temporary(tmp_path / "home", tmp_path / "both.yaml", NAME) as started:
                client = ApiClient.from_run_dir(started.run_dir)
                with rt.Client(client) as tide:
                    yield Both(tide, client, hosts, network, tmp_path, eventually)
        finally:
            for n in range(1, 10):
                kill_marked("STANDIN_IP", f"127.0.{CLOUD_K}.{n}")


def test_the_queue_bursts_drains_home_and_survives_a_killed_raylet_and_a_pulled_cable(
    cluster: Both, eventually: Callable[..., None]
) -> None:
    places, rented = cluster.places, cluster.rented
    # own machines first, the cloud for what they do not hold
    first, second, third, fourth = home = [cluster.submit() for _ in HOSTS]
    eventually(lambda: sorted(place for run in home for place in places(run)) == list(HOSTS), within_s=LONG_S)
    assert rented() == []
    away = cluster.submit()
    eventually(lambda: places(away) == ["cloud"], within_s=LONG_S)
    assert len(rented()) == 1

    # home again as soon as that pays for the stop: after three minutes at these prices
    first.stop()
    eventually(lambda: places(away) == ["cloud", *places(first)], within_s=LONG_S)
    eventually(lambda: rented() == [], within_s=LONG_S)
    # new jobs run at home; one that is there before Ray reports the machine as free rents one and comes home, too
    cluster.stop(second)
    new = cluster.submit()
    eventually(lambda: places(new)[-1:] == places(second) and rented() == [], within_s=LONG_S)
    assert [len(places(run)) for run in (third, fourth)] == [1, 1], "what was at home stayed"

    # a killed raylet: its job goes on at the machine that is free, and its machine comes back
    cluster.stop(new)
    (killed,) = places(third)
    kill_raylet(next(each for each in folders(cluster.hosts, int(killed[1:])).values() if each.end() is None))
    eventually(lambda: places(third) == [killed, *places(second)], within_s=LONG_S)
    cluster.release(killed)
    last = cluster.submit()
    eventually(lambda: places(last) == [killed], within_s=LONG_S)
    assert rented() == []

    # a pulled cable: home is full, so the job goes on in the cloud; what was cut off ends when it is back, and the job
    # comes home
    (silent,) = places(fourth)
    address = cluster.hosts.address(int(silent[1:]))
    (cut_off,) = [each for each in folders(cluster.hosts, int(silent[1:])).values() if each.end() is None]
    cluster.network.pull_cable(address)
    eventually(lambda: places(fourth) == [silent, "cloud"], within_s=LONG_S)
    cluster.network.plug_in_cable(address)
    eventually(lambda: marked(MARK, cut_off.mark) == [], within_s=LONG_S)
    cluster.release(silent)
    eventually(lambda: places(fourth) == [silent, "cloud", silent], within_s=2 * LONG_S)
    eventually(lambda: rented() == [], within_s=LONG_S)
    assert [len(places(run)) for run in (away, third, last)] == [2, 2, 1], "no other job was disturbed"

    for run in (away, third, fourth, last):
        cluster.stop(run)
    closed = local.down(NAME)
    assert closed is not None and closed.differences == ()
    for n in (1, 2, 3, 4):
        assert all(marked(MARK, each.mark) == [] for each in folders(cluster.hosts, n).values())
