"""Builds the controller's connections to Ray and the provider from cluster.yaml."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from raytide.actors.gang.placement_groups import PlacementGroups
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.exporter.directory import ExporterDirectory
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.base import Bill, Provider
from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.cloud.setup import CloudSetUp, NoSetUp
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.providers.hosts.provider import HOSTS_FOLDER, HostCluster, HostsProvider
from raytide.autoscaler.providers.hosts.ssh import SshConnection
from raytide.autoscaler.providers.kuberay.kube_api import KubeApi
from raytide.autoscaler.providers.kuberay.provider import KubeRayProvider
from raytide.autoscaler.providers.local.provider import LocalProvider
from raytide.autoscaler.providers.mixed import MixedBill, MixedProvider
from raytide.autoscaler.providers.notices.watch import board_at
from raytide.autoscaler.providers.purchases import Purchases
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.control.bootstrap.cluster_record import RAY_ENVIRONMENT, LocalCluster, RunningCluster
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.reconcile.observation import ApiProbe, Sources
from raytide.core import ray_internals
from raytide.core.clock import SystemClock
from raytide.core.config import load_yaml
from raytide.core.errors import ConfigError
from raytide.core.io.environment import all_passed, passed
from raytide.core.io.private_paths import inherited_restriction, restrict_to
from raytide.core.objects.cluster_config import ClusterConfig, RaytideSection, load_cluster, provider_section

__all__ = ["RAY_NAMESPACE", "bill", "local_provider", "provider", "sources"]

RAY_NAMESPACE = "raytide"
HOSTS = "hosts"
GCS_GONE_S = 600
"""The time that a node waits for another head. Ray's default is a minute, after which its raylet ends."""


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
        drivers=RayJobs(cluster.dashboard_url, cluster.run_dir, cluster.ray_headers, cluster.head_epoch),
        serve=ServeControl(),
        api=ApiProbe(cluster.api_url),
        meters=MeterReader(
            GcsReader(cluster.gcs_address),
            SystemClock(),
            energy=EnergyMeter(settings.energy.watts_per_core),
            directory=ExporterDirectory(lambda: ray_internals.gcs_client(cluster.gcs_address), SystemClock()),
        ),
    )


def provider(cluster: RunningCluster, *, only_ends: bool = False) -> Provider:
    """Returns the provider of the `provider` section, and of own machines beside it. In an embedded cluster it is the
    local one for all node types, unless it is `fake`.

    With `only_ends` it sets up no nodes.
    """
    file: dict[str, Any] = load_yaml(cluster.config_path)
    section = provider_section(file, where=str(cluster.config_path))
    if isinstance(cluster, LocalCluster) and section["type"] != "fake":
        return local_provider(cluster)
    config = load_cluster(cluster.config_path)
    hosts = config.settings.hosts
    if hosts is None:
        return _bought(cluster, config, file, section, only_ends=only_ends)
    own = HostsProvider(
        hosts,
        config.node_types,
        _host_cluster(cluster, config.settings),
        cluster.run_dir,
        SystemClock(),
        SshConnection(hosts, cluster.cluster_id),
        starts_nodes=not only_ends,
    )
    if section["type"] == HOSTS:
        return own
    other = _bought(cluster, config, file, section, only_ends=only_ends)
    names = {each.name: HOSTS if each.name in hosts.node_types() else section["type"] for each in config.node_types}
    return MixedProvider({HOSTS: own, section["type"]: other}, names)


def _bought(
    cluster: RunningCluster,
    config: ClusterConfig,
    file: dict[str, Any],
    section: Mapping[str, Any],
    *,
    only_ends: bool,
) -> Provider:
    """Returns the provider of all node types without own machines."""
    clock = SystemClock()
    if section["type"] == "fake":
        return FakeProvider(clock)
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
        config.node_types,
        cluster.run_dir,
        clock,
        NoSetUp()
        if only_ends
        else CloudSetUp(
            file, cloud, cluster.head_ip, GcsReader(cluster.gcs_address).nodes, token_file=cluster.ray_token_file
        ),
        board_at(cluster.gcs_address),
    )


def _host_cluster(cluster: RunningCluster, settings: RaytideSection) -> HostCluster:
    named = passed(os.environ, (), all_passed(settings.pass_environment))
    rays = {name: value for name, value in RAY_ENVIRONMENT.items() if name != "RAY_AUTH_MODE"}
    if settings.standby is not None:
        rays |= {"RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_GONE_S)}
    return HostCluster(cluster.cluster_id, cluster.gcs_address, {**named, **rays}, cluster.ray_token_file)


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
    if isinstance(cluster, LocalCluster) and section["type"] != "fake":
        return local_provider(cluster)
    folder = cluster.run_dir / "purchases"
    bought: Bill = FakeProvider(SystemClock()) if section["type"] == "fake" else Purchases(folder)
    own = cluster.run_dir / HOSTS_FOLDER / "purchases"
    return MixedBill({HOSTS: Purchases(own), section["type"]: bought}) if own.exists() else bought


def _kube_api(section: Mapping[str, Any]) -> KubeApi:
    """Connects to Kubernetes from this pod, or through `api_url` (`kubectl proxy`), which needs a `namespace`."""
    if "api_url" not in section:
        return KubeApi.of_this_pod()
    return KubeApi(section["api_url"], section.get("namespace", "default"))
