"""Several providers in one cluster: each node at its own, and the failure of one stops no other."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.mixed import MixedBill, MixedProvider
from raytide.autoscaler.providers.source import ProviderSource
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

OWN = NodeType(name="own", resources={"CPU": 2}, price_micro_usd_h=10_000)
CLOUD = NodeType(name="cloud", resources={"CPU": 2}, price_micro_usd_h=90_000)


class FailingCloud(FakeProvider):
    """A cloud whose API can fail."""

    is_down = False

    def machines(self) -> tuple[Machine, ...]:
        if self.is_down:
            raise ClusterError("the cloud does not answer.")
        return super().machines()

    def prices(self) -> Mapping[tuple[str, str], int]:
        if self.is_down:
            raise ClusterError("no prices.")
        return super().prices()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


@pytest.fixture
def own(clock: VirtualClock) -> FakeProvider:
    return FakeProvider(clock)


@pytest.fixture
def cloud(clock: VirtualClock) -> FailingCloud:
    return FailingCloud(clock)


@pytest.fixture
def mixed(own: FakeProvider, cloud: FailingCloud) -> MixedProvider:
    sources = [ProviderSource("hosts", lambda: own), ProviderSource("aws", lambda: cloud)]
    return MixedProvider(sources, {"own": "hosts", "cloud": "aws"})


def launch(provider: MixedProvider, node_id: str, node_type: NodeType) -> None:
    market = CapacityType.ON_DEMAND
    provider.launch(Node(node_id, node_type.name, "local", market, 1, NodeState.REQUESTED, 0.0), node_type)


def live(provider: FakeProvider | MixedProvider) -> list[str]:
    return [machine.node_id for machine in provider.machines() if machine.ended_at_s is None]


def test_a_node_is_bought_listed_and_ended_where_its_type_belongs(
    mixed: MixedProvider, own: FakeProvider, cloud: FailingCloud
) -> None:
    launch(mixed, "n1", OWN)
    launch(mixed, "n2", CLOUD)
    assert (live(own), live(cloud), live(mixed)) == (["n1"], ["n2"], ["n1", "n2"])
    mixed.terminate("n2")
    assert (live(own), live(cloud)) == (["n1"], [])
    cloud.set_price("cloud", "local", 7)
    assert mixed.prices() == {("cloud", "local"): 7}
    own.give_notice("n1", 60)
    assert [notice.node_id for notice in mixed.notices()] == ["n1"]


def test_a_cloud_that_does_not_answer_stops_no_own_machine_and_loses_no_node(
    mixed: MixedProvider, cloud: FailingCloud
) -> None:
    launch(mixed, "n1", OWN)
    launch(mixed, "n2", CLOUD)
    assert live(mixed) == ["n1", "n2"]
    cloud.is_down = True
    launch(mixed, "n3", OWN)
    assert live(mixed) == ["n1", "n2", "n3"]
    assert mixed.problems() == ("provider aws: the cloud does not answer.",)
    mixed.terminate("n1")
    assert live(mixed) == ["n2", "n3"]
    assert mixed.prices() == {}
    cloud.is_down = False
    assert live(mixed) == ["n2", "n3"]
    assert mixed.problems() == ()


def test_nothing_is_concluded_from_a_provider_that_never_answered(mixed: MixedProvider, cloud: FailingCloud) -> None:
    cloud.is_down = True
    with pytest.raises(ClusterError, match="does not answer"):
        mixed.machines()


def test_the_bill_is_that_of_all(own: FakeProvider, cloud: FailingCloud, mixed: MixedProvider) -> None:
    launch(mixed, "n1", OWN)
    launch(mixed, "n2", CLOUD)
    assert [machine.node_id for machine in MixedBill({"a": own, "b": cloud}).machines()] == ["n1", "n2"]


def test_a_node_that_its_provider_has_accepted_is_not_refused_while_the_provider_is_silent(
    mixed: MixedProvider, cloud: FailingCloud
) -> None:
    assert live(mixed) == []
    launch(mixed, "n1", CLOUD)
    cloud.is_down = True
    assert live(mixed) == []
    launch(mixed, "n1", CLOUD)
    with pytest.raises(ProviderError, match="does not answer"):
        launch(mixed, "n2", CLOUD)
    cloud.is_down = False
    assert live(mixed) == ["n1"]
