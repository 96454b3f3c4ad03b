"""Builds the controller's connections to Ray and the provider from cluster.yaml."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from raytide.actors.gang.placement_groups import PlacementGroups
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.base import Bill, Provider
from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.cloud.setup import CloudSetUp, NoSetUp
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.kuberay.kube_api import KubeApi
from raytide.autoscaler.providers.kuberay.provider import KubeRayProvider
from raytide.autoscaler.providers.local.provider import LocalProvider
from raytide.autoscaler.providers.notices.watch import board_at
from raytide.autoscaler.providers.purchases import Purchases
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.control.bootstrap.cluster_record import LocalCluster, RunningCluster
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.reconcile.observation import ApiProbe, Sources
from raytide.core import ray_internals
from raytide.core.clock import SystemClock
from raytide.core.config import load_yaml
from raytide.core.errors import ConfigError
from raytide.core.io.private_paths import inherited_restriction, restrict_to
from raytide.core.objects.cluster_config import load_cluster, provider_section

__all__ = ["RAY_NAMESPACE", "bill", "local_provider", "provider", "sources"]

RAY_NAMESPACE = "raytide"


def sources(cluster: RunningCluster) -> Sources:
    """Returns the controller's connections. Connects this process to Ray."""
    import ray

    settings = load_cluster(cluster.config_path).settings
    restrict_to(settings.data_roots)
    ray.init(
        address=cluster.gcs_address,
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env=inherited_restriction(),  # replicas inherit it through Serve's controller
    )
    return Sources(
        provider=provider(cluster),
        gcs=GcsReader(cluster.gcs_address),
        groups=PlacementGroups(),
        drivers=RayJobs(cluster.dashboard_url, cluster.run_dir, cluster.ray_headers),
        serve=ServeControl(),
        api=ApiProbe(cluster.api_url),
        meters=MeterReader(
            GcsReader(cluster.gcs_address), SystemClock(), energy=EnergyMeter(settings.energy.watts_per_core)
        ),
    )


def provider(cluster: RunningCluster, *, only_ends: bool = False) -> Provider:
    """Returns the provider of the `provider` section. In an embedded cluster it is the local one, unless it is `fake`.

    With `only_ends` it sets up no nodes.
    """
    file: dict[str, Any] = load_yaml(cluster.config_path)
    section = provider_section(file, where=str(cluster.config_path))
    clock = SystemClock()
    if section["type"] == "fake":
        return FakeProvider(clock)
    if isinstance(cluster, LocalCluster):
        return local_provider(cluster)
    if section["type"] == "local":
        raise ConfigError(
            f"{cluster.config_path}: provider local is for this machine alone.",
            hint="Start it with `raytide up --local`.",
        )
    if section["type"] == "kuberay":
        return KubeRayProvider(_kube_api(section), str(file["cluster_name"]), cluster.run_dir, clock)
    cloud = ray_internals.node_provider(file["provider"], file["cluster_name"])
    return CloudProvider(
        file,
        cloud,
        load_cluster(cluster.config_path).node_types,
        cluster.run_dir,
        clock,
        NoSetUp()
        if only_ends
        else CloudSetUp(
            file, cloud, cluster.head_ip, GcsReader(cluster.gcs_address).nodes, token_file=cluster.ray_token_file
        ),
        board_at(cluster.gcs_address),
    )


def local_provider(cluster: LocalCluster) -> LocalProvider:
    """Returns the provider whose nodes are processes of this machine."""
    return LocalProvider(
        cluster.run_dir,
        cluster.gcs_address,
        cluster.k,
        SystemClock(),
        temp_dir=cluster.ray_temp_dir,
        environment=cluster.node_environment(),
    )


def bill(cluster: RunningCluster) -> Bill:
    """Returns the machines' billing records, for processes that must not change machines."""
    section = provider_section(load_yaml(cluster.config_path), where=str(cluster.config_path))
    if isinstance(cluster, LocalCluster) or section["type"] == "fake":
        return provider(cluster)
    return Purchases(cluster.run_dir / "purchases")


def _kube_api(section: Mapping[str, Any]) -> KubeApi:
    """Connects to Kubernetes from this pod, or through `api_url` (`kubectl proxy`), which needs a `namespace`."""
    if "api_url" not in section:
        return KubeApi.of_this_pod()
    return KubeApi(section["api_url"], section.get("namespace", "default"))
