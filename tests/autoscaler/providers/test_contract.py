"""All providers keep what the controller relies on: repeated calls, another controller, and the bill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.autoscaler.providers.hosts.fake_machines import FakeMachines
from tests.autoscaler.providers.kube_server import KubeServer
from tests.autoscaler.providers.slurm.fake_slurm import FakeSlurm
from tests.autoscaler.providers.two_regions import REGIONS, instances, patient, regions_cluster

from raytide.autoscaler.providers.base import Machine, Provider
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.hosts.provider import HostCluster, HostsProvider
from raytide.autoscaler.providers.kuberay.kube_api import KubeApi
from raytide.autoscaler.providers.kuberay.provider import KubeRayProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.autoscaler.providers.slurm.provider import SlurmProvider
from raytide.autoscaler.providers.source import ProviderSource
from raytide.control.bootstrap.wiring import provider
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.hardware.host import HostsSection
from raytide.core.objects.hardware.slurm import SlurmSection
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

TYPE = NodeType(name="cpu", resources={"CPU": 2}, price_micro_usd_h=10_000)
NAMES = ("fake", "hosts", "kuberay", "slurm", "mixed", "regions")
LATER_S = 20.0


@dataclass
class Source:
    """Providers of one kind over one run folder; `work` lets time pass and the outside do its part."""

    make: Callable[[], Provider]
    work: Callable[[Provider], None]
    running: Callable[[], int]
    """Returns the number of machines that run outside, whatever the provider has recorded."""
    node_type: NodeType = TYPE
    """The node type that is bought, in its first zone."""

    def machines(self, provider: Provider) -> dict[str, Machine]:
        for _ in range(3):
            self.work(provider)
            provider.machines()
        return {machine.node_id: machine for machine in provider.machines()}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path) -> Iterator[Source]:
    if request.param == "fake":
        yield fake(clock)
    elif request.param == "hosts":
        yield hosts(clock, tmp_path)
    elif request.param == "slurm":
        yield slurm(clock, tmp_path)
    elif request.param == "regions":
        request.getfixturevalue("aws_for_ray")
        yield regions(clock, tmp_path)
    elif request.param == "mixed":
        inner = slurm(clock, tmp_path)
        yield Source(
            lambda: MixedProvider(
                [ProviderSource("slurm", inner.make), ProviderSource("fake", lambda: FakeProvider(clock))],
                {"cpu": "slurm"},
            ),
            inner.work,
            inner.running,
        )
    else:
        server = KubeServer({"cpu": 8})
        yield kuberay(clock, tmp_path, server)
        server.close()


def fake(clock: VirtualClock) -> Source:
    """The one provider without records: each is the same."""
    provider = FakeProvider(clock)
    return Source(
        lambda: provider,
        lambda _: clock.advance(LATER_S),
        lambda: sum(machine.ended_at_s is None for machine in provider.machines()),
    )


def hosts(clock: VirtualClock, folder: Path) -> Source:
    machines = FakeMachines()
    named = [{"name": f"h{n}", "address": f"10.0.0.{n}", "node_type": "cpu"} for n in (1, 2, 3)]
    section = HostsSection.model_validate({"ssh": {"user": "ray"}, "machines": named})
    made: list[HostsProvider] = []

    def make() -> Provider:
        cluster = HostCluster("tide-1", "10.0.0.100:6379", {})
        made.append(HostsProvider(section, [TYPE], cluster, folder, clock, machines))
        return made[-1]

    def work(_: Provider) -> None:
        clock.advance(LATER_S)
        for thread in [thread for each in made for thread in tuple(each._at_work.values())]:
            thread.join(120)

    return Source(make, work, lambda: len(machines.running()))


def slurm(clock: VirtualClock, folder: Path) -> Source:
    queue = FakeSlurm(clock)
    section = SlurmSection.model_validate({"node_types": {"cpu": {}}, "poll_s": 0.5})

    def work(_: Provider) -> None:
        clock.advance(LATER_S)
        for job in tuple(queue.listed.values()):
            if job.state == "PENDING":
                queue.start(job.job_id)
            elif job.job_id in queue.interrupted and job.state == "RUNNING":
                queue.move(job.job_id, "COMPLETED")

    return Source(
        lambda: SlurmProvider(section, [TYPE], HostCluster("tide-1", "10.0.0.100:6379", {}), folder, clock, queue),
        work,
        lambda: sum(job.state == "RUNNING" for job in queue.listed.values()),
    )


def kuberay(clock: VirtualClock, folder: Path, server: KubeServer) -> Source:
    def work(_: Provider) -> None:
        clock.advance(LATER_S)
        server.operate()
        server.reap()

    return Source(
        lambda: KubeRayProvider(KubeApi(server.url, "ml", account=folder), "tide", folder / "run", clock),
        work,
        lambda: len(server.pods),
    )


def regions(clock: VirtualClock, folder: Path) -> Source:
    """Two regions and a fake cloud; all is bought in the further region."""
    cluster = regions_cluster(folder)
    (west,) = (each for each in load_cluster(cluster.config_path).node_types if each.provider == "west")
    return Source(
        lambda: patient(provider(cluster, clock=clock)),
        lambda _: clock.advance(LATER_S),
        lambda: sum(len(instances(region)) for region in REGIONS),
        west,
    )


def node(node_id: str, node_type: NodeType = TYPE) -> Node:
    market = CapacityType.ON_DEMAND
    return Node(node_id, node_type.name, node_type.zones[0], market, 10_000, NodeState.REQUESTED, 0.0)


def test_a_launch_that_is_repeated_buys_one_machine(source: Source) -> None:
    provider = source.make()
    for _ in range(3):
        provider.launch(node("n1", source.node_type), source.node_type)
        source.machines(provider)
    machine = source.machines(provider)["n1"]
    assert (source.running(), machine.ended_at_s, machine.price_micro_usd_h) == (1, None, 10_000)
    assert (machine.node_type, machine.zone) == (source.node_type.name, source.node_type.zones[0])


def test_the_next_controller_finds_the_machines_and_ends_them(source: Source) -> None:
    first = source.make()
    for name in ("n1", "n2"):
        first.launch(node(name, source.node_type), source.node_type)
    before = source.machines(first)
    first.close()
    second = source.make()
    assert source.machines(second) == before
    second.launch(node("n1", source.node_type), source.node_type)
    assert source.machines(second) == before
    second.terminate("n1")
    after = source.machines(second)
    assert (after["n1"].ended_at_s is not None, after["n2"], source.running()) == (True, before["n2"], 1)
    second.close()


def test_an_end_is_billed_once_and_may_be_repeated(source: Source, clock: VirtualClock) -> None:
    provider = source.make()
    provider.terminate("n1")
    provider.launch(node("n1", source.node_type), source.node_type)
    source.machines(provider)
    provider.terminate("n1")
    ended = source.machines(provider)["n1"]
    assert ended.ended_at_s is not None and ended.started_at_s <= ended.ended_at_s <= clock.now_s()
    provider.terminate("n1")
    provider.launch(node("n1", source.node_type), source.node_type)  # news from before the end
    assert source.machines(provider)["n1"] == ended
    assert (source.running(), provider.notices()) == (0, ())
    provider.close()
