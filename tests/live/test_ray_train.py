"""Ray Train and Ray Data on the session's cluster: through the queue, and without a lease."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.gang import LeaseState
from raytide.core.objects.job import JobKind, JobState

pytestmark = pytest.mark.cluster

DRIVER = Path(__file__).parent / "ray_train_driver.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train_job.py"
DATA = """
import ray
ray.init()
print(ray.data.range(8).map_batches(lambda batch: batch, num_cpus=0, num_gpus=1, batch_size=4).take_all())
"""
FORGET = """
import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, PlacementGroupID, placement_group_table, remove_placement_group
ray.init()
ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))
request_resources(bundles=[])
for name, group in placement_group_table().items():
    if group["state"] == "PENDING":
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
"""
"""A script that withdraws what outlives the drivers: the requests of the Ray Data job, for minutes, and the placement
group of the trainer, for ever. Ray keeps a group that a run asked for at the moment in which its driver was killed.
"""


@contextmanager
def driver(live: LocalCluster, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A driver of the user's on the head."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **live.environment(), **live.ray_access, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.soak
def test_a_torch_trainer_waits_in_the_queue_and_runs_inside_its_lease(
    live: LocalCluster, tide: rt.Client, tmp_path: Path
) -> None:
    with driver(live, str(DRIVER), "leased", str(tmp_path)) as process:
        said, _ = process.communicate(timeout=480)
    assert process.returncode == 0, said[-3000:]
    (line,) = [line for line in said.splitlines() if line.startswith("trained")]
    _, total, node, group = line.split()
    assert float(total) == 3.0
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "leased")
    assert (run.view.job.spec.kind, run.state) == (JobKind.GANG, JobState.SUCCEEDED)
    lease = run.view.lease
    assert lease is not None and lease.state is LeaseState.RELEASED
    assert group in {member.placement_group_id for member in lease.members}
    assert node in {member.node_id for member in lease.members}
    actions = [action for plan in tide.client.plans(limit=1000) for action in plan["actions"]]
    assert {a["subject"] for a in actions if a["action"] == "launch" and a["node_id"] == node} <= {lease.id}
    assert not any(a["action"] == "wait" and a["subject"] == "unmanaged" for a in actions), (
        "the lease is all it asks for"
    )


def test_the_example_trains_in_a_lease(live: LocalCluster, tide: rt.Client, dataset: Path, tmp_path: Path) -> None:
    with driver(live, str(EXAMPLE), str(dataset), str(tmp_path / "run")) as process:
        said, _ = process.communicate(timeout=480)
    assert process.returncode == 0, said[-3000:]
    assert "step 60: loss" in said
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "ray-train-example")
    assert run.state is JobState.SUCCEEDED


def test_a_plain_trainer_and_a_ray_data_job_that_ask_for_gpus_buy_no_gpu_node_and_why_says_so(
    live: LocalCluster, tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    eventually(lambda: not any(node.type == "gpu8" for node in tide.status().nodes))
    before = {node.id for node in tide.status().nodes}
    with driver(live, str(DRIVER), "plain", str(tmp_path)), driver(live, "-c", DATA):
        eventually(lambda: "2 x (4 GPU)" in tide.client.why("unmanaged").reason)
        eventually(lambda: "(1 GPU)" in tide.client.why("unmanaged").reason)

        def is_refused() -> bool:
            why = tide.client.why("unmanaged")
            limit = "it may buy 1 nodes without a GPU (metadata.raytide.unmanaged)"
            return why.constraint == "cap" and limit in why.reason and "Submit it as a job" in why.remedy

        eventually(is_refused)
        assert not any(node.type == "gpu8" for node in tide.status().nodes if node.id not in before)
    with driver(live, "-c", FORGET) as process:
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    eventually(lambda: tide.client.why("unmanaged").constraint == "")
