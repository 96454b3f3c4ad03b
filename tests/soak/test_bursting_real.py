"""Own machines and a dearer pool in one cluster, with real raylets: the queue bursts, and comes home when it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.slurm_fixture import SlurmCluster, slurm_cluster
from tests.sshd_fixture import SshdHosts, sshd_hosts

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

LONG_S = 240.0
NAME = "burst"
STAY = "import signal\nprint('here', flush=True)\nsignal.pause()\n"


def cluster_yaml(hosts: SshdHosts, slurm: SlurmCluster) -> dict[str, Any]:
    """Returns a file with two own machines, and two of Slurm's at a hundred times their price."""
    small = {"CPU": 2, "object_store_memory": 80_000_000}
    own = {"resources": small, "node_config": {}, "min_workers": 0, "max_workers": 2, "idle_timeout_s": 900}
    return {
        "cluster_name": NAME,
        "provider": {"type": "fake"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "own": own,
            "rented": {**own, "idle_timeout_s": 10},
        },
        "metadata": {
            "raytide": {
                "node_types": {"own": {"price_usd_h": 0.01}, "rented": {"price_usd_h": 1.0}},
                "hosts": hosts.section(1, 2),
                "slurm": slurm.section("rented"),
                "limits": {"moves_after_s": 10},
                "pass_environment": ["RAYTIDE_TEST_SESSION"],
            }
        },
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LocalCluster, SlurmCluster]]:
    with sshd_hosts(tmp_path / "hosts") as hosts, slurm_cluster(tmp_path / "slurm", machines=2, cpus=2) as slurm:
        for n in (1, 2):
            hosts.start(n)
        (tmp_path / "burst.yaml").write_text(yaml.safe_dump(cluster_yaml(hosts, slurm)))
        with local.temporary(tmp_path / "home", tmp_path / "burst.yaml", NAME) as started:
            yield started, slurm


def test_the_queue_bursts_when_home_is_full_and_comes_home_when_it_is_free(
    cluster: tuple[LocalCluster, SlurmCluster], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    started, slurm = cluster
    client = ApiClient.from_run_dir(started.run_dir)
    (tmp_path / "stay.py").write_text(STAY)

    def kinds() -> list[str]:
        return sorted(node.type for node in client.status().nodes if node.state == "ready")

    with rt.Client(client) as tide:

        def submit() -> rt.Run:
            return tide.run(tmp_path / "stay.py", cpus=2, working_dir=tmp_path, preemptible=True)

        def starts(run: rt.Run) -> int:
            return run.logs().split().count("here")

        home = [submit(), submit()]
        eventually(lambda: [starts(run) for run in home] == [1, 1], within_s=LONG_S)
        assert (kinds(), slurm.job_ids()) == (["own", "own"], [])
        away = submit()
        eventually(lambda: starts(away) == 1, within_s=LONG_S)
        assert (kinds(), len(slurm.job_ids())) == (["own", "own", "rented"], 1)
        home[0].stop()
        # an idle machine at home is moved to as soon as that pays for the stop: after three minutes at these prices
        eventually(lambda: starts(away) == 2 and kinds() == ["own", "own"], within_s=LONG_S)
        eventually(lambda: slurm.job_ids() == [], within_s=LONG_S)
        assert starts(home[1]) == 1, "what was at home stayed"
        for run in (home[1], away):
            run.stop()
    closed = local.down(NAME)
    assert closed is not None and closed.differences == ()
