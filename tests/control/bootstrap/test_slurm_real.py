"""Slurm for real: munged, slurmctld and slurmd, whose jobs are nodes with real raylets, under the real controller."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.slurm_fixture import SlurmCluster, slurm_cluster

import raytide as rt
from raytide.autoscaler.nodes.lifecycle import TAKEN_BACK
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.client import ApiClient

pytestmark = pytest.mark.cluster

NAME = "hpc"
STAY = """
import os, signal
print("attempt", os.environ["RAYTIDE_ATTEMPT"], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
signal.pause()
"""


def cluster_yaml(slurm: SlurmCluster) -> dict[str, Any]:
    """Returns a file whose cloud is a fake, so that only Slurm's jobs join."""
    small = {"CPU": 2, "object_store_memory": 80_000_000}
    return {
        "cluster_name": NAME,
        "provider": {"type": "fake"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "batch": {"resources": small, "node_config": {}, "min_workers": 0, "max_workers": 3, "idle_timeout_s": 600},
        },
        "metadata": {
            "raytide": {
                "node_types": {"batch": {"price_usd_h": 0.1}},
                "slurm": slurm.section("batch", time_limit_s=7200),
                "pass_environment": ["RAYTIDE_TEST_SESSION"],
            }
        },
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LocalCluster, SlurmCluster]]:
    with slurm_cluster(tmp_path / "slurm", machines=3, cpus=2) as slurm:
        (tmp_path / "hpc.yaml").write_text(yaml.safe_dump(cluster_yaml(slurm)))
        with local.temporary(tmp_path / "home", tmp_path / "hpc.yaml", NAME) as started:
            yield started, slurm
        assert slurm.job_ids() == []


def test_a_gang_runs_on_slurms_nodes_moves_at_a_requeue_and_survives_a_lost_job(
    cluster: tuple[LocalCluster, SlurmCluster], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    started, slurm = cluster
    client = ApiClient.from_run_dir(started.run_dir)

    def nodes(state: str) -> set[str]:
        return {node.id for node in client.status().nodes if node.state == state}

    def was_taken_back(node_id: str) -> bool:
        drains = [a for plan in client.plans(limit=500) for a in plan["actions"] if a["action"] == "drain"]
        return any(drain["node_id"] == node_id and TAKEN_BACK in drain["reason"] for drain in drains)

    def job_of(node_id: str) -> str:
        lines = slurm.run("squeue", "--noheader", "--states=RUNNING", "--format=%i %k").splitlines()
        return next(job for job, comment in map(str.split, lines) if comment.endswith(f":{node_id}"))

    (tmp_path / "stay.py").write_text(STAY)
    tide = rt.Client(client)
    run = tide.run(tmp_path / "stay.py", cpus=2, nodes=2, working_dir=tmp_path)

    def attempts() -> dict[int, int]:
        """Returns how many ranks of each attempt run."""
        found = re.findall(r"attempt (\d+) rank \d of 2", run.logs())
        return {int(each): found.count(each) for each in set(found)}

    eventually(lambda: attempts() == {1: 2})
    first = nodes("ready")
    assert len(first) == 2 == len(slurm.job_ids())
    addresses = {node.address for node in client.status().nodes if node.state == "ready"}
    assert addresses <= {slurm.address(n) for n in (1, 2, 3)}

    # the next controller finds the jobs of the nodes
    controller = started.process("controller")
    assert controller is not None
    os.kill(controller.pid, 9)
    eventually(lambda: started.process("controller") != controller)
    eventually(lambda: nodes("ready") == first)

    # a requeue is a notice: the gang moves before Slurm kills, and the job that would start again does not
    moved = min(first)
    slurm.run("scontrol", "requeue", job_of(moved))
    eventually(lambda: was_taken_back(moved))
    eventually(lambda: attempts().get(2) == 2)
    second = nodes("ready")
    assert moved not in second and len(second) == 2

    # a job that is killed is a lost node, which costs the gang another attempt
    lost = max(second)
    slurm.run("scancel", "--signal=KILL", "--full", job_of(lost))
    eventually(lambda: attempts().get(3) == 2)
    assert lost not in nodes("ready")

    run.stop()
    eventually(lambda: run.refresh().state == "stopped")
    tide.close()
    closed = local.down(NAME)
    assert closed is not None and closed.differences == ()
