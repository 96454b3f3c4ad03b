"""Several clouds and regions in one cluster.yaml: what sections have from the file, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytide.control.api.services.jobs import at_one_provider
from raytide.core import ray_internals
from raytide.core.errors import ConfigError
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.gang import GangSpec
from raytide.core.objects.hardware.clouds import HEAD_STAND_IN, CloudSection, cloud_files
from raytide.core.objects.node import PROVIDER_LABEL

SHIPPED = Path(__file__).parents[3] / "examples" / "regions.yaml"
FILE: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())

Change = Callable[[dict[str, Any]], object]


def loaded(tmp_path: Path, change: Change) -> ClusterConfig:
    file = deepcopy(FILE)
    change(file)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(file))
    return load_cluster(tmp_path / "cluster.yaml")


def own(file: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = file["metadata"]["raytide"]
    return section


def test_each_node_type_is_its_sections_and_its_nodes_say_so() -> None:
    types = {each.name: each for each in load_cluster(SHIPPED).node_types}
    assert {name: each.provider for name, each in types.items()} == {
        "l4": "aws",
        "l4.west": "west",
        "l4-google": "google",
    }
    assert types["l4.west"].all_labels("us-west-2a")[PROVIDER_LABEL] == "west"
    assert types["l4.west"].max_nodes == 16
    alone = load_cluster(SHIPPED.parent / "burst.yaml").node_types
    assert all(PROVIDER_LABEL not in each.all_labels(each.zones[0]) for each in alone)


def test_a_section_has_what_it_leaves_out_from_the_file_but_not_the_key_of_another_region() -> None:
    file = deepcopy(FILE)
    file["auth"] |= {"ssh_private_key": "~/ray_bootstrap_key.pem"}
    sections = {name: CloudSection.model_validate(each) for name, each in own(file)["providers"].items()}
    west = cloud_files(file, sections)["west"]
    assert west["provider"]["region"] == "us-west-2"
    assert west["auth"] == {"ssh_user": "ubuntu"}
    assert set(west["available_node_types"]) == {HEAD_STAND_IN, "l4.west"}
    assert (west["setup_commands"], west["worker_setup_commands"]) == ([], file["setup_commands"])
    assert west["worker_start_ray_commands"] == file["worker_start_ray_commands"]

    file["worker_setup_commands"] = [*file["setup_commands"], "echo last"]  # as Ray merges them
    assert cloud_files(file, sections)["west"]["worker_setup_commands"][-2:] == [
        file["setup_commands"][-1],
        "echo last",
    ]
    mine = sections["west"].model_copy(update={"setup_commands": ("echo mine",)})
    assert cloud_files(file, {"west": mine})["west"]["worker_setup_commands"] == ["echo mine"]


def test_ray_completes_a_section_of_a_file_without_max_workers() -> None:
    file = deepcopy(FILE)
    del file["max_workers"]
    section = own(file)["providers"]["west"] | {"provider": {"type": "external", "module": "mine.Cloud"}}
    west = cloud_files(file, {"west": CloudSection.model_validate(section)})["west"]
    assert ray_internals.prepared_config(west)["max_workers"] == 2


def west_is(**section: object) -> Change:
    return lambda file: own(file)["providers"]["west"].update(section)


def west_in(**provider: object) -> Change:
    return lambda file: own(file)["providers"]["west"]["provider"].update(provider)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (west_in(region="us-east-1"), "west: its machines would be listed with those of provider aws"),
        (west_in(type="kuberay"), "west: provider kuberay cannot stand beside another"),
        (west_in(type="was"), r"west: raytide has no provider of type 'was' \(did you mean aws\?\)"),
        (west_in(cache_stopped_nodes=True), "west: Ray would stop machines of aws and keep them"),
        (
            lambda file: own(file)["providers"].update(aws=own(file)["providers"].pop("west")),
            "providers.aws: another provider of this file has that name",
        ),
        (
            lambda file: own(file)["providers"]["west"]["available_node_types"].update(
                l4={"resources": {}, "node_config": {}}
            ),
            "west: node type l4 is in available_node_types too",
        ),
        (
            lambda file: own(file)["node_types"]["l4.west"].update(zones=["us-east-1a"]),
            r"zone us-east-1a is both of aws and of west \(node type l4.west\)",
        ),
        (lambda file: own(file)["node_types"].pop("l4.west"), "node type l4.west has no price"),
        (
            lambda file: own(file)["providers"]["google"]["provider"].update(availability_zone="europe-west4-b"),
            r"google: node type l4-google has the zones europe-west4-a, on gcp",
        ),
        (west_is(regoin="us-west-2"), "providers.west.regoin"),
        (lambda file: own(file)["providers"].update({"We st": own(file)["providers"].pop("west")}), "We st"),
    ],
)
def test_what_cannot_stand_together_is_refused_by_name(tmp_path: Path, change: Change, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        loaded(tmp_path, change)


def test_a_gang_stays_at_one_provider_unless_it_says_otherwise() -> None:
    gang = GangSpec.model_validate(
        {
            "shapes": [
                {"members": 4, "resources": {"GPU": 1}},
                {"members": 4, "resources": {"GPU": 1}, "together": "rack"},
                {"members": 1, "resources": {"GPU": 1}},
            ]
        }
    )
    regions, one = (load_cluster(SHIPPED.parent / f"{name}.yaml").node_types for name in ("regions", "burst"))
    assert [shape.together for shape in at_one_provider(gang, regions).shapes] == [PROVIDER_LABEL, "rack", ""]
    assert at_one_provider(gang, one) == gang
