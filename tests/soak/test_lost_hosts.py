"""Four own machines under load, one of which falls silent, as when its cable is pulled, and comes back later."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tests.control.bootstrap.test_hosts_real import STAY, cluster_yaml, folders, kill_raylet
from tests.sshd_fixture import SshdHosts, sshd_hosts

import raytide as rt
from raytide.autoscaler.providers.local.files import MARK
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient
from raytide.core.io.process import marked

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

LONG_S = 240.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LocalCluster, SshdHosts]]:
    with sshd_hosts(tmp_path / "hosts") as hosts:
        for n in (1, 2, 3, 4):
            hosts.start(n)
        file = cluster_yaml(hosts)
        file["metadata"]["raytide"]["hosts"] = hosts.section(1, 2, 3, 4, usd_per_kwh=0.3)
        file["available_node_types"]["own"] |= {"min_workers": 0, "idle_timeout_s": 10}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(file))
        with local.temporary(tmp_path / "home", tmp_path / "own.yaml", "own") as started:
            yield started, hosts


def test_jobs_survive_a_silent_machine_and_a_killed_raylet_and_all_machines_come_home(
    cluster: tuple[LocalCluster, SshdHosts], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    started, hosts = cluster
    client = ApiClient.from_run_dir(started.run_dir)
    (tmp_path / "stay.py").write_text(STAY)
    with rt.Client(client) as tide:
        runs = [tide.run(tmp_path / "stay.py", cpus=2, working_dir=tmp_path) for _ in range(3)]

        def attempts(n: int) -> list[rt.Run]:
            paths = [str(folder.path) for folder in folders(hosts, n).values()]
            return [run for run in runs if any(path in run.logs() for path in paths)]

        def ready() -> set[str]:
            return {node.address for node in client.status().nodes if node.state == "ready"}

        eventually(lambda: all(attempts(n) for n in (1, 2, 3)), within_s=LONG_S)
        (silent,) = folders(hosts, 1).values()
        (lost,) = attempts(1)
        hosts.stop(1)
        for process in marked(MARK, silent.mark):
            process.send(signal.SIGSTOP)
        eventually(lambda: lost in attempts(4), within_s=LONG_S)
        eventually(lambda: any("host h1 is in quarantine" in error for error in client.status().errors))
        assert ready() == {hosts.address(n) for n in (2, 3, 4)}
        assert marked(MARK, silent.mark) != []

        # it comes back, with what ran there
        hosts.start(1)
        for process in marked(MARK, silent.mark):
            process.send(signal.SIGCONT)
        eventually(lambda: marked(MARK, silent.mark) == [], within_s=LONG_S)
        assert ready() == {hosts.address(n) for n in (2, 3, 4)}

        (again,) = attempts(2)
        client.call("POST", "/v1/orders", {"id": "order-of-soak", "kind": "release_node", "subject": "h1"})
        kill_raylet(next(folder for folder in folders(hosts, 2).values() if folder.end() is None))
        eventually(lambda: again in attempts(1), within_s=LONG_S)

        for run in runs:
            run.stop()
        eventually(lambda: all(run.refresh().state == "stopped" for run in runs), within_s=LONG_S)
        eventually(lambda: client.status().nodes == (), within_s=LONG_S)
        for n in (1, 2, 3, 4):
            assert all(marked(MARK, folder.mark) == [] for folder in folders(hosts, n).values())
    closed = local.down("own")
    assert closed is not None and closed.differences == ()
