"""The private calls of Ray, on a real head and raylet: what they answer is what the planner believes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.autoscaler.nodes.exporter.fake_nvml import HEALTHY, make_library, write_gpu
from tests.ray_fixture import patient_starts

from raytide.autoscaler.nodes.exporter.directory import ExporterDirectory
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.providers.notices.base import CloudNotice
from raytide.autoscaler.providers.notices.watch import board_at
from raytide.autoscaler.ray_gcs import GcsReader, RayNode
from raytide.core.clock import SystemClock
from raytide.core.errors import ClusterError
from raytide.core.objects.node import CapacityType, Node, NodeState, Signal
from raytide.core.objects.snapshot import Demand
from raytide.core.ray_internals import gcs_client
from raytide.scheduling.replicas import REPLICA_LABEL

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A head without CPUs and one node that carries our id."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_enable_autoscaler_v2", "1")
        common: dict[str, Any] = {"object_store_memory": 80 << 20, "include_log_monitor": False}
        head = {"node_ip_address": "127.0.78.1", "num_cpus": 0, "include_dashboard": False, **common}
        with patient_starts():
            cluster = Cluster(initialize_head=True, head_node_args=head)
            cluster.add_node(
                node_ip_address="127.0.78.2",
                num_cpus=4,
                labels={"ray.io/market-type": "spot"},
                env_vars={"RAY_CLOUD_INSTANCE_ID": "node-1", "RAY_NODE_TYPE_NAME": "cpu4"},
                **common,
            )
        ray.init(address=cluster.address, log_to_driver=False, namespace="raytide")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("nvml"))


def until(what: str, seen: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def ours(gcs: GcsReader) -> RayNode:
    (node,) = (node for node in gcs.nodes() if node.node_id == "node-1")
    return node


def test_ray_s_own_agents_tell_how_busy_their_nodes_are(ray_cluster: Any) -> None:
    """Before the next test drains the node."""
    clock = SystemClock()
    meters = MeterReader(GcsReader(ray_cluster.address), clock)
    meters._machines = (Machine("node-1", "cpu4", "local", 1, 0.0),)  # without its thread

    def cpu() -> Signal | None:
        meters.read_all()
        return meters.last_readings()["node-1"].get("cpu")

    until("the agent of the node to have measured", lambda: cpu() is not None)
    found = cpu()
    assert found is not None
    assert 0.0 <= found.value <= 1.0
    assert found.is_fresh(clock.now_s())
    assert "gpu" not in meters.last_readings()["node-1"], "there is none"


def test_a_node_s_exporter_announces_itself_and_is_read_as_its_gpus(
    ray_cluster: Any, library: Path, tmp_path: Path
) -> None:
    write_gpu(tmp_path, 0, {**HEALTHY, "use": 70})
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(tmp_path)}
    exporter = subprocess.Popen(
        [sys.executable, "-m", "raytide.autoscaler.nodes.exporter.server", "node-1", ray_cluster.address],
        env=environment,
    )
    clock = SystemClock()
    directory = ExporterDirectory(lambda: gcs_client(ray_cluster.address), clock)
    meters = MeterReader(GcsReader(ray_cluster.address), clock, directory=directory)
    meters._machines = (Machine("node-1", "gpu1", "local", 1, 0.0),)  # without its thread

    def gpu() -> float | None:
        meters.read_all()
        found = meters.last_readings()["node-1"].get("gpu")
        return None if found is None else found.value

    try:
        until("the exporter to be read", lambda: gpu() == 0.7)
        assert meters.exporter_of(meters._machines[0]).startswith("127.0.78.2:")
        assert meters.measured()["node-1"].power_w["nvml"] == 350.5
    finally:
        exporter.kill()
        exporter.wait(10)


def test_nodes_demand_and_the_race_free_idle_drain(ray_cluster: Any) -> None:
    import ray
    from ray.autoscaler.sdk import request_resources
    from ray.util.placement_group import placement_group, remove_placement_group

    gcs = GcsReader(ray_cluster.address)
    node = ours(gcs)
    assert (node.total["CPU"], node.address, node.is_alive) == (4.0, "127.0.78.2", True)
    assert node.labels["ray.io/market-type"] == "spot"
    assert not node.is_busy
    assert gcs.demand() == ()

    @ray.remote(num_cpus=3)
    class Holder:
        pass

    spot = {"ray.io/market-type": "in(spot,on-demand)"}
    runs = placement_group(
        [{"CPU": 2}], bundle_label_selector=[{"ray.io/node-id": node.ray_node_id}], name="raytide/l/0/0"
    )
    ray.get(runs.ready(), timeout=60)
    pinned = placement_group([{"CPU": 4}], bundle_label_selector=[{"ray.io/node-id": node.ray_node_id}])
    foreign = placement_group([{"CPU": 8}] * 2, bundle_label_selector=[{"ray.io/market-type": "!spot"}] * 2)
    rack = placement_group([{"CPU": 8}] * 3, topology_strategy={"raytide.io/rack": "STRICT_PACK"})
    apart = placement_group([{"CPU": 7}] * 3, strategy="STRICT_SPREAD")
    packed = placement_group([{"CPU": 5}] * 3, strategy="STRICT_PACK")
    replica = Holder.options(label_selector={REPLICA_LABEL: "!m.1-x"}).remote()
    raw = [Holder.options(label_selector=spot).remote() for _ in range(2)]
    expected = (
        Demand({"CPU": 3.0}, {REPLICA_LABEL: "!m.1-x"}),
        Demand({"CPU": 3.0}, {"ray.io/market-type": "in(on-demand,spot)"}, count=2),
        Demand({"CPU": 7.0}, count=3, apart="a group"),
        Demand({"CPU": 8.0}, {"ray.io/market-type": "!spot"}, count=2),
        Demand({"CPU": 8.0}, count=3, together="raytide.io/rack"),
        Demand({"CPU": 15.0}),
    )
    until("Ray's queue shows all but what is pinned", lambda: same(gcs.demand(), expected))
    request_resources(num_cpus=6, bundles=[{"GPU": 1}], bundle_label_selectors=[spot])
    standing = (
        Demand({"CPU": 1.0}, count=6, is_standing=True),
        Demand({"GPU": 1.0}, {"ray.io/market-type": "in(on-demand,spot)"}, is_standing=True),
    )
    until("what was asked for beside it is there", lambda: same(gcs.demand(), (*expected, *standing)))
    request_resources(num_cpus=0)
    until("the group's CPUs are taken", lambda: ours(gcs).available["CPU"] == 2.0 and ours(gcs).is_busy)
    assert not gcs.drain(node.ray_node_id, "idle", time.time() + 30, "test")

    for group in (pinned, foreign, rack, apart, packed, runs):
        remove_placement_group(group)
    for actor in (replica, *raw):
        ray.kill(actor)
    until("the node is idle, though Ray's words for why it was busy stay", lambda: not ours(gcs).is_busy)
    until("nothing is asked for", lambda: gcs.demand() == ())
    until("Ray accepts the idle drain", lambda: gcs.drain(node.ray_node_id, "idle", time.time() + 30, "test"))
    until("the raylet leaves by itself", lambda: not ours(gcs).is_alive)


def test_the_gcs_keeps_what_watchers_pin(ray_cluster: Any) -> None:
    board, reader = board_at(ray_cluster.address), board_at(ray_cluster.address)
    assert reader.notices() == ()
    board.pin("node-1", CloudNotice(120.0, "preempted"))
    board.pin("node-1", CloudNotice(60.0, "preempted"))
    assert reader.notices() == (Notice("node-1", 60.0),)
    board.remove("node-1")
    assert reader.notices() == ()


def test_launches_are_shown_by_ray_status(ray_cluster: Any) -> None:
    from ray.autoscaler.v2.sdk import get_cluster_status

    coming = Node("node-2", "cpu4", "local", CapacityType.SPOT, 1, NodeState.LAUNCHING, 1.0)
    GcsReader(ray_cluster.address).report([coming])
    assert [node.instance_id for node in get_cluster_status(ray_cluster.address).pending_nodes] == ["node-2"]


def test_a_gcs_that_does_not_answer_is_an_error_at_once() -> None:
    with pytest.raises(ClusterError, match=r"cannot read Ray's cluster state at 127\.0\.78\.9:9"):
        GcsReader("127.0.78.9:9").nodes()


def same(found: tuple[Demand, ...], expected: tuple[Demand, ...]) -> bool:
    def key(demand: Demand) -> tuple[object, ...]:
        labels = tuple(demand.labels.items())
        return (
            tuple(demand.resources.items()),
            labels,
            demand.count,
            demand.together,
            bool(demand.apart),
            demand.is_standing,
        )

    return sorted(map(repr, map(key, found))) == sorted(repr(key(demand)) for demand in expected)
