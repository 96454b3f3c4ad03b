"""Nodes as pods: which patches a RayCluster gets, and what becomes of them when things go wrong in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler.providers.kube_server import WORKER_GROUP, KubeServer

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.kuberay.kube_api import KubeApi
from raytide.autoscaler.providers.kuberay.provider import NODE_LABEL, KubeRayProvider
from raytide.autoscaler.ray_gcs import RayNode
from raytide.control.reconcile.observation import ray_names, with_node_ids
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ConfigError, ProviderError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.node import TYPE_LABEL, CapacityType, Node, NodeState, NodeType

EXAMPLE = Path(__file__).parents[3] / "examples" / "kuberay.yaml"
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
    return Node(node_id, node_type.name, "local", CapacityType.ON_DEMAND, price, NodeState.REQUESTED, 1_000.0)


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
    assert [node.node_id for node in with_node_ids(joined, ray_names(provider.machines())) or ()] == ["a", ""]


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
    kube.operate()  # it goes on being named while it goes: the operator would delete another in its place
    kube.reap()
    make().machines()
    kube.operate()
    assert sorted(kube.names("l4")) == sorted([pod["a"], pod["c"]])


def test_a_pod_that_kubernetes_deletes_is_a_notice_and_its_node_is_replaced_meanwhile(
    kube: KubeServer, make: Make, clock: VirtualClock
) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    kube.operate()
    pod = provider.machines()[0].ray_id
    assert provider.notices() == ()
    kube.evict(pod)
    assert provider.notices() == (Notice("a", 1_050.0),)
    assert provider.machines()[0].ended_at_s is None  # it runs until it is killed
    provider.launch(wanted("b"), L4)
    kube.operate()
    assert sorted(machine.ray_id for machine in provider.machines()) == [pod, "tide-l4-worker-002"]
    clock.advance(50.0)
    kube.reap()
    ended = {machine.node_id: machine.ended_at_s for machine in provider.machines()}
    assert ended == {"a": 1_050.0, "b": None}
    kube.operate()
    assert kube.names("l4") == ["tide-l4-worker-002"]


def test_a_machine_that_is_marked_to_go_is_a_notice_for_its_pods(
    kube: KubeServer, make: Make, clock: VirtualClock
) -> None:
    provider = make()
    for name in ("a", "b"):
        provider.launch(wanted(name), L4)
    kube.operate()
    pods = {machine.node_id: machine.ray_id for machine in provider.machines()}
    kube.taint(pods["a"], "node.kubernetes.io/unschedulable")  # says nothing of an end
    assert provider.notices() == ()
    clock.advance(10.0)
    kube.taint(pods["b"], "cloud.google.com/impending-node-termination")
    assert provider.notices() == (Notice("b", 1_040.0),)
    clock.advance(10.0)
    assert provider.notices() == (Notice("b", 1_040.0),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "wall_ahead_s", lambda: 3600.0)
        assert provider.notices() == (Notice("b", 1_040.0 + 3600.0),)


def test_pods_that_nobody_bought_are_refused(kube: KubeServer, make: Make) -> None:
    kube.group("l4")["minReplicas"] = 1
    with pytest.raises(ConfigError, match="worker group l4 has minReplicas 1"):
        make().machines()


def test_a_group_whose_replicas_are_several_pods_is_refused(kube: KubeServer, make: Make) -> None:
    """The pods beyond the first would be named for deletion, and the operator then deletes the whole replica."""
    kube.group("cpu")["numOfHosts"] = 1
    kube.group("l4")["numOfHosts"] = 4
    with pytest.raises(ConfigError, match="worker group l4 has numOfHosts 4"):
        make().launch(wanted("a"), L4)
    assert kube.group("l4").get("replicas", 0) == 0


def test_a_node_given_up_before_its_pod_came_takes_nobody_elses(kube: KubeServer, make: Make) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    provider.launch(wanted("b"), L4)
    provider.terminate("a")
    kube.operate()
    live = [machine for machine in provider.machines() if machine.ended_at_s is None]
    assert [(machine.node_id, machine.ray_id) for machine in live] == [("b", "tide-l4-worker-001")]
    assert kube.group("l4")["replicas"] == 1


def test_a_patch_that_is_lost_after_the_purchase_does_not_empty_the_pool(
    kube: KubeServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("not now")

    provider = make()
    with monkeypatch.context() as busy:
        busy.setattr(kube, "patch", refuse)
        with pytest.raises(ClusterError, match="not now"):
            provider.launch(wanted("a"), L4)
    assert [machine.ended_at_s for machine in provider.machines()] == [None]
    provider.launch(wanted("a"), L4)
    kube.operate()
    assert [machine.ray_id for machine in provider.machines()] == ["tide-l4-worker-001"]


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
    kube.reap()
    assert kube.names("l4") == []


def test_a_lost_patch_is_made_good_by_the_next_look(kube: KubeServer, make: Make) -> None:
    provider = make()
    provider.launch(wanted("a"), L4)
    kube.operate()
    provider.machines()
    kube.fail_next = [503]
    with pytest.raises(ClusterError, match="503"):
        provider.terminate("a")
    make().machines()
    kube.operate()
    kube.reap()
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


def test_the_example_manifest_is_whole(tmp_path: Path) -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all(EXAMPLE.read_text())}
    file = tmp_path / "cluster.yaml"
    file.write_text(documents["ConfigMap"]["data"]["cluster.yaml"])
    config, spec = load_cluster(file), documents["RayCluster"]["spec"]
    assert config.name == documents["RayCluster"]["metadata"]["name"]
    assert not spec["enableInTreeAutoscaling"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert groups.keys() == {node_type.name for node_type in config.node_types}
    for node_type in config.node_types:
        group = groups[node_type.name]
        jsonschema.validate(group, WORKER_GROUP)
        assert group["minReplicas"] == 0
        assert group["maxReplicas"] >= node_type.max_nodes
        assert float(group["rayStartParams"].get("num-gpus", 0)) == node_type.resources.get("GPU", 0)
        variables = {each["name"]: each.get("value", "") for each in group["template"]["spec"]["containers"][0]["env"]}
        (zone,) = node_type.zones
        labels = {TYPE_LABEL: variables["RAY_NODE_TYPE_NAME"], **json.loads(variables["RAY_OVERRIDE_LABELS"])}
        assert labels == node_type.all_labels(zone)
    allowed = {
        (resource, verb)
        for kind in ("Role", "ClusterRole")
        for rule in documents[kind]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = {("rayclusters", "get"), ("rayclusters", "patch"), ("pods", "list"), ("pods", "patch"), ("nodes", "list")}
    assert allowed == used


Step = tuple[str, int]
STEPS = ("launch", "terminate", "operate", "evict", "kill", "reap", "look", "fail", "crash")


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
                        kube.evict(name)
                elif what == "kill":
                    for name in sorted(kube.pods)[number : number + 1]:
                        kube.pods.pop(name)
                elif what == "reap":
                    kube.reap()
                elif what == "look":
                    provider.machines()
                elif what == "fail":
                    kube.fail_next = [500]
                else:
                    provider.close()
                    provider = controller()
            except ClusterError:
                pass
        kube.fail_next = []
        for _ in range(4):
            provider.machines()
            kube.operate()
            kube.reap()
        live = {machine.ray_id for machine in provider.machines() if machine.ended_at_s is None}
        assert live == set(kube.pods)
        assert len(live) == kube.group("cpu").get("replicas", 0)
    finally:
        provider.close()
        kube.close()


def test_every_ray_of_the_example_asks_for_its_token_and_shows_its_dashboard_to_its_pod_alone() -> None:
    cluster = next(doc for doc in yaml.safe_load_all(EXAMPLE.read_text()) if doc["kind"] == "RayCluster")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (token,) = (volume for volume in pod["volumes"] if volume["name"] == "ray-token")
        assert token["secret"] == {"secretName": "raytide-ray", "defaultMode": 0o440}
        for container in pod["containers"]:
            environment = {each["name"]: each.get("value") for each in container["env"]}
            assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == (
                "token",
                "/etc/ray-token/token",
            )
            assert {"name": "ray-token", "mountPath": "/etc/ray-token", "readOnly": True} in container["volumeMounts"]
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert not any(group["template"]["spec"]["automountServiceAccountToken"] for group in groups[1:])
