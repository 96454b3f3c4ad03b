"""cluster.yaml: what is accepted, what is refused and how that is said, and that Ray itself takes the shipped file."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raytide.control.bootstrap.exposure import check_file
from raytide.core.errors import ConfigError
from raytide.core.objects.cluster_config import RaytideSection, load_cluster
from raytide.core.objects.node import CapacityType

ROOT = Path(__file__).parents[3]
SHIPPED = [
    ROOT / "cluster.yaml",
    ROOT / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml",
    ROOT / "examples" / "hosts.yaml",
    ROOT / "examples" / "burst.yaml",
]


@pytest.fixture
def shipped() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load(SHIPPED[0].read_text())
    return file


def on_gcp(shipped: dict[str, Any]) -> dict[str, Any]:
    """The shipped file for one zone of GCP, where a name has no dots."""
    file = copy.deepcopy(shipped)
    file["provider"] = {"type": "gcp", "region": "us-west1", "availability_zone": "us-west1-a"}
    ours = file["metadata"]["raytide"]["node_types"]
    for types in (file["available_node_types"], ours):
        for name in [name for name in types if "." in name]:
            types[name.replace(".", "-")] = types.pop(name)
    for section in ours.values():
        section |= {"zones": ["us-west1-a"], "zone_prices_usd_h": {}}
    return file


def refusal(file: dict[str, Any], tmp_path: Path) -> ConfigError:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


class TestShippedFiles:
    def test_ray_prepares_and_validates_the_fleet(self) -> None:
        from ray.autoscaler._private.util import prepare_config, validate_config

        prepared = prepare_config(yaml.safe_load(SHIPPED[0].read_text()))
        validate_config(prepared)
        assert prepared["metadata"]["raytide"]["version"] == 1

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
    def test_they_pass_the_schema_that_editors_get(self, path: Path) -> None:
        section = yaml.safe_load(path.read_text())["metadata"]["raytide"]
        jsonschema.validate(section, RaytideSection.model_json_schema())

    def test_the_fleet_is_heterogeneous(self) -> None:
        types = load_cluster(SHIPPED[0]).node_types
        assert {t.market for t in types} == {CapacityType.ON_DEMAND, CapacityType.SPOT}
        assert len({t.labels.get("ray.io/accelerator-type") for t in types} - {None}) >= 3
        assert len({zone for t in types for zone in t.zones}) >= 3
        assert all(t.price_micro_usd_h > 0 for t in types)

    def test_the_market_in_node_config_is_the_one_in_metadata(self, shipped: dict[str, Any]) -> None:
        for name, section in shipped["metadata"]["raytide"]["node_types"].items():
            options = shipped["available_node_types"][name]["node_config"].get("InstanceMarketOptions", {})
            assert (options.get("MarketType") == "spot") == (section["market"] == "spot"), name

    def test_its_ray_is_closed_and_its_installs_are_pinned(self, shipped: dict[str, Any]) -> None:
        check_file(shipped, where="cluster.yaml")
        head, worker = (shipped[f"{role}_start_ray_commands"] for role in ("head", "worker"))
        assert all("RAY_AUTH_MODE=token ray start" in text for text in (*head, *worker) if "ray start" in text)
        installs = [text for text in shipped["setup_commands"] if "pip install" in text]
        assert installs and all("install -c ~/constraints.txt" in text for text in installs)
        assert (ROOT / shipped["file_mounts"]["~/constraints.txt"]).is_file()

    def test_the_head_is_not_for_sale(self) -> None:
        assert "head" not in {t.name for t in load_cluster(SHIPPED[0]).node_types}

    def test_loading_does_not_import_ray(self) -> None:
        code = "import sys; from raytide.core.objects.cluster_config import load_cluster; "
        code += f"load_cluster({str(SHIPPED[0])!r}); sys.exit('ray' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


class TestRefusals:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
            load_cluster(tmp_path / "none.yaml")

    def test_what_is_not_yaml(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text("a: [")
        with pytest.raises(ConfigError, match="not valid YAML"):
            load_cluster(tmp_path / "bad.yaml")

    def test_an_unknown_key_of_rays(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        error = refusal({**shipped, "max_wrokers": 3}, tmp_path)
        assert "max_wrokers" in error.message

    def test_an_unknown_key_of_ours_names_the_nearest(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        shipped["metadata"]["raytide"]["node_types"]["l4"]["price_usd"] = 1
        assert "did you mean price_usd_h" in refusal(shipped, tmp_path).message

    def test_an_unknown_provider_is_refused(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        shipped["provider"]["type"] = "gpc"
        assert "no provider of type 'gpc' (did you mean gcp?)" in refusal(shipped, tmp_path).message

    def test_a_zone_where_rays_gcp_provider_sees_no_machine(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        file = on_gcp(shipped)
        path = tmp_path / "gcp.yaml"
        path.write_text(yaml.safe_dump(file))
        assert {zone for node_type in load_cluster(path).node_types for zone in node_type.zones} == {"us-west1-a"}
        file["metadata"]["raytide"]["node_types"]["h100x8-spot"]["zones"] = ["us-west1-a", "us-west1-b"]
        assert "node type h100x8-spot has the zones us-west1-a, us-west1-b" in str(refusal(file, tmp_path))

    @pytest.mark.parametrize(("name", "able"), [("h100x8.spot", "h100x8-spot"), ("H100", "h100"), ("x" * 64, "x" * 63)])
    def test_a_node_type_whose_name_no_machine_of_gcp_can_carry(
        self, shipped: dict[str, Any], tmp_path: Path, name: str, able: str
    ) -> None:
        file = on_gcp(shipped)
        for types in (file["available_node_types"], file["metadata"]["raytide"]["node_types"]):
            types[name] = types.pop("l4")
        error = refusal(file, tmp_path)
        assert f"node type {name} cannot be the label of a machine on gcp" in error.message
        assert f"Call it {able}," in error.hint

    @pytest.mark.parametrize("name", ["Tide", "my_tide", "t" * 36])
    def test_a_cluster_whose_machines_gcp_could_not_name(
        self, shipped: dict[str, Any], tmp_path: Path, name: str
    ) -> None:
        file = on_gcp(shipped) | {"cluster_name": name}
        assert f"cluster_name {name} cannot be a part of a machine's name" in refusal(file, tmp_path).message

    def test_a_negative_price(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        shipped["metadata"]["raytide"]["node_types"]["l4"]["price_usd_h"] = -1
        assert "node_types.l4.price_usd_h" in refusal(shipped, tmp_path).message

    def test_a_node_type_without_a_price(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        del shipped["metadata"]["raytide"]["node_types"]["l4"]
        error = refusal(shipped, tmp_path)
        assert "node type l4 has no price" in error.message
        assert "metadata.raytide.node_types.l4" in error.hint

    def test_a_price_without_a_node_type(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        sections = shipped["metadata"]["raytide"]["node_types"]
        sections["b200x8"] = copy.deepcopy(sections["l4"])
        assert "b200x8" in refusal(shipped, tmp_path).message

    def test_more_minimum_than_maximum(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        shipped["available_node_types"]["l4"]["min_workers"] = 99
        assert "min_nodes 99 is above max_nodes 16" in refusal(shipped, tmp_path).message

    def test_no_part_for_raytide(self, shipped: dict[str, Any], tmp_path: Path) -> None:
        del shipped["metadata"]
        error = refusal(shipped, tmp_path)
        assert "raytide schema" in error.hint


class TestTrust:
    def settings(self, **more: object) -> RaytideSection:
        return RaytideSection.parse({"node_types": {}, "teams": {"a": {}, "b": {}}, **more}, where="file")

    def test_scripts_run_as_raytides_own_user_by_default(self) -> None:
        assert self.settings().user_of("a") == ""

    def test_one_user_is_for_all_teams_or_each_has_its_own(self) -> None:
        assert self.settings(run_as="nobody").user_of("b") == "nobody"
        assert self.settings(run_as={"a": "ana", "b": "bob"}).user_of("b") == "bob"

    @pytest.mark.parametrize("users", [{"a": "ana"}, {"a": "ana", "b": "bob", "c": "cleo"}])
    def test_a_team_without_a_user_or_an_unknown_team_is_refused(self, users: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match="run_as by team names each team once: a, b"):
            self.settings(run_as=users)

    @pytest.mark.parametrize("user", ["a b", "-u", "0", "root\n"])
    def test_what_is_no_user_name_is_refused(self, user: str) -> None:
        with pytest.raises(ConfigError, match="run_as"):
            self.settings(run_as=user)

    @pytest.mark.parametrize("name", ["*", "A-B", "A=B", "", "A**", "1A"])
    def test_what_is_passed_is_a_name_or_its_beginning(self, name: str) -> None:
        assert self.settings(pass_environment=["AWS_PROFILE", "OUR_*"]).pass_environment == ("AWS_PROFILE", "OUR_*")
        with pytest.raises(ConfigError, match="pass_environment"):
            self.settings(pass_environment=[name])


def test_rays_folder_is_closed_even_where_an_image_had_it_open(shipped: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tmp" / "ray").mkdir(mode=0o755, parents=True)
    command = next(each for each in shipped["setup_commands"] if "~/tmp/ray" in each)
    subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path), "PATH": os.defpath}, check=True, timeout=20)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "tmp", tmp_path / "tmp" / "ray")] == [0o700, 0o700]


class TestOwnMachines:
    @pytest.fixture
    def hosts(self) -> dict[str, Any]:
        file: dict[str, Any] = yaml.safe_load(SHIPPED[2].read_text())
        return file

    def test_a_type_has_at_most_as_many_nodes_as_machines_and_costs_its_electricity(self) -> None:
        types = {each.name: each for each in load_cluster(SHIPPED[2]).node_types}
        assert {name: each.max_nodes for name, each in types.items()} == {"a100x8": 2, "cpu32": 2}
        assert types["a100x8"].price_micro_usd_h == 1_000_000  # 4 kW at $0.25

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"node_type": "h100"}, "which does not exist"),
            ({"zone": "rack-9"}, "is in zone rack-9, its node type is not"),
            ({"name": "a100-2"}, "2 machines have the name a100-2"),
            ({"address": "10.0.2.11"}, "2 machines have the address 10.0.2.11"),
            ({"address": "-oProxyCommand=true"}, "hosts.machines.0.address"),
            ({"user": "-x"}, "hosts.machines.0.user"),
            ({"power_on": [""]}, "has no program"),
        ],
    )
    def test_a_machine_that_cannot_be_a_node(
        self, hosts: dict[str, Any], tmp_path: Path, change: dict[str, Any], what: str
    ) -> None:
        hosts["metadata"]["raytide"]["hosts"]["machines"][0] |= change
        assert what in refusal(hosts, tmp_path).message

    def test_a_shell_in_the_interpreters_path(self, hosts: dict[str, Any], tmp_path: Path) -> None:
        hosts["metadata"]["raytide"]["hosts"]["python"] = "~/venv/bin/python; reboot"
        assert "hosts.python" in refusal(hosts, tmp_path).message

    def test_a_type_that_no_machine_has(self, hosts: dict[str, Any], tmp_path: Path) -> None:
        del hosts["metadata"]["raytide"]["hosts"]["machines"][2:]
        assert "no machine of node type cpu32" in refusal(hosts, tmp_path).message

    def test_more_nodes_at_least_than_machines_and_a_spot_market(self, hosts: dict[str, Any], tmp_path: Path) -> None:
        hosts["available_node_types"]["a100x8"]["min_workers"] = 3
        assert "min_workers 3 and 2 machines" in refusal(hosts, tmp_path).message
        hosts["metadata"]["raytide"]["node_types"]["a100x8"]["market"] = "spot"
        assert "the market spot" in refusal(hosts, tmp_path).message

    def test_neither_a_price_nor_a_power(self, hosts: dict[str, Any], tmp_path: Path) -> None:
        del hosts["metadata"]["raytide"]["node_types"]["a100x8"]["power_w"]
        assert "a100x8 has no price" in refusal(hosts, tmp_path).message
