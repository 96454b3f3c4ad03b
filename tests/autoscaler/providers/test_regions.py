"""Two regions of one cloud and another cloud in one cluster, through Ray's own AWS provider against a moto server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.autoscaler.providers.two_regions import (
    REGIONS,
    ZONES,
    instances,
    patient,
    regions_cluster,
    regions_provider,
)

from raytide.autoscaler.providers.cloud.provider import NODE_TAG, CloudProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.control.bootstrap.wiring import bill, provider
from raytide.core.errors import ClusterError, ConfigError, ProviderError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.node import CapacityType, Node, NodeState


def launch(regions: MixedProvider, node_id: str, node_type: str, folder: Path) -> None:
    types = {each.name: each for each in load_cluster(folder / "cluster.yaml").node_types}
    market = CapacityType.ON_DEMAND
    node = Node(node_id, node_type, ZONES[node_type], market, 10_000, NodeState.REQUESTED, 0.0)
    regions.launch(node, types[node_type])


def live(regions: MixedProvider) -> dict[str, str]:
    return {machine.node_id: machine.zone for machine in regions.machines() if machine.ended_at_s is None}


def in_clouds() -> list[list[str]]:
    """Returns the node ids of the machines of each region."""
    return [
        [{tag["Key"]: tag["Value"] for tag in each.tags}[NODE_TAG] for each in instances(region)] for region in REGIONS
    ]


def test_each_region_is_completed_by_its_own_bootstrap_and_sells_its_own_node_types(
    aws_for_ray: Path, tmp_path: Path
) -> None:
    regions = regions_provider(tmp_path)
    for number, node_type in enumerate(ZONES, 1):
        launch(regions, f"node-{number}", node_type, tmp_path)
    assert in_clouds() == [["node-1"], ["node-2"]]
    assert live(regions) == dict(zip(("node-1", "node-2", "node-3"), ZONES.values(), strict=True))
    east, west = (instances(region)[0] for region in REGIONS)
    assert (east.placement["AvailabilityZone"], west.placement["AvailabilityZone"]) == ("us-east-1a", "us-west-2b")
    assert west.key_name.endswith("us-west-2")
    assert (aws_for_ray / ".ssh" / f"{west.key_name}.pem").exists()
    assert west.security_groups != east.security_groups

    again = regions_provider(tmp_path)  # the next controller
    launch(again, "node-2", "cpu.west", tmp_path)
    assert in_clouds() == [["node-1"], ["node-2"]]
    again.terminate("node-2")
    assert in_clouds() == [["node-1"], []]
    assert "node-2" not in live(again)
    assert [machine.node_id for machine in bill(regions_cluster(tmp_path)).machines()] == ["node-1", "node-2"]


class Unreachable:
    """Ray's NodeProvider of a region that cannot be reached."""

    def __getattr__(self, name: str) -> object:
        raise ConnectionError("could not connect to the endpoint of us-west-2")


def test_a_region_that_does_not_answer_stops_no_other_and_its_nodes_are_unknown(
    aws_for_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = regions_provider(tmp_path)
    launch(regions, "node-1", "cpu.west", tmp_path)
    west = regions._sources["west"]._connected()
    assert isinstance(west, CloudProvider)
    assert live(regions) == {"node-1": "us-west-2b"}
    with monkeypatch.context() as away:
        away.setattr(west, "_cloud", Unreachable())
        launch(regions, "node-2", "cpu", tmp_path)
        assert live(regions) == {"node-1": "us-west-2b", "node-2": "us-east-1a"}
        assert any(text.startswith("provider west: ") and "could not connect" in text for text in regions.problems())
        with pytest.raises(ProviderError, match="provider west"):  # so another pool is tried
            launch(regions, "node-3", "cpu.west", tmp_path)
        with pytest.raises(ClusterError, match="could not connect"):
            regions.terminate("node-1")
        regions.terminate("node-2")
        assert live(regions) == {"node-1": "us-west-2b"}
    assert in_clouds() == [[], ["node-1"]]
    assert live(regions) == {"node-1": "us-west-2b"}
    assert not any(text.startswith("provider west") for text in regions.problems())


def test_a_controller_that_starts_while_a_region_is_away_knows_its_nodes_from_the_records(
    aws_for_ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(regions_provider(tmp_path), "node-1", "cpu.west", tmp_path)
    cluster = regions_cluster(tmp_path)

    def away(*_: object) -> None:
        raise ConnectionError("could not connect to the endpoint of us-west-2")

    after = patient(provider(cluster))
    with monkeypatch.context() as patched:
        patched.setattr("raytide.core.ray_internals.bootstrapped_config", away)
        launch(after, "node-2", "cpu", tmp_path)
        assert live(after) == {"node-1": "us-west-2b", "node-2": "us-east-1a"}
        assert after.problems()[0].startswith("provider west: Ray could not complete the section for aws: Connection")
    assert live(after) == {"node-1": "us-west-2b", "node-2": "us-east-1a"}


def test_a_section_whose_machines_run_cannot_be_left_out_of_the_file(aws_for_ray: Path, tmp_path: Path) -> None:
    launch(regions_provider(tmp_path), "node-1", "cpu.west", tmp_path)
    cluster = regions_cluster(tmp_path)
    text = cluster.config_path.read_text()
    cluster.config_path.write_text(text.replace("cpu.west", "cpu.north").replace("west:", "north:"))
    with pytest.raises(ConfigError, match=r"no metadata.raytide.providers.west, where node-1 run"):
        provider(cluster)
