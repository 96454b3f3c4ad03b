"""The shipped cluster.yaml on a cloud: Ray's own AWS provider against a moto server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.autoscaler.providers.notices.key_values import KeyValues

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.cloud.provider import NODE_TAG, CloudProvider
from raytide.autoscaler.providers.cloud.setup import CloudSetUp, SetUp, start_commands
from raytide.autoscaler.providers.notices.base import CloudNotice
from raytide.autoscaler.providers.notices.watch import NoticeBoard
from raytide.autoscaler.ray_gcs import RayNode
from raytide.control.bootstrap.cloud_launch import dry_run
from raytide.core import ray_internals
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, ConfigError, ProviderError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.ledger.reconcile import bill

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"
STANDINS = Path(__file__).parents[2] / "control" / "cloud"
TYPES = {each.name: each for each in load_cluster(SHIPPED).node_types}


@pytest.fixture
def config(aws_for_ray: Path) -> dict[str, Any]:
    """The shipped file as `ray up` completes it."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    completed: dict[str, Any] = AWSNodeProvider.bootstrap_config(
        ray_internals.prepared_config(yaml.safe_load(SHIPPED.read_text()))
    )
    return completed


class Begun(SetUp):
    """A SetUp that only notes what it was asked for."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, str]] = []

    def begin(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        self.nodes.append((node_id, zone))


@pytest.fixture
def begun() -> Begun:
    return Begun()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_000.0)


def ray_cloud(config: dict[str, Any]) -> Any:
    return ray_internals.node_provider(config["provider"], config["cluster_name"])


MakeCloud = Callable[[], CloudProvider]


@pytest.fixture
def kv() -> KeyValues:
    return KeyValues()


@pytest.fixture
def make(config: dict[str, Any], tmp_path: Path, begun: Begun, clock: VirtualClock, kv: KeyValues) -> MakeCloud:
    """A provider over the same folder each time, as after a crash."""
    board = NoticeBoard(lambda: kv)
    return lambda: CloudProvider(config, ray_cloud(config), TYPES.values(), tmp_path / "run", clock, begun, board)


def wanted(node_id: str, node_type: str = "h100x8.spot", zone: str = "us-east-1b") -> Node:
    return Node(node_id, node_type, zone, CapacityType.SPOT, 23_140_000, NodeState.REQUESTED, 1_000.0)


def instances() -> list[Any]:
    import boto3

    live = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    return list(boto3.resource("ec2").instances.filter(Filters=live))


def test_a_node_is_bought_in_its_zone_once_and_billed_until_it_ends(
    make: MakeCloud, begun: Begun, clock: VirtualClock
) -> None:
    cloud, node = make(), wanted("node-1")
    cloud.launch(node, TYPES[node.type])
    cloud.launch(node, TYPES[node.type])
    make().launch(node, TYPES[node.type])  # by the next controller

    (instance,) = instances()
    assert (instance.instance_type, instance.placement["AvailabilityZone"]) == ("p5.48xlarge", "us-east-1b")
    assert instance.instance_lifecycle == "spot"
    assert {tag["Key"]: tag["Value"] for tag in instance.tags}[NODE_TAG] == "node-1"
    assert begun.nodes[0] == ("node-1", "us-east-1b")
    (machine,) = cloud.machines()
    assert (machine.node_type, machine.zone, machine.price_micro_usd_h) == ("h100x8.spot", "us-east-1b", 23_140_000)
    assert machine.address == instance.private_ip_address

    clock.advance(300.0)
    assert cloud._spot_prices is not None
    cloud._spot_prices.ask()  # what moto asks for everything
    assert cloud.machines()[0].earlier == make().machines()[0].earlier == ((1_300.0, 23_140_000),)
    assert cloud.machines()[0].price_micro_usd_h == 10
    clock.advance(300.0)
    cloud.terminate("node-1")
    cloud.terminate("node-1")
    assert instances() == []
    (ended,) = make().machines()
    assert (ended.started_at_s, ended.ended_at_s, ended.reason) == (1_000.0, 1_600.0, "terminated")
    assert bill(ended) == round(300 / 3600 * (23_140_000 + 10))
    cloud.launch(node, TYPES[node.type])
    assert instances() == []


def test_a_controller_killed_before_it_wrote_the_purchase_finds_the_machine_by_its_tags(
    make: MakeCloud, begun: Begun, tmp_path: Path
) -> None:
    cloud, node = make(), wanted("node-1", zone="us-east-1a")
    cloud.launch(node, TYPES[node.type])
    for file in (tmp_path / "run" / "purchases").iterdir():
        file.unlink()
    begun.nodes.clear()

    after = make()
    (machine,) = after.machines()
    assert (machine.node_id, machine.zone, machine.price_micro_usd_h) == ("node-1", "us-east-1a", 23_140_000)
    assert begun.nodes == [("node-1", "us-east-1a")]  # it was not set up either
    after.launch(node, TYPES[node.type])
    assert len(instances()) == 1


def test_a_machine_that_the_cloud_takes_away_ends_when_it_is_missed(make: MakeCloud, clock: VirtualClock) -> None:
    cloud, node = make(), wanted("node-1")
    cloud.launch(node, TYPES[node.type])
    instances()[0].terminate()
    assert cloud.machines()[0].ended_at_s is None  # a cloud may not list at once what it sold
    clock.advance(120.0)
    (machine,) = cloud.machines()
    assert (machine.ended_at_s, machine.reason) == (1_120.0, "the cloud took it away")


class Listings:
    """Ray's NodeProvider, whose listings can be empty or fail."""

    def __init__(self, of_ray: Any) -> None:
        self._of_ray = of_ray
        self.are_empty = self.fail_after_a_purchase = self._fail = self.loses_answers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_ray, name)

    def create_node_with_resources_and_labels(self, *what: Any) -> Any:
        self._fail = self.fail_after_a_purchase
        made = self._of_ray.create_node_with_resources_and_labels(*what)
        if self.loses_answers:
            raise ConnectionError("Read timeout on endpoint URL")
        return made

    def non_terminated_nodes(self, tags: dict[str, str]) -> list[str]:
        if self._fail:
            self._fail = False
            raise ConnectionError("request limit exceeded")
        return [] if self.are_empty else list(self._of_ray.non_terminated_nodes(tags))


@pytest.fixture
def listed(config: dict[str, Any]) -> Listings:
    return Listings(ray_cloud(config))


@pytest.fixture
def cloud(config: dict[str, Any], listed: Listings, tmp_path: Path, begun: Begun, clock: VirtualClock) -> CloudProvider:
    board = NoticeBoard(KeyValues)
    return CloudProvider(config, listed, TYPES.values(), tmp_path / "run", clock, begun, board)


def test_a_machine_that_a_listing_left_out_is_ended_when_it_is_back(
    cloud: CloudProvider, listed: Listings, clock: VirtualClock
) -> None:
    cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    clock.advance(120.0)
    listed.are_empty = True
    (gone,) = cloud.machines()
    assert gone.reason == "the cloud took it away"
    listed.are_empty = False
    assert cloud.machines() == (gone,)
    assert instances() == []


@pytest.fixture
def bought_twice(
    config: dict[str, Any], cloud: CloudProvider, listed: Listings, tmp_path: Path, begun: Begun, clock: VirtualClock
) -> CloudProvider:
    """The next controller's provider, of which the cloud did not list at once what the one before had bought."""
    cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    for file in (tmp_path / "run" / "purchases").iterdir():
        file.unlink()
    after = CloudProvider(config, listed, TYPES.values(), tmp_path / "run", clock, begun, NoticeBoard(KeyValues))
    listed.are_empty = True
    after.launch(wanted("node-1"), TYPES["h100x8.spot"])
    listed.are_empty = False
    assert len(instances()) == 2
    return after


@pytest.mark.parametrize("in_use", [0, 1])
def test_of_two_machines_bought_for_a_node_over_a_crash_only_the_one_in_use_runs_on(
    bought_twice: CloudProvider, listed: Listings, in_use: int
) -> None:
    used = sorted(instance.id for instance in instances())[in_use]
    listed.non_terminated_nodes({})
    listed.set_node_tags(used, {"ray-node-status": "up-to-date"})
    (machine,) = bought_twice.machines()
    (left,) = instances()
    assert (left.id, left.private_ip_address) == (used, machine.address)
    assert machine.ended_at_s is None
    assert bought_twice.machines() == (machine,)


def test_a_node_that_was_bought_twice_over_a_crash_ends_with_both_machines(bought_twice: CloudProvider) -> None:
    bought_twice.terminate("node-1")
    assert instances() == []


def test_a_machine_that_was_sold_although_the_answer_was_lost_is_the_nodes(
    cloud: CloudProvider, listed: Listings, begun: Begun
) -> None:
    listed.loses_answers = True
    cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    assert begun.nodes == [("node-1", "us-east-1b")]
    (machine,) = cloud.machines()
    assert (machine.node_id, machine.started_at_s) == ("node-1", 1_000.0)
    assert len(instances()) == 1


def test_a_listing_that_fails_after_the_purchase_does_not_empty_the_pool_nor_buy_again(
    cloud: CloudProvider, listed: Listings, begun: Begun
) -> None:
    listed.fail_after_a_purchase = True
    with pytest.raises(ClusterError, match="could not list the nodes: request limit exceeded"):
        cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    assert begun.nodes == []
    cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    assert len(instances()) == 1
    assert begun.nodes == [("node-1", "us-east-1b")]


def test_a_refusal_of_the_cloud_is_a_provider_error_and_nothing_is_billed(
    make: MakeCloud, config: dict[str, Any]
) -> None:
    config["available_node_types"]["h100x8.spot"]["node_config"]["SecurityGroupIds"] = ["sg-none"]
    cloud = make()
    with pytest.raises(ProviderError, match=r"could not buy h100x8.spot in us-east-1a.*sg-none"):
        cloud.launch(wanted("node-1", zone="us-east-1a"), TYPES["h100x8.spot"])
    assert cloud.machines() == ()


def test_a_zone_without_a_subnet_is_refused_by_name(make: MakeCloud) -> None:
    with pytest.raises(ConfigError, match="no subnet of this cluster lies in eu-west-9z"):
        make().launch(wanted("node-2", zone="eu-west-9z"), TYPES["h100x8.spot"])


def test_what_a_nodes_watcher_pinned_is_its_notice_until_the_node_is_gone(make: MakeCloud, kv: KeyValues) -> None:
    cloud, board = make(), NoticeBoard(lambda: kv)
    for name in ("node-1", "node-2"):
        cloud.launch(wanted(name), TYPES["h100x8.spot"])
    assert cloud.notices() == ()
    board.pin("node-2", CloudNotice(1_120.0, "spot/instance-action terminate"))
    assert make().notices() == (Notice("node-2", 1_120.0),)
    cloud.terminate("node-2")
    assert cloud.notices() == ()
    assert kv.values == {}


class Shell:
    """Stands where Ray runs ssh and rsync: notes each command and says that it went well."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def check_call(self, command: list[str], **_: object) -> None:
        self.ran.append(" ".join(command))

    def check_output(self, command: list[str], **_: object) -> bytes:
        self.check_call(command)
        return b""


def test_a_machine_is_set_up_by_rays_updater_under_raytides_id_and_labels(
    config: dict[str, Any], tmp_path: Path, clock: VirtualClock
) -> None:
    config |= {"worker_setup_commands": ["echo set-up"], "initialization_commands": ["echo first"], "file_mounts": {}}
    shell, of_ray = Shell(), ray_cloud(config)
    set_up = CloudSetUp(config, of_ray, "10.0.0.1", tuple, process_runner=shell)
    board = NoticeBoard(KeyValues)
    cloud = CloudProvider(config, of_ray, TYPES.values(), tmp_path / "run", clock, set_up, board)
    cloud.launch(wanted("node-1"), TYPES["h100x8.spot"])
    assert set_up.wait("node-1", 60.0)

    text = "\n".join(shell.ran)
    assert text.index("uptime") < text.index("echo first") < text.index("echo set-up") < text.index("ray start")
    assert text.index("ray start") < text.index("raytide watch-notices aws")
    last = next(line for line in shell.ran if "ray start" in line)
    for name, value in (
        ("RAY_CLOUD_INSTANCE_ID", "node-1"),
        ("RAY_HEAD_IP", "10.0.0.1"),
        ("RAY_NODE_TYPE_NAME", "h100x8.spot"),
        ("RAY_OVERRIDE_LABELS", '"ray.io/availability-zone": "us-east-1b"'),
        ("RAY_OVERRIDE_RESOURCES", '"GPU": 8.0'),
    ):
        assert value in last.split(f"export {name}=")[1].split("export")[0], last


@pytest.mark.parametrize(
    ("cloud", "node_type", "started"),
    [
        ("aws", "h100x8.spot", ["raytide watch-notices aws", "raytide export-metrics"]),
        ("aws", "cpu", ["raytide watch-notices aws"]),
        ("vsphere", "h100x8.spot", ["raytide export-metrics"]),
        ("vsphere", "cpu", []),
    ],
)
def test_gpus_are_measured_on_every_cloud_and_notices_watched_where_there_are_any(
    cloud: str, node_type: str, started: list[str]
) -> None:
    file = {"worker_start_ray_commands": ["ray start"], "provider": {"type": cloud}}
    kind = TYPES["h100x8.spot"]
    kind = kind if node_type == "h100x8.spot" else kind.model_copy(update={"resources": {"CPU": 8.0}})
    _, *after = start_commands(file, "10.0.0.1", "node-1", kind, "zone-a")
    assert [command.rpartition("; ")[2] for command in after] == started


def test_a_node_that_joined_ray_is_not_set_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(cloud: object, config: object, cloud_id: str, *_: object) -> None:
        asked.append(cloud_id)
        raise RuntimeError("the connection broke after `ray start`")

    monkeypatch.setattr(ray_internals, "set_up_worker", fail)
    in_ray: list[RayNode] = []
    file = {"worker_start_ray_commands": ["ray stop", "ray start"], "provider": {"type": "aws"}}
    set_up = CloudSetUp(file, None, "10.0.0.1", lambda: in_ray)
    for alive in (None, False, True, True):
        in_ray[:] = [] if alive is None else [RayNode("ff", "node-1", is_alive=alive)]
        set_up.begin("i-1", "node-1", TYPES["h100x8.spot"], "us-east-1a")
        assert set_up.wait("node-1", 60.0) == bool(alive)
    assert asked == ["i-1", "i-1"]


def test_ray_up_does_to_the_head_what_the_dry_run_shows(
    aws_for_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the key pair that Ray makes in the cloud, and copies for the head to reach the workers."""
    import boto3

    log = tmp_path / "log"
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "constraints.txt").touch()
    standins = {"PATH": f"{STANDINS}:{os.environ['PATH']}", "STANDIN_LOG": str(log), "STANDIN_MACHINES": ""}
    command = [sys.executable, "-m", "ray.scripts.scripts", "up", "-y", "--no-config-cache", str(SHIPPED)]
    environment = {**os.environ, **standins}  # in a process of its own: Ray's threads must find no other ssh
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (head,) = boto3.resource("ec2").instances.all()
    assert {"Key": "ray-node-type", "Value": "head"} in head.tags
    did = [entry.split(" ", 1)[1] for entry in log.read_text().split("\0") if entry]
    would = [f"{step.what} {step.text}" for step in dry_run(SHIPPED) if step.machine == "head"]
    key = next(at for at, step in enumerate(did) if step.endswith("to ~/ray_bootstrap_key.pem"))
    shown = [as_shown(step).replace(head.id, "node-1") for step in did[: key - 1] + did[key + 1 :]]
    assert shown == would[1:]


def as_shown(step: str) -> str:
    """A command without what Ray wraps it in, `bash --login -c -i '... && (COMMAND)'`; a file that Ray wrote itself as
    such."""
    if step.startswith("run "):
        return "run " + shlex.split(step)[-1].split(" && (", 1)[1][:-1]
    return re.sub(r"\S*/ray-bootstrap-\S+", "this file", step)
