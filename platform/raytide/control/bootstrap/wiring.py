"""Builds the controller's connections to Ray and to the provider. cluster.yaml describes both connections."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from raytide.actors.gang.placement_groups import PlacementGroups
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.exporter.directory import ExporterDirectory
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.base import Bill, Provider
from raytide.autoscaler.providers.cloud.orders import without_waits
from raytide.autoscaler.providers.cloud.pages import with_all_pages
from raytide.autoscaler.providers.cloud.provider import CloudProvider
from raytide.autoscaler.providers.cloud.setup import CloudSetUp, SetUp
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
from raytide.autoscaler.providers.source import ProviderSource
from raytide.autoscaler.ray_gcs import GcsReader
from raytide.control.bootstrap.cluster_record import RAY_ENVIRONMENT, LocalCluster, RunningCluster
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.control.reconcile.observation import ApiProbe, Sources
from raytide.core import ray_internals
from raytide.core.clock import Clock, SystemClock
from raytide.core.config import load_yaml
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.io.environment import all_passed, passed
from raytide.core.io.private_paths import inherited_restriction, restrict_to
from raytide.core.objects.cluster_config import ClusterConfig, RaytideSection, load_cluster
from raytide.core.objects.hardware.clouds import HEAD_STAND_IN, cloud_files, node_type_sources
from raytide.core.objects.hardware.provider_section import provider_section
from raytide.core.objects.node import NodeType

RAY_NAMESPACE = "raytide"
HOSTS, SLURM = "hosts", "slurm"
CLOUDS_FOLDER, PURCHASES = "providers", "purchases"
GCS_GONE_S = 600
"""The seconds for which a node waits for another head. Ray's default is a minute, after which the node's raylet
ends."""


def sources(cluster: RunningCluster) -> Sources:
    """Connects this process to Ray, and returns the controller's connections to Ray, the provider, the API and the
    meters."""
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


def provider(cluster: RunningCluster, *, only_ends: bool = False, clock: Clock | None = None) -> Provider:
    """Returns one provider for all node types. It combines the provider of the `provider` section, further clouds, the
    operator's own machines, and Slurm. An embedded cluster has only the local provider, unless the type in the
    `provider` section is `fake`.

    With `only_ends` the provider can end nodes, but not set them up.
    """
    file: dict[str, Any] = load_yaml(cluster.config_path)
    section = provider_section(file, where=str(cluster.config_path))
    if isinstance(cluster, LocalCluster) and section["type"] != "fake":
        return local_provider(cluster)
    clock = clock or SystemClock()
    config = load_cluster(cluster.config_path)
    _check_left_out(cluster, config.settings)
    names = node_type_sources(file, config.settings.providers, config.settings.owned_node_types())
    made = _owned(cluster, config, clock, only_ends=only_ends)
    if section["type"] not in made and section["type"] not in (HOSTS, SLURM):
        mine = [each for each in config.node_types if names[each.name] == section["type"]]
        made[section["type"]] = _bought(cluster, mine, file, section, clock, only_ends=only_ends)
    if len(made) == 1 and not config.settings.providers:
        return next(iter(made.values()))
    sources = [ProviderSource(name, partial(_same, each), _recorded(cluster, name)) for name, each in made.items()]
    for name, cloud_file in cloud_files(file, config.settings.providers).items():
        mine = [each for each in config.node_types if names[each.name] == name]
        connect = partial(_further, cluster, name, mine, cloud_file, clock, only_ends=only_ends)
        sources.append(ProviderSource(name, connect, Purchases(cluster.run_dir / CLOUDS_FOLDER / name / PURCHASES)))
    return MixedProvider(sources, names, began_s=clock.now_s())


def _same(made: Provider) -> Provider:
    return made


def _recorded(cluster: RunningCluster, name: str) -> Bill | None:
    """Returns the billing records of the `provider` section, of own machines, or of Slurm; None for a fake provider."""
    folder = cluster.run_dir / {HOSTS: HOSTS_FOLDER, SLURM: SLURM_FOLDER}.get(name, "") / PURCHASES
    return Purchases(folder) if name != "fake" else None


def _check_left_out(cluster: RunningCluster, settings: RaytideSection) -> None:
    """Raises a ConfigError if machines run at a provider that the file no longer names: nothing would end them."""
    for folder in sorted((cluster.run_dir / CLOUDS_FOLDER).glob(f"*/{PURCHASES}")):
        name = folder.parent.name
        left = [] if name in settings.providers else [each.node_id for each in Purchases(folder).open()]
        if left:
            raise ConfigError(
                f"{cluster.config_path} has no metadata.raytide.providers.{name}, where {', '.join(left)} run.",
                hint="Put it back with max_workers 0 until its nodes have ended.",
            )


def _owned(cluster: RunningCluster, config: ClusterConfig, clock: Clock, *, only_ends: bool) -> dict[str, Provider]:
    """Returns the providers of own machines and of Slurm."""
    hosts, slurm = config.settings.hosts, config.settings.slurm
    sources: dict[str, Provider] = {}
    shared = (config.node_types, _host_cluster(cluster, config.settings), cluster.run_dir, clock)
    if hosts is not None:
        ssh = SshConnection(hosts, cluster.cluster_id)
        sources[HOSTS] = HostsProvider(hosts, *shared, ssh, starts_nodes=not only_ends)
    if slurm is not None:
        sources[SLURM] = SlurmProvider(slurm, *shared, SlurmCommands(slurm), starts_nodes=not only_ends)
    return sources


def _bought(
    cluster: RunningCluster,
    node_types: Sequence[NodeType],
    file: dict[str, Any],
    section: Mapping[str, Any],
    clock: Clock,
    *,
    only_ends: bool,
) -> Provider:
    """Returns the provider that the file's `provider` section describes, for the given node types."""
    if section["type"] == "fake":
        return FakeProvider(clock)
    if section["type"] == "local":
        raise ConfigError(
            f"{cluster.config_path}: provider local is for this machine alone.",
            hint="Start it with `raytide up --local`.",
        )
    if section["type"] == "kuberay":
        return KubeRayProvider(_kube_api(section), str(file["cluster_name"]), cluster.run_dir, clock)
    return _cloud(cluster, node_types, file, cluster.run_dir, clock, only_ends=only_ends)


def _further(
    cluster: RunningCluster,
    name: str,
    node_types: Sequence[NodeType],
    file: dict[str, Any],
    clock: Clock,
    *,
    only_ends: bool,
) -> Provider:
    """Returns the provider of a section of `metadata.raytide.providers`, completed by Ray's bootstrap for its cloud."""
    if file["provider"]["type"] == "fake":
        return FakeProvider(clock)
    completed = file if only_ends else _completed(file)
    return _cloud(cluster, node_types, completed, cluster.run_dir / CLOUDS_FOLDER / name, clock, only_ends=only_ends)


def _completed(file: dict[str, Any]) -> dict[str, Any]:
    """Returns a further cloud's file as completed by Ray. Ray needs a head in it: a stand-in, removed afterwards, for
    which no IAM role is created on AWS."""
    if file["provider"]["type"] == "aws":
        file["available_node_types"][HEAD_STAND_IN]["node_config"]["IamInstanceProfile"] = {"Name": HEAD_STAND_IN}
    try:
        completed = ray_internals.bootstrapped_config(file)
    except Exception as error:  # each cloud's bootstrap has its own errors
        raise ClusterError(
            f"Ray could not complete the section for {file['provider']['type']}: {type(error).__name__}: {error}",
            hint="Give the head credentials for it, and name in the section what it cannot find or make.",
        ) from error
    del completed["available_node_types"][HEAD_STAND_IN]
    return completed


def _cloud(
    cluster: RunningCluster,
    node_types: Sequence[NodeType],
    file: dict[str, Any],
    folder: Path,
    clock: Clock,
    *,
    only_ends: bool,
) -> Provider:
    kind = file["provider"]["type"]
    cloud = ray_internals.node_provider(file["provider"], file["cluster_name"])
    cloud = with_all_pages(cloud, kind)
    if not only_ends:  # a process that only ends machines has no later tick in which to try again
        cloud = without_waits(cloud, kind)
    in_ray, token = GcsReader(cluster.gcs_address).nodes, cluster.ray_token_file
    set_up = SetUp() if only_ends else CloudSetUp(file, cloud, cluster.head_ip, in_ray, token_file=token)
    return CloudProvider(file, cloud, node_types, folder, clock, set_up, board_at(cluster.gcs_address))


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


def end_head(cluster: RunningCluster) -> None:
    """Makes KubeRay's operator delete the head pod: otherwise its container would restart and start the cluster again.
    Does nothing on other providers.
    """
    file: dict[str, Any] = load_yaml(cluster.config_path)
    section = provider_section(file, where=str(cluster.config_path))
    if section["type"] == "kuberay":
        with closing(_kube_api(section)) as api:
            api.patch_cluster(str(file["cluster_name"]), [{"op": "add", "path": "/spec/suspend", "value": True}])


def bill(cluster: RunningCluster) -> Bill:
    """Returns the billing records of the cluster's machines, for a process that must not start or end machines."""
    section = provider_section(load_yaml(cluster.config_path), where=str(cluster.config_path))
    if isinstance(cluster, LocalCluster) and section["type"] != "fake":
        return local_provider(cluster)
    folder = cluster.run_dir / PURCHASES
    bought: Bill = FakeProvider(SystemClock()) if section["type"] == "fake" else Purchases(folder)
    folders = [cluster.run_dir / name / PURCHASES for name in (HOSTS_FOLDER, SLURM_FOLDER)]
    folders += (cluster.run_dir / CLOUDS_FOLDER).glob(f"*/{PURCHASES}")
    others: dict[str, Bill] = {str(other): Purchases(other) for other in folders if other.exists()}
    return MixedBill({**others, str(folder): bought}) if others else bought


def _kube_api(section: Mapping[str, Any]) -> KubeApi:
    """Connects to Kubernetes from this pod, or through `api_url` (`kubectl proxy`), which needs a `namespace`."""
    if "api_url" not in section:
        return KubeApi.of_this_pod()
    return KubeApi(section["api_url"], section.get("namespace", "default"))
