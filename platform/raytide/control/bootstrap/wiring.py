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
from raytide.autoscaler.providers.slurm.provider import SLURM_FOLDER, SlurmProvider
from raytide.autoscaler.providers.slurm.queue import SlurmCommands
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
from raytide.core.objects.cluster_config import ClusterConfig, RaytideSection, load_cluster
from raytide.core.objects.hardware.provider_section import provider_section

RAY_NAMESPACE = "raytide"
HOSTS, SLURM = "hosts", "slurm"
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
    """Returns the provider of the `provider` section, with own machines and Slurm beside it. In an embedded
    cluster it is the local one for all node types, unless it is `fake`.

    With `only_ends` it sets up no nodes.
    """
    file: dict[str, Any] = load_yaml(cluster.config_path)
    section = provider_section(file, where=str(cluster.config_path))
    if isinstance(cluster, LocalCluster) and section["type"] != "fake":
        return local_provider(cluster)
    config = load_cluster(cluster.config_path)
    sources, names = _owned(cluster, config, only_ends=only_ends)
    if section["type"] not in sources and section["type"] not in (HOSTS, SLURM):
        sources[section["type"]] = _bought(cluster, config, file, section, only_ends=only_ends)
    if len(sources) == 1:
        return next(iter(sources.values()))
    return MixedProvider(sources, {each.name: names.get(each.name, section["type"]) for each in config.node_types})


def _owned(
    cluster: RunningCluster, config: ClusterConfig, *, only_ends: bool
) -> tuple[dict[str, Provider], dict[str, str]]:
    """Returns the providers of own machines and of Slurm, and which of them has a node type."""
    hosts, slurm = config.settings.hosts, config.settings.slurm
    sources: dict[str, Provider] = {}
    names: dict[str, str] = {}
    host_cluster = _host_cluster(cluster, config.settings)
    if hosts is not None:
        sources[HOSTS] = HostsProvider(
            hosts,
            config.node_types,
            host_cluster,
            cluster.run_dir,
            SystemClock(),
            SshConnection(hosts, cluster.cluster_id),
            starts_nodes=not only_ends,
        )
        names |= dict.fromkeys(hosts.node_types(), HOSTS)
    if slurm is not None:
        sources[SLURM] = SlurmProvider(
            slurm,
            config.node_types,
            host_cluster,
            cluster.run_dir,
            SystemClock(),
            SlurmCommands(slurm),
            starts_nodes=not only_ends,
        )
        names |= dict.fromkeys(slurm.node_types, SLURM)
    return sources, names


def _bought(
    cluster: RunningCluster,
    config: ClusterConfig,
    file: dict[str, Any],
    section: Mapping[str, Any],
    *,
    only_ends: bool,
) -> Provider:
    """Returns the provider of all node types that are bought."""
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
    folders = {name: cluster.run_dir / name / "purchases" for name in (HOSTS_FOLDER, SLURM_FOLDER)}
    owned: dict[str, Bill] = {name: Purchases(own) for name, own in folders.items() if own.exists()}
    return MixedBill({**owned, "bought": bought}) if owned else bought


def _kube_api(section: Mapping[str, Any]) -> KubeApi:
    """Connects to Kubernetes from this pod, or through `api_url` (`kubectl proxy`), which needs a `namespace`."""
    if "api_url" not in section:
        return KubeApi.of_this_pod()
    return KubeApi(section["api_url"], section.get("namespace", "default"))
