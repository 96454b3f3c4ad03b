"""A provider that answers late or never: what is asked of it ends in time, and what it does meanwhile counts."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.autoscaler.providers.source import ProviderSource
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

PATIENT_S, IMPATIENT_S = 120.0, 0.1
"""The time that a call may take while the cloud answers, on a busy machine too, and while it does not."""
TYPE = NodeType(name="cpu", resources={"CPU": 2}, price_micro_usd_h=10_000)


class SlowCloud(FakeProvider):
    """Answers a call of this kind when it is let go."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(100.0))
        self.holds = ""
        self.let_go, self.entered = Event(), Event()

    def launch(self, node: Node, node_type: NodeType) -> None:
        self._wait("launch")
        super().launch(node, node_type)

    def machines(self) -> tuple[Machine, ...]:
        self._wait("machines")
        return super().machines()

    def _wait(self, what: str) -> None:
        if self.holds == what:
            self.entered.set()
            assert self.let_go.wait(60)


@pytest.fixture
def cloud() -> Iterator[SlowCloud]:
    made = SlowCloud()
    yield made
    made.let_go.set()


@pytest.fixture
def mixed(cloud: SlowCloud) -> MixedProvider:
    own = FakeProvider(VirtualClock(100.0))
    own.launch(node("own-1"), TYPE)
    sources = [ProviderSource("own", lambda: own), ProviderSource("cloud", lambda: cloud, answer_s=PATIENT_S)]
    made = MixedProvider(sources, {"cpu": "cloud"})
    assert listed(made) == ["own-1"]
    return made


def node(node_id: str, requested_at_s: float = 0.0) -> Node:
    return Node(node_id, "cpu", "local", CapacityType.ON_DEMAND, 1, NodeState.REQUESTED, requested_at_s)


def listed(provider: MixedProvider) -> list[str]:
    return [machine.node_id for machine in provider.machines()]


def hold(cloud: SlowCloud, mixed: MixedProvider, what: str) -> None:
    """Leaves the cloud's calls of this kind without an answer."""
    source = mixed._sources["cloud"]
    source._answer_s = source._patience_s = IMPATIENT_S
    cloud.holds = what


def let_go(cloud: SlowCloud, mixed: MixedProvider) -> None:
    """Answers the call that waits, and all after it."""
    source = mixed._sources["cloud"]
    source._answer_s = PATIENT_S
    cloud.holds = ""
    cloud.let_go.set()
    settled(source)


def settled(source: ProviderSource) -> None:
    assert source._slow is not None
    source._slow[1].join(60)


def test_a_call_without_an_answer_holds_up_nobody_and_is_not_made_twice(cloud: SlowCloud, mixed: MixedProvider) -> None:
    mixed.launch(node("n1"), TYPE)
    assert listed(mixed) == ["n1", "own-1"]
    hold(cloud, mixed, "machines")
    for _ in range(3):
        assert listed(mixed) == ["n1", "own-1"]
    assert mixed.problems()[0].startswith("provider cloud: it does not answer: to list its machines takes")
    with pytest.raises(ProviderError, match="provider cloud: it does not answer"):
        mixed.launch(node("n2"), TYPE)
    let_go(cloud, mixed)
    assert listed(mixed) == ["n1", "own-1"]
    assert mixed.problems() == ()
    mixed.launch(node("n2"), TYPE)
    assert listed(mixed) == ["n1", "n2", "own-1"]


def test_a_purchase_that_takes_long_goes_on_and_its_provider_is_not_silent(
    cloud: SlowCloud, mixed: MixedProvider
) -> None:
    hold(cloud, mixed, "launch")
    with pytest.raises(ClusterError, match="to launch n1 takes too long"):
        mixed.launch(node("n1"), TYPE)
    assert listed(mixed) == ["own-1"]
    with pytest.raises(ClusterError) as busy:  # nothing is known of the pool: the next tick repeats it
        mixed.launch(node("n2"), TYPE)
    assert not isinstance(busy.value, ProviderError)
    let_go(cloud, mixed)
    assert listed(mixed) == ["n1", "own-1"]
    mixed.launch(node("n1"), TYPE)
    assert listed(mixed) == ["n1", "own-1"]


def test_a_node_that_may_have_been_bought_is_not_refused_while_its_provider_is_silent(
    cloud: SlowCloud, mixed: MixedProvider
) -> None:
    hold(cloud, mixed, "launch")
    with pytest.raises(ClusterError):
        mixed.launch(node("n1"), TYPE)
    source = mixed._sources["cloud"]
    source._buying_until_s = 0.0  # it has taken longer than a purchase may
    assert listed(mixed) == ["own-1"]
    with pytest.raises(ClusterError) as doubt:
        mixed.launch(node("n1"), TYPE)
    assert not isinstance(doubt.value, ProviderError)
    with pytest.raises(ProviderError):
        mixed.launch(node("n2"), TYPE)


def test_an_answer_in_the_last_moment_leaves_the_usual_limit(
    cloud: SlowCloud, mixed: MixedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Thread):
        def is_alive(self) -> bool:
            """Ends just after it was found alive."""
            was_alive = super().is_alive()
            cloud.let_go.set()
            self.join(60)
            return was_alive

    hold(cloud, mixed, "machines")
    source = mixed._sources["cloud"]
    source._answer_s = PATIENT_S
    monkeypatch.setattr("raytide.autoscaler.providers.source.threading.Thread", Late)
    with pytest.raises(ClusterError, match="to list its machines takes too long"):
        source.machines()
    assert source._patience_s == PATIENT_S


def test_a_provider_that_is_silent_from_the_start_is_refused_new_nodes_and_asked_for_earlier_ones() -> None:
    tries: list[int] = []

    def connect() -> FakeProvider:
        tries.append(1)
        raise ConnectionError("no route")

    clock = VirtualClock(100.0)
    source = ProviderSource("cloud", connect, FakeProvider(clock), monotonic_s=clock.now_s)
    mixed = MixedProvider([source], {"cpu": "cloud"}, began_s=100.0)
    assert listed(mixed) == []
    with pytest.raises(ProviderError, match="provider cloud: no route"):
        mixed.launch(node("new", 100.0), TYPE)
    assert (mixed.problems(), len(tries)) == (("provider cloud: no route",), 1)
    clock.advance(1.0)
    with pytest.raises(ConnectionError):  # the process before this one may have bought it
        mixed.launch(node("earlier", 99.0), TYPE)
    assert len(tries) == 2


def test_a_launcher_that_exits_is_an_error_and_the_next_call_connects_again() -> None:
    tries: list[int] = []

    def connect() -> FakeProvider:
        tries.append(1)
        if len(tries) == 1:
            raise SystemExit("no credentials")
        return FakeProvider(VirtualClock(1.0))

    clock = VirtualClock(0.0)
    source = ProviderSource("cloud", connect, monotonic_s=clock.now_s)
    with pytest.raises(ClusterError, match="could not list its machines: no credentials"):
        source.machines()
    clock.advance(1.0)
    assert source.machines() == ()


def test_ticks_connect_to_a_provider_that_refuses_ever_less_often_and_log_each_error_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, tries = VirtualClock(0.0), list[float]()

    def connect() -> FakeProvider:
        tries.append(clock.now_s())
        raise ConnectionError("no route")

    sources = [ProviderSource("cloud", connect, FakeProvider(clock), monotonic_s=clock.now_s)]
    mixed = MixedProvider(sources, {"cpu": "cloud"})
    for _ in range(400):  # ticks
        assert (listed(mixed), mixed.problems()) == ([], ("provider cloud: no route",))
        clock.advance(0.5)
    assert tries == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]
    assert [record.message for record in caplog.records] == ["source failed"]
