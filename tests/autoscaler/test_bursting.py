"""Own machines and a cloud under one planner: home first, the cloud when home is full, and home again afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.autoscaler.providers.hosts.fake_machines import FakeMachines
from tests.autoscaler.world import Cluster

from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.hosts.provider import HostCluster, HostsProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.autoscaler.providers.source import ProviderSource
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import Shape
from raytide.core.objects.hardware.host import HostsSection
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Launch

OWN = NodeType(name="own", resources={"GPU": 2}, price_micro_usd_h=100_000, max_nodes=4, idle_timeout_s=20)
CLOUD = OWN.model_copy(update={"name": "cloud", "price_micro_usd_h": 3_000_000, "max_nodes": 8})
NODE = Shape(members=1, resources={"GPU": 2})
NAMES = ("h1", "h2", "h3", "h4")


class Burst(MixedProvider):
    """Four own machines in memory, and a fake cloud beside them."""

    crash_in = -1

    def __init__(self, cluster: Cluster, run_dir: Path) -> None:
        self.own, self.cloud = FakeMachines(), FakeProvider(cluster.clock, launch_delay_s=8.0)
        machines = [{"name": name, "address": f"10.0.0.{n}", "node_type": "own"} for n, name in enumerate(NAMES, 1)]
        section = HostsSection.model_validate({"ssh": {"user": "ray"}, "machines": machines})
        joined = HostCluster("c", "g:1", {})
        self.hosts = HostsProvider(section, [OWN], joined, run_dir, cluster.clock, self.own)
        self.asked: Counter[tuple[str, str]] = Counter()
        sources = [ProviderSource("hosts", lambda: self.hosts), ProviderSource("cloud", lambda: self.cloud)]
        super().__init__(sources, {"own": "hosts", "cloud": "cloud"})

    def is_up(self, node_id: str) -> bool:
        for thread in tuple(self.hosts._at_work.values()):
            thread.join(20)
        return self.cloud.is_up(node_id) or any(node == node_id for _, node in self.own.running())


class Bursting(Cluster):
    """The cluster of both."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__((OWN, CLOUD))
        self.burst = self.provider = self.ray.provider = Burst(self, run_dir)  # type: ignore[assignment]

    def kinds(self) -> Counter[str]:
        return Counter(machine.node_type for machine in self.machines())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Bursting]:
    made = Bursting(tmp_path)
    yield made
    made.burst.close()


def test_the_queue_bursts_into_the_cloud_when_home_is_full_and_drains_home(cluster: Bursting) -> None:
    jobs = [cluster.submit(NODE, preemptible=True) for _ in range(4)]
    cluster.settle(30)
    assert cluster.kinds() == {"own": 4}, "nothing is bought while own machines are free"
    more = [cluster.submit(NODE, preemptible=True) for _ in range(2)]
    launches = [action for action in cluster.settle(30) if isinstance(action, Launch)]
    assert [launch.node_type for launch in launches] == ["cloud", "cloud"]
    assert cluster.kinds() == {"own": 4, "cloud": 2}
    for job in jobs[:3]:
        cluster.finish(job)
    cluster.settle(125, 16.0)
    assert cluster.kinds() == {"own": 3}, "what ran in the cloud runs at home now"
    for job in (*jobs, *more):
        cluster.finish(job)
    cluster.settle(60)
    assert cluster.kinds() == {}
    assert cluster.burst.own.running() == []
    cluster.check_no_leak()


def test_an_endpoint_bursts_at_its_peak_and_comes_home(cluster: Bursting) -> None:
    replicas = Replicas(min=1, max=12, target_ongoing=4, downscale_delay_s=10)
    cluster.serve(ServeSpec(name="m", model="/m", resources={"GPU": 1}, replicas=replicas), ongoing=8.0)
    cluster.settle(30)
    assert cluster.kinds() == {"own": 1}
    cluster.ongoing["m"] = 44.0
    cluster.settle(60)
    assert cluster.kinds()["own"] == 4
    assert cluster.kinds()["cloud"] == 2
    cluster.ongoing["m"] = 16.0
    cluster.settle(150, 16.0)
    assert cluster.kinds()["cloud"] == 0
    assert cluster.kinds()["own"] >= 2


def test_a_machine_that_fails_costs_a_node_in_the_cloud_until_it_is_well(cluster: Bursting) -> None:
    cluster.burst.own.off.add("h2")
    jobs = [cluster.submit(NODE, preemptible=True) for _ in range(4)]
    cluster.settle(60)
    assert cluster.kinds() == {"own": 3, "cloud": 1}
    assert "h2 is in quarantine" in cluster.burst.problems()[0]
    cluster.burst.own.off.clear()
    cluster.settle(150, 16.0)
    assert cluster.kinds() == {"own": 4}
    assert [name for name, _ in cluster.burst.own.running()] == list(NAMES)
    for job in jobs:
        cluster.finish(job)
    cluster.settle(60)
    assert cluster.burst.own.running() == []


def test_while_the_cloud_does_not_answer_own_machines_go_on(cluster: Bursting, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.settle(1)

    def down(self: object) -> None:
        raise OSError("no route to the cloud")

    monkeypatch.setattr(FakeProvider, "machines", down)
    monkeypatch.setattr(FakeProvider, "is_up", lambda self, node_id: False)
    cluster.submit(NODE)
    cluster.settle(20)
    assert cluster.kinds() == {"own": 1}
    assert cluster.burst.problems() == ("provider cloud: no route to the cloud",)
