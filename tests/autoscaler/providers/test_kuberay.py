"""Nodes as pods: which patches a RayCluster gets, and what becomes of them when things go wrong in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler.providers.kube_server import KubeServer

from raytide.autoscaler.providers.kube_api import KubeApi
from raytide.autoscaler.providers.kuberay import NODE_LABEL, KubeRayProvider
from raytide.autoscaler.ray_node import RayNode
from raytide.control.world import named, ray_names
from raytide.core.clock import VirtualClock
from raytide.core.errors import ConfigError, ProviderError
from raytide.core.fleet import Market, Node, NodeState, NodeType

L4 = NodeType(name="l4", resources={"CPU": 4, "GPU": 1}, price_micro_usd_h=800_000)
CPU = NodeType(name="cpu", resources={"CPU": 16}, price_micro_usd_h=400_000)


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    server = KubeServer({"cpu": 8, "l4": 3})
    yield server
    server.close()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_000.0)


Make = Callable[[], KubeRayProvider]


@pytest.fixture
def make(kube: KubeServer, tmp_path: Path, clock: VirtualClock) -> Iterator[Make]:
    """A provider over the same folder each time, as after a crash."""
    made: list[KubeRayProvider] = []

    def one() -> KubeRayProvider:
        made.append(KubeRayProvider(KubeApi(kube.url, "ml", account=tmp_path), "tide", tmp_path / "run", clock))
        return made[-1]

    yield one
    for provider in made:
        provider.close()


def wanted(node_id: str, node_type: NodeType = L4) -> Node:
    price = node_type.price_micro_usd_h
    return Node(node_id, node_type.name, "local", Market.ON_DEMAND, price, NodeState.REQUESTED, 1_000.0)


def test_a_launch_raises_the_groups_replicas_once_and_the_pod_becomes_the_node(kube: KubeServer, make: Make) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    provider.launch(wanted("a"), L4)
    make().launch(wanted("a"), L4)  # by the next controller
    assert (kube.group("l4")["replicas"], kube.patches) == (1, 1)
    assert provider.machines()[0].ray_id == ""

    kube.operate()
    (machine,) = provider.machines()
    assert (machine.node_id, machine.ray_id, machine.address) == ("a", "tide-l4-worker-001", "10.0.0.1")
    assert kube.pods["tide-l4-worker-001"]["metadata"]["labels"][NODE_LABEL] == "a"
    joined = (RayNode("ff", "tide-l4-worker-001"), RayNode("00", ""))
    assert [node.node_id for node in named(joined, ray_names(provider.machines())) or ()] == ["a", ""]


def test_a_termination_names_its_pod(kube: KubeServer, make: Make, clock: VirtualClock) -> None:
    provider = make()
    for name in ("a", "b", "c"):
        provider.launch(wanted(name), L4)
    kube.operate()
    pod = {machine.node_id: machine.ray_id for machine in provider.machines()}
    clock.advance(60.0)
    provider.terminate("b")
    group = kube.group("l4")
    assert (group["replicas"], group["scaleStrategy"]["workersToDelete"]) == (2, [pod["b"]])
    kube.operate()
    ended = {machine.node_id: machine.ended_at_s for machine in make().machines()}
    assert ended == {"a": None, "b": 1_060.0, "c": None}
    assert kube.group("l4")["scaleStrategy"]["workersToDelete"] == []
    assert sorted(kube.names("l4")) == sorted([pod["a"], pod["c"]])


def test_a_node_given_up_before_its_pod_came_takes_nobody_elses(kube: KubeServer, make: Make) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    provider.launch(wanted("b"), L4)
    provider.terminate("a")
    kube.operate()
    live = [machine for machine in provider.machines() if machine.ended_at_s is None]
    assert [(machine.node_id, machine.ray_id) for machine in live] == [("b", "tide-l4-worker-001")]
    assert kube.group("l4")["replicas"] == 1


def test_a_pod_that_vanishes_ends_its_node_and_its_substitute_is_deleted(
    kube: KubeServer, make: Make, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    kube.operate()
    provider.machines()
    kube.pods.clear()  # evicted
    kube.operate()  # the operator replaces it at once
    clock.advance(5.0)
    (machine,) = provider.machines()
    assert (machine.ended_at_s, machine.reason) == (1_005.0, "its pod is gone")
    kube.operate()
    assert kube.names("l4") == []


def test_a_lost_patch_is_made_good_by_the_next_look(kube: KubeServer, make: Make) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    kube.operate()
    provider.machines()
    kube.fail_next = [503]
    with pytest.raises(ProviderError, match="503"):
        provider.terminate("a")
    make().machines()
    kube.operate()
    assert kube.names("l4") == []


def test_what_cannot_be_bought_is_said_by_name(kube: KubeServer, make: Make) -> None:
    provider = make()
    for name in ("a", "b", "c"):
        provider.launch(wanted(name), L4)
    with pytest.raises(ProviderError, match="l4 is at its maxReplicas"):
        provider.launch(wanted("d"), L4)
    with pytest.raises(ConfigError, match=r"no worker group h100.") as refused:
        provider.launch(wanted("e", NodeType(name="h100", resources={}, price_micro_usd_h=1)), L4)
    assert "cpu, l4" in refused.value.hint
    kube.cluster["spec"]["enableInTreeAutoscaling"] = True
    with pytest.raises(ConfigError, match="own autoscaler"):
        provider.machines()


Step = tuple[str, int]
STEPS = ("launch", "terminate", "operate", "evict", "look", "fail", "crash")


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=25))
def test_whatever_happens_pods_and_purchases_agree_in_the_end(
    steps: list[Step], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, clock = tmp_path_factory.mktemp("kube"), VirtualClock(0.0)
    kube = KubeServer({"cpu": 8})

    def controller() -> KubeRayProvider:
        return KubeRayProvider(KubeApi(kube.url, "ml", account=folder), "tide", folder / "run", clock)

    provider = controller()
    try:
        for what, number in steps:
            clock.advance(1.0)
            try:
                if what == "launch":
                    provider.launch(wanted(f"n{number}", CPU), CPU)
                elif what == "terminate":
                    provider.terminate(f"n{number}")
                elif what == "operate":
                    kube.operate()
                elif what == "evict":
                    for name in sorted(kube.pods)[number : number + 1]:
                        kube.pods.pop(name)
                elif what == "look":
                    provider.machines()
                elif what == "fail":
                    kube.fail_next = [500]
                else:
                    provider.close()
                    provider = controller()
            except ProviderError:
                pass
        kube.fail_next = []
        for _ in range(4):
            provider.machines()
            kube.operate()
        live = {machine.ray_id for machine in provider.machines() if machine.ended_at_s is None}
        assert live == set(kube.pods)
        assert len(live) == kube.group("cpu").get("replicas", 0)
    finally:
        provider.close()
        kube.close()
