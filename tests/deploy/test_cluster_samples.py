"""The samples of cluster.yaml are valid, and a dry run shows what each would buy."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from raytide.control.bootstrap.cloud_launch import dry_run
from raytide.core.config import load_yaml
from raytide.core.objects.cluster_config import load_cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CLOUDS = {
    "cluster.yaml": "aws",
    "examples/burst.yaml": "aws",
    "examples/regions.yaml": "aws",
    "examples/gcp.yaml": "gcp",
    "examples/azure.yaml": "azure",
}


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "raytide-0-py3-none-any.whl").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "own_machines").mkdir()
    monkeypatch.chdir(tmp_path)


def test_every_sample_of_a_cluster_is_tested() -> None:
    samples = {path.name for path in EXAMPLES.glob("*.yaml")}
    named = {Path(name).name for name in CLOUDS} - {"cluster.yaml"}
    assert samples == named | {"hosts.yaml", "slurm.yaml", "kuberay.yaml", "kuberay-monitoring.yaml"}


@pytest.mark.parametrize(("name", "cloud"), CLOUDS.items())
def test_a_sample_of_a_cloud_is_valid_and_its_dry_run_buys_and_starts_each_type(name: str, cloud: str) -> None:
    config = load_cluster(ROOT / name)
    assert load_yaml(ROOT / name)["provider"]["type"] == cloud  # type: ignore[index, call-overload]
    steps = dry_run(ROOT / name)
    own = config.settings.hosts.node_types() if config.settings.hosts is not None else set()
    bought = {"head", *(node_type.name for node_type in config.node_types if node_type.name not in own)}
    assert {step.machine for step in steps if step.what == "buy"} == bought
    for machine in bought:
        texts = [step.text for step in steps if step.machine == machine]
        assert any("pip install" in text and "raytide-*.whl" in text for text in texts), machine
        assert any("ray start --head" in text if machine == "head" else "ray start --address" in text for text in texts)


def test_the_sample_of_azure_gives_ray_s_template_parameters_that_it_has() -> None:
    spec = find_spec("ray")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "autoscaler" / "_private" / "_azure"
    known = set(json.loads((folder / "azure-vm-template.json").read_text())["parameters"])
    types = yaml.safe_load((EXAMPLES / "azure.yaml").read_text())["available_node_types"]
    given = {name for each in types.values() for name in each["node_config"]["azure_arm_parameters"]}
    assert given - known == set() and "vmSize" in given
