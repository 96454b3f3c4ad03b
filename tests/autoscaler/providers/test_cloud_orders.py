"""Purchases at Google Cloud do not wait for the machine: Ray's NodeProvider against a stand-in for Google."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.autoscaler.providers.notices.key_values import KeyValues

from raytide.autoscaler.providers.cloud.orders import without_waits
from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.cloud.setup import SetUp
from raytide.autoscaler.providers.notices.watch import NoticeBoard
from raytide.core.clock import VirtualClock
from raytide.core.errors import ProviderError
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType

TYPE = NodeType.parse(
    {"name": "cpu", "resources": {"CPU": 8}, "price_micro_usd_h": 1_000_000, "zones": ["z"]}, where="cpu"
)
CONFIG: dict[str, Any] = {
    "provider": {"type": "gcp"},
    "cluster_name": "c",
    "auth": {},
    "available_node_types": {"cpu": {"node_config": {}}},
}


class Google:
    """Ray's resource for Google's machines. An operation is done, or has failed, when the test says so."""

    def __init__(self) -> None:
        self.machines: dict[str, dict[str, str]] = {}
        self.operation: dict[str, Any] = {"status": "RUNNING"}
        self.waits = 0
        self.is_away = False

    def create_instances(
        self, config: dict[str, Any], tags: dict[str, str], count: int, wait_for_operation: bool = True
    ) -> list[tuple[dict[str, str], str]]:
        self.waits += wait_for_operation
        name = f"m-{len(self.machines)}-compute"
        self.machines[name] = tags
        return [({"name": "operation-1"}, name)]

    def delete_instance(self, node_id: str, wait_for_operation: bool = True) -> None:
        self.waits += wait_for_operation
        self.machines.pop(node_id, None)

    def wait_for_operation(self, operation: dict[str, str], max_polls: int, poll_interval: int) -> dict[str, Any]:
        if self.is_away:
            raise ConnectionError("no route to Google")
        if "error" in self.operation:
            raise Exception(self.operation["error"])  # as Ray does
        self.waits += max_polls * poll_interval
        return self.operation


class RaysCloud:
    """Ray's NodeProvider of Google Cloud, with its calls of the resource."""

    def __init__(self, google: Google) -> None:
        self._google, self.lock = google, threading.RLock()
        self._construct_clients()

    def _construct_clients(self) -> None:
        self.resources = {"compute": self._google}

    def _get_resource_depending_on_node_name(self, name: str) -> Google:
        return self.resources["compute"]

    def create_node_with_resources_and_labels(
        self, config: dict[str, Any], tags: dict[str, str], count: int, *_: object
    ) -> dict[str, Any]:
        return {name: made for made, name in self.resources["compute"].create_instances(config, tags, count)}

    def set_node_tags(self, name: str, tags: dict[str, str]) -> None:
        with self.lock, self.lock:
            self.resources["compute"].wait_for_operation({"name": "labels"}, max_polls=12, poll_interval=5)

    def terminate_node(self, name: str) -> None:
        self.resources["compute"].delete_instance(node_id=name)

    def non_terminated_nodes(self, tags: dict[str, str]) -> list[str]:
        with self.lock:
            return list(self._google.machines)

    def node_tags(self, name: str) -> dict[str, str]:
        return self._google.machines[name]

    def internal_ip(self, name: str) -> str:
        return "10.0.0.2"


class Begun(SetUp):
    def __init__(self) -> None:
        self.nodes: list[str] = []

    def begin(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        self.nodes.append(node_id)


NODE = Node("node-1", "cpu", "z", CapacityType.SPOT, 1_000_000, NodeState.REQUESTED, 1_000.0)


@pytest.fixture
def google() -> Google:
    return Google()


@pytest.fixture
def begun() -> Begun:
    return Begun()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_000.0)


@pytest.fixture
def cloud(
    google: Google, begun: Begun, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CloudProvider:
    of_ray = without_waits(RaysCloud(google), "gcp")
    monkeypatch.setattr("raytide.core.ray_internals.worker_tags", lambda config, name: {"ray-user-node-type": name})
    return CloudProvider(CONFIG, of_ray, [TYPE], tmp_path, clock, begun, NoticeBoard(KeyValues))


def test_a_purchase_waits_for_google_in_no_tick_and_is_billed_from_the_machines_start(
    cloud: CloudProvider, google: Google, begun: Begun, clock: VirtualClock
) -> None:
    cloud.launch(NODE, TYPE)
    assert cloud.machines() == ()
    cloud.launch(NODE, TYPE)
    assert (len(google.machines), begun.nodes) == (1, [])
    clock.advance(40.0)
    google.operation = {"status": "DONE"}
    (machine,) = cloud.machines()
    assert (machine.node_id, machine.started_at_s, machine.price_micro_usd_h) == ("node-1", 1_040.0, 1_000_000)
    assert begun.nodes == ["node-1"]
    cloud.terminate("node-1")
    assert google.machines == {}
    assert google.waits == 0


def test_a_machine_that_google_cannot_make_is_refused_and_not_billed(
    cloud: CloudProvider, google: Google, clock: VirtualClock
) -> None:
    cloud.launch(NODE, TYPE)
    google.is_away = True
    assert cloud.machines() == (), "the other machines are listed all the same"
    google.is_away = False
    google.operation, google.machines = {"error": "ZONE_RESOURCE_POOL_EXHAUSTED"}, {}
    assert cloud.machines() == ()
    cloud.launch(NODE, TYPE)
    assert google.machines == {}, "orders are asked for every five seconds"
    clock.advance(5.0)
    assert cloud.machines() == ()
    with pytest.raises(ProviderError, match="could not make the cpu in z that it sold: ZONE_RESOURCE_POOL_EXHAUSTED"):
        cloud.launch(NODE, TYPE)
    assert cloud.machines() == ()


def test_machines_are_listed_while_a_label_is_set() -> None:
    google = Google()
    listed: list[list[str]] = []

    def wait(operation: dict[str, str], max_polls: int, poll_interval: int) -> dict[str, Any]:
        other = threading.Thread(target=lambda: listed.append(of_ray.non_terminated_nodes({})), daemon=True)
        other.start()
        other.join(10.0)
        return {"status": "DONE"}

    google.wait_for_operation = wait  # type: ignore[method-assign]
    of_ray = without_waits(RaysCloud(google), "gcp")
    of_ray.set_node_tags("m-0-compute", {})
    assert listed == [[]]
    assert not of_ray.lock._is_owned()


def test_a_node_given_up_while_google_makes_it_ends_also_if_it_is_listed_later(
    cloud: CloudProvider, google: Google
) -> None:
    cloud.launch(NODE, TYPE)
    later, google.machines = google.machines, {}
    cloud.terminate("node-1")
    google.machines = later
    assert cloud.machines() == ()
    assert google.machines == {}
