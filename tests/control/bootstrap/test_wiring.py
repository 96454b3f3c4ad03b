"""cluster.yaml's `provider` section becomes the provider that runs."""

from __future__ import annotations

import site
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.autoscaler.providers.kube_server import KubeServer

from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.hosts.provider import HOSTS_FOLDER, HostsProvider
from raytide.autoscaler.providers.kuberay.provider import KubeRayProvider
from raytide.autoscaler.providers.local.provider import LocalProvider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases
from raytide.autoscaler.providers.slurm.provider import SlurmProvider
from raytide.control.bootstrap import cluster_record
from raytide.control.bootstrap.cluster_record import HeadCluster, LocalCluster, RunningCluster, load
from raytide.control.bootstrap.local import DEFAULT_CONFIG
from raytide.control.bootstrap.wiring import bill, provider
from raytide.core.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"

Make = Callable[..., RunningCluster]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The record of a cluster with this file; nothing runs."""

    def one(file: dict[str, Any], *, local: bool = False) -> RunningCluster:
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(file))
        fields: dict[str, Any] = {
            "name": "tide",
            "cluster_id": "tide-1",
            "run_dir": tmp_path,
            "gcs_address": "127.0.9.1:6388",
            "dashboard_url": "",
            "api_url": "",
            "serve_url": "",
            "state_url": "",
            "config_path": tmp_path / "cluster.yaml",
            "created_at_s": 0.0,
            "version": "",
        }
        return LocalCluster(**fields, k=9, temp_dir=tmp_path) if local else HeadCluster(**fields)

    return one


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    server = KubeServer({"cpu2": 4})
    yield server
    server.close()


def embedded() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load(DEFAULT_CONFIG.read_text())
    return file


def test_the_nodes_of_an_embedded_cluster_are_processes_whatever_the_file_names(make: Make) -> None:
    assert isinstance(provider(make(yaml.safe_load(SHIPPED.read_text()), local=True)), LocalProvider)
    assert isinstance(provider(make(embedded(), local=True)), LocalProvider)
    with pytest.raises(ConfigError, match="provider local is for this machine alone"):
        provider(make(embedded()))


def test_packages_beside_an_installed_raytide_do_not_go_before_those_of_a_script(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(embedded(), local=True)
    checkout = str(Path(cluster_record.__file__).parents[3])
    assert cluster.with_cluster_mark({"PYTHONPATH": "/own"})["PYTHONPATH"] == f"{checkout}:/own"
    (inside, *_) = site.getsitepackages()
    monkeypatch.setattr(cluster_record, "__file__", f"{inside}/raytide/control/bootstrap/cluster_record.py")
    assert cluster.with_cluster_mark({"PYTHONPATH": "/own"})["PYTHONPATH"] == "/own"
    assert cluster.with_cluster_mark({})["PYTHONPATH"] == ""


@pytest.mark.parametrize("local", [True, False])
def test_fake_nodes_are_nowhere(make: Make, local: bool) -> None:
    assert isinstance(provider(make(embedded() | {"provider": {"type": "fake"}}, local=local)), FakeProvider)


def test_a_raycluster_is_found_by_name_where_its_api_is(make: Make, kube: KubeServer) -> None:
    section = {"type": "kuberay", "api_url": kube.url, "namespace": "ml"}
    nodes = provider(make(embedded() | {"cluster_name": "tide", "provider": section}))
    assert isinstance(nodes, KubeRayProvider)
    assert nodes.machines() == ()
    nodes.close()
    with pytest.raises(ConfigError, match="does not run in a pod"):
        provider(make(embedded() | {"provider": {"type": "kuberay"}}))


def test_a_cloud_is_asked_through_rays_own_provider(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing is asked yet
    assert isinstance(provider(make(yaml.safe_load(SHIPPED.read_text()))), CloudProvider)


@pytest.mark.parametrize(
    ("name", "kind"), [("hosts", HostsProvider), ("burst", MixedProvider), ("slurm", SlurmProvider)]
)
def test_own_machines_are_a_provider_alone_or_beside_a_cloud(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, kind: type
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing is asked yet
    file = yaml.safe_load((SHIPPED.parent / "examples" / f"{name}.yaml").read_text())
    assert isinstance(provider(make(file)), kind)
    assert isinstance(provider(make(file, local=True)), LocalProvider)


def test_the_bill_of_own_machines_and_a_cloud_is_that_of_both(make: Make) -> None:
    cluster = make(yaml.safe_load((SHIPPED.parent / "examples" / "burst.yaml").read_text()))
    for folder, name in ((Path("purchases"), "node-1"), (Path(HOSTS_FOLDER) / "purchases", "node-2")):
        Purchases(cluster.run_dir / folder).record(PurchaseRecord(name, "l4", "us-east-1a", 804_800, 10.0))
    assert [machine.node_id for machine in bill(cluster).machines()] == ["node-1", "node-2"]


def test_who_only_reads_the_bill_asks_no_cloud(make: Make) -> None:
    cluster = make(yaml.safe_load(SHIPPED.read_text()))
    purchases = Purchases(cluster.run_dir / "purchases")
    for name in ("node-2", "node-1"):
        purchases.record(PurchaseRecord(name, "l4", "us-east-1a", 804_800, 10.0))
    purchases.end("node-2", 20.0, "terminated")
    billed = [(machine.node_id, machine.ended_at_s) for machine in bill(cluster).machines()]
    assert billed == [("node-1", None), ("node-2", 20.0)]


def test_an_unknown_provider_is_named_with_those_that_are_known(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"no provider of type 'kubray' \(did you mean kuberay\?\)") as refused:
        provider(make(embedded() | {"provider": {"type": "kubray"}}))
    assert "aws" in refused.value.hint


def test_a_cluster_is_loaded_as_what_it_is(make: Make) -> None:
    for local in (True, False):
        cluster = make(embedded(), local=local)
        cluster.save()
        assert load(cluster.run_dir) == cluster
        assert type(load(cluster.run_dir)) is type(cluster)


def test_the_operators_shell_reaches_the_controller_and_what_is_named_the_nodes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "OUR_CACHE", "OUR_TOKEN", "RAYTIDE_TOKEN", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "x")
    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    file["metadata"]["raytide"]["pass_environment"] = ["OUR_*", "AWS_PROFILE"]
    cluster = make(file, local=True)
    assert isinstance(cluster, LocalCluster)
    controller, node = cluster.environment(), cluster.node_environment()
    assert controller["AWS_SECRET_ACCESS_KEY"] == "x"
    assert {"AWS_PROFILE", "OUR_CACHE", "PATH", "PYTHONPATH", "RAYTIDE_CLUSTER", "RAY_AUTH_TOKEN_PATH"} <= node.keys()
    assert not {"AWS_SECRET_ACCESS_KEY", "OUR_TOKEN", "RAYTIDE_TOKEN", "RAY_AUTH_TOKEN"} & node.keys()
    assert node["RAY_AUTH_TOKEN_PATH"] == str(cluster.ray_token_file)
