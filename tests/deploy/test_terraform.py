"""The Terraform modules parse and refer to what is there; AWS's gives the head the rights that it uses alone.

They were never applied: Terraform is in no registry that this project may use.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import hcl2.api
import pytest
import yaml
from tests.autoscaler.providers.notices.key_values import KeyValues

from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.cloud.spot_prices import SpotPrices, instance_types
from raytide.autoscaler.providers.notices.watch import NoticeBoard
from raytide.core import ray_internals
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.node import CapacityType, Node, NodeState

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / "deploy" / "terraform"
SHIPPED = ROOT / "cluster.yaml"
OF_THE_SET_UP = {"ec2:CreateTags", "iam:PassRole"}
"""Rights that no call of their own shows: tags of machines at their purchase and later, and the role that they get."""
BLOCK = {"resource", "data"}


def blocks(kind: str, cloud: str) -> list[dict[str, Any]]:
    return [
        block
        for file in sorted((MODULES / cloud).glob("*.tf"))
        for block in hcl2.api.loads(file.read_text()).get(kind, [])
    ]


def declared(kind: str, cloud: str = "aws") -> dict[str, Any]:
    """Returns what the module declares, by `name`, or by `type.name` for resources and data."""
    if kind not in BLOCK:
        return {name: body for block in blocks(kind, cloud) for name, body in block.items()}
    found: dict[str, Any] = {}
    for block in blocks(kind, cloud):
        for type_, named in block.items():
            found |= {f"{type_}.{name}": body for name, body in named.items()}
    return found


def statements(policy: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = declared("data")[f"aws_iam_policy_document.{policy}"]["statement"]
    return found


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_all_that_is_referred_to_is_declared_and_every_variable_is_used(cloud: str) -> None:
    text = "\n".join(file.read_text() for file in (MODULES / cloud).glob("*.tf"))
    referred = set(re.findall(r"(?<![\w.\"])(?:data\.)?((?:aws|google)_\w+\.\w+)", re.sub(r"#.*", "", text)))
    assert referred - declared("resource", cloud).keys() - declared("data", cloud).keys() == set()
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared("variable", cloud).keys()
    assert [name for name, body in declared("variable", cloud).items() if not body.get("description")] == []
    outputs = {"cluster_yaml", "bucket", "state_url"}
    assert outputs <= declared("output", cloud).keys()


def test_on_gcp_only_operators_and_the_cluster_s_own_accounts_get_in() -> None:
    rules = {
        name: body for name, body in declared("resource", "gcp").items() if name.startswith("google_compute_firewall.")
    }
    sources = {
        name.partition(".")[2]: set(body) & {"source_ranges", "source_service_accounts"} for name, body in rules.items()
    }
    assert sources == {"within": {"source_service_accounts"}, "operators": {"source_ranges"}}
    assert rules["google_compute_firewall.operators"]["source_ranges"] == "${var.operators}"
    rights = declared("resource", "gcp")["google_project_iam_custom_role.machines"]["permissions"]
    assert not [right for right in rights if right.startswith("iam.") or right.endswith("setIamPolicy")]


def test_on_aws_nothing_is_open_to_all() -> None:
    rules = {name: body for name, body in declared("resource").items() if "ingress_rule" in name}
    sources = Counter(
        str(body.get("cidr_ipv4") or body["referenced_security_group_id"]).strip("${}") for body in rules.values()
    )
    assert sources == {
        "each.value": 1,
        "aws_security_group.nodes.id": 1,
        "aws_security_group.operators.id": 1,
    }
    assert (
        declared("resource")["aws_vpc_security_group_ingress_rule.operators"]["for_each"] == "${toset(var.operators)}"
    )


def test_on_aws_the_cluster_s_password_is_not_one_that_aws_changes() -> None:
    """Secrets Manager changes the master's password every seven days; the one in `state_url` would be refused then."""
    database = declared("resource")["aws_db_instance.state"]
    assert database["manage_master_user_password"] is True
    found = re.search(r"postgresql://(\w+):PASSWORD@", str(declared("output")["state_url"]["value"]))
    assert found is not None
    user, master = found[1], str(database["username"]).strip('"')
    assert user != master
    made = (ROOT / "docs" / "providers.md").read_text()
    assert f"CREATE ROLE {user} LOGIN" in made and f"ALTER DATABASE {master} OWNER TO {user};" in made


@pytest.fixture
def config(aws_for_ray: Path) -> dict[str, Any]:
    """The shipped file with what the module gives out, as `ray up` completes it."""
    import boto3
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    ec2 = boto3.resource("ec2")
    network = ec2.create_vpc(CidrBlock="10.20.0.0/16")
    zones = ("us-east-1a", "us-east-1b", "us-east-1c")
    subnets = [
        ec2.create_subnet(VpcId=network.id, CidrBlock=f"10.20.{16 * at}.0/20", AvailabilityZone=zone)
        for at, zone in enumerate(zones)
    ]
    public = declared("resource")["aws_subnet.nodes"]["map_public_ip_on_launch"]
    for subnet in subnets:
        ec2.meta.client.modify_subnet_attribute(SubnetId=subnet.id, MapPublicIpOnLaunch={"Value": public})
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=network.id)
    values = {
        "IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/ray-autoscaler-v1"},
        "SubnetIds": [subnet.id for subnet in subnets],
        "SecurityGroupIds": [group.id],
    }
    given = str(declared("output")["cluster_yaml"]["value"])
    file = yaml.safe_load(SHIPPED.read_text())
    for name, node_type in file["available_node_types"].items():
        part = given.partition('"head_node_config": {' if name == "head" else '"node_config": {')[2]
        keys = re.findall(r'"(\w+)": (?:\[|\{|"\$)', part.partition('"node_config"')[0])
        assert set(keys) - {"Arn"} == values.keys()
        node_type["node_config"] |= values
    completed: dict[str, Any] = AWSNodeProvider.bootstrap_config(ray_internals.prepared_config(file))
    return completed


def test_the_head_has_the_rights_that_it_uses_and_no_others(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    import botocore.client

    call = botocore.client.BaseClient._make_api_call
    called: dict[str, dict[str, Any]] = {}

    def noted(client: Any, operation: str, arguments: dict[str, Any]) -> Any:
        called[f"{client.meta.service_model.service_name}:{operation}"] = arguments
        return call(client, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    types = {each.name: each for each in load_cluster(SHIPPED).node_types}
    board = NoticeBoard(lambda: KeyValues())
    cloud = ray_internals.node_provider(config["provider"], config["cluster_name"])
    provider = CloudProvider(config, cloud, types.values(), tmp_path / "run", VirtualClock(1_000.0), Begun(), board)
    node = Node("node-1", "h100x8.spot", "us-east-1b", CapacityType.SPOT, 1, NodeState.REQUESTED, 1_000.0)
    provider.launch(node, types[node.type])
    assert provider.machines()
    provider.terminate("node-1")
    SpotPrices(boto3.client("ec2"), instance_types(config, types.values()), VirtualClock(1_000.0)).ask()
    bought = called["ec2:RunInstances"]
    tags = {tag["Key"]: tag["Value"] for each in bought["TagSpecifications"] for tag in each["Tags"]}
    assert tags["ray-cluster-name"] == config["cluster_name"], "what the policy's conditions look at"
    given = {action for statement in statements("head") for action in statement["actions"]}
    assert given == called.keys() | OF_THE_SET_UP


def test_rights_to_change_machines_end_at_the_cluster() -> None:
    """EC2 checks each resource of a purchase: the machine itself is in the statement with the condition alone."""
    narrow = {"aws:RequestTag/ray-cluster-name", "aws:ResourceTag/ray-cluster-name", "ec2:CreateAction"}
    for statement in statements("head"):
        if all(action.startswith("ec2:Describe") for action in statement["actions"]):
            continue
        conditions = {each["variable"] for each in statement.get("condition", [])}
        assert conditions & narrow or "instance/" not in str(statement["resources"]), statement["sid"]
        assert statement["resources"] != ["*"], statement["sid"]
    assert all("aws_s3_bucket.data.arn}" in each for rule in statements("bucket") for each in rule["resources"])


class Begun:
    """A set-up that does nothing."""

    def begin(self, cloud_id: str, node_id: str, node_type: object, zone: str) -> None:
        pass
