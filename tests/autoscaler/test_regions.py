"""Pools of two regions and two clouds under one planner: the cheapest first, and each provider fails alone."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.autoscaler.world import Cluster

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.autoscaler.providers.source import ProviderSource
from raytide.core.errors import ClusterError
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import PROVIDER_LABEL, CapacityType, NodeType

EAST = NodeType(
    name="gpu",
    resources={"GPU": 2},
    price_micro_usd_h=3_000_000,
    max_nodes=4,
    idle_timeout_s=20,
    zones=("us-east-1a",),
    provider="aws",
)
WEST = EAST.model_copy(
    update={"name": "gpu.west", "price_micro_usd_h": 2_000_000, "zones": ("us-west-2a",), "provider": "west"}
)
OTHER = EAST.model_copy(
    update={"name": "gpu.other", "price_micro_usd_h": 4_000_000, "zones": ("eu-1",), "provider": "other"}
)
NODE = Shape(members=1, resources={"GPU": 2})


class Region(FakeProvider):
    """A region that can be away."""

    is_away = False

    def machines(self) -> tuple[Machine, ...]:
        if self.is_away:
            raise ClusterError("no route to the region.")
        return super().machines()


class Regions(MixedProvider):
    crash_in = -1

    def __init__(self, cluster: Cluster) -> None:
        self.each = {name: Region(cluster.clock, launch_delay_s=8.0) for name in ("aws", "west", "other")}
        self.asked: Counter[tuple[str, str]] = Counter()
        sources = [ProviderSource(name, lambda name=name: self.each[name]) for name in self.each]  # type: ignore[misc]
        super().__init__(sources, {each.name: each.provider for each in (EAST, WEST, OTHER)})

    def is_up(self, node_id: str) -> bool:
        """Asks the machine itself, which runs whether its region answers or not."""
        machines = (FakeProvider.machines(region) for region in self.each.values())
        listed = {machine.node_id: machine for each in machines for machine in each}
        machine = listed.get(node_id)
        now_s = next(iter(self.each.values()))._clock.now_s()
        return machine is not None and machine.ended_at_s is None and now_s >= machine.started_at_s + 8.0


class InRegions(Cluster):
    def __init__(self, *node_types: NodeType) -> None:
        super().__init__(node_types or (EAST, WEST, OTHER))
        self.regions = self.provider = self.ray.provider = Regions(self)  # type: ignore[assignment]

    def kinds(self) -> Counter[str]:
        return Counter(machine.node_type for machine in self.machines())


@pytest.fixture
def cluster() -> InRegions:
    return InRegions()


def test_the_cheapest_region_first_then_the_next_and_another_cloud_last(cluster: InRegions) -> None:
    for _ in range(4):
        cluster.submit(NODE)
    cluster.settle(30)
    assert cluster.kinds() == {"gpu.west": 4}
    for _ in range(5):
        cluster.submit(NODE)
    cluster.settle(30)
    assert cluster.kinds() == {"gpu.west": 4, "gpu": 4, "gpu.other": 1}
    cluster.check_no_leak()


def test_a_gang_is_at_one_provider(cluster: InRegions) -> None:
    cluster.submit(NODE.model_copy(update={"members": 3, "together": PROVIDER_LABEL}))
    cluster.settle(30)
    assert cluster.kinds() == {"gpu.west": 3}
    cluster.submit(NODE.model_copy(update={"members": 3, "together": PROVIDER_LABEL}))
    cluster.settle(30)
    assert cluster.kinds() == {"gpu.west": 3, "gpu": 3}, "the west has one node left, and it is not taken"


def test_a_region_that_is_away_keeps_its_nodes_and_its_demand_goes_elsewhere(cluster: InRegions) -> None:
    first = cluster.submit(NODE)
    cluster.settle(30)
    before = cluster.machines()
    assert [machine.node_type for machine in before] == ["gpu.west"]
    cluster.regions.each["west"].is_away = True
    cluster.submit(NODE)
    cluster.settle(120)
    assert cluster.kinds() == {"gpu.west": 1, "gpu": 1}
    assert before[0] in cluster.machines()
    assert cluster.book.jobs[first].restarts == 0
    cluster.finish(first)
    cluster.settle(60)
    assert cluster.kinds() == {"gpu.west": 1, "gpu": 1}, "it cannot be ended yet, and is not forgotten"
    cluster.regions.each["west"].is_away = False
    cluster.settle(60)
    assert cluster.kinds() == {"gpu": 1}
    cluster.check_no_leak()


def test_prices_and_reclaims_are_those_of_one_region() -> None:
    spot = [
        each.model_copy(
            update={"market": CapacityType.SPOT, "name": f"{each.name}.spot", "price_micro_usd_h": 1_000_000}
        )
        for each in (EAST, WEST)
    ]
    cluster = InRegions(*spot)
    cluster.regions._node_types |= {each.name: each.provider for each in spot}
    cluster.regions.each["aws"].set_price("gpu.spot", "us-east-1a", 900_000)
    cluster.submit(NODE)
    cluster.settle(30)
    (machine,) = cluster.machines()
    assert (machine.node_type, machine.price_micro_usd_h) == ("gpu.spot", 900_000)
    cluster.regions.each["aws"].reclaim(machine.node_id)
    cluster.settle(30)
    assert cluster.kinds() == {"gpu.west.spot": 1}
    east, west = (cluster.risk._per_h(each.name, each.zones[0], cluster.clock.now_s()) for each in spot)
    assert east > west
