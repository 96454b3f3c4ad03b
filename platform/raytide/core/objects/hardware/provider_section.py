"""Checks of the `provider` section of cluster.yaml, and of the node types that each provider can have."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from raytide.core.errors import ConfigError
from raytide.core.objects.node import NodeType

CLOUDS = ("aws", "azure", "gcp", "vsphere", "aliyun", "external")
"""The providers of Ray's cluster launcher from which raytide can buy nodes. Ray's own `local` is not among them,
because it has no node types.
"""
_KEEPS_STOPPED = {"aws": True, "azure": True, "gcp": False, "aliyun": True}
"""Ray's default of `cache_stopped_nodes`."""
_GCP_CLUSTER_NAME = 35
"""The longest name: Ray makes `ray-NAME-worker-0123abcd-compute` of it, and machine names have at most 63
characters."""


def provider_section(file: Mapping[str, object], *, where: str) -> Mapping[str, Any]:
    """Returns the `provider` section of a cluster.yaml. Raises ConfigError if raytide does not know the provider's
    type, or if the provider would keep stopped machines."""
    section = file.get("provider")
    kind = section.get("type") if isinstance(section, Mapping) else None
    known = ("local", "fake", "hosts", "slurm", "kuberay", *CLOUDS)
    if not isinstance(section, Mapping) or kind not in known:
        near = get_close_matches(str(kind), known, n=1)
        raise ConfigError(
            f"{where}: raytide has no provider of type {kind!r}" + (f" (did you mean {near[0]}?)." if near else "."),
            hint=f"provider.type is one of {', '.join(known)}.",
        )
    keeps = section.get("cache_stopped_nodes", _KEEPS_STOPPED.get(str(kind), False))
    if kind in _KEEPS_STOPPED and keeps:
        raise ConfigError(
            f"{where}: Ray would stop machines of {kind} and keep them, with their disks, instead of ending them.",
            hint="Set `cache_stopped_nodes: false` in the provider section.",
        )
    return section


def check_owned(kind: str, owned: Collection[str], node_types: Iterable[NodeType], *, where: str) -> None:
    """Raises ConfigError if a node type is not in `owned`. `kind` is the type of the provider: hosts or slurm. `owned`
    contains the node types of the operator's machines (hosts) or of Slurm's jobs (slurm).
    """
    for node_type in node_types:
        if node_type.name not in owned:
            what = "machine" if kind == "hosts" else "job"
            key = "hosts.machines" if kind == "hosts" else "slurm.node_types"
            raise ConfigError(
                f"{where}: provider {kind} has no {what} of node type {node_type.name}.",
                hint=f"Name it in metadata.raytide.{key} (docs/providers.md).",
            )


def check_gcp(
    section: Mapping[str, Any], file: Mapping[str, object], node_types: Iterable[NodeType], *, where: str
) -> None:
    """Raises an error if the file does not fit Ray's GCP provider. This provider creates and lists machines in one zone
    only. It uses the cluster's name in machine names. It uses the names of the cluster and of node types as labels, and
    labels must not contain capitals or dots.
    """
    zone = section.get("availability_zone")
    for node_type in node_types:
        if node_type.zones != (zone,):
            raise ConfigError(
                f"{where}: node type {node_type.name} has the zones {', '.join(node_type.zones)}, on gcp.",
                hint=f"Set metadata.raytide.node_types.{node_type.name}.zones to [{zone}], provider.availability_zone.",
            )
    types = file.get("available_node_types")
    for name in types if isinstance(types, Mapping) else ():
        if not re.fullmatch("[a-z0-9_-]{1,63}", str(name)):
            able = re.sub("[^a-z0-9_-]", "-", str(name).lower())[:63]
            raise ConfigError(
                f"{where}: node type {name} cannot be the label of a machine on gcp: at most 63 lowercase letters, "
                "digits, - and _.",
                hint=f"Call it {able}, in metadata.raytide.node_types too.",
            )
    cluster = str(file.get("cluster_name", ""))
    if not re.fullmatch(f"[a-z0-9-]{{1,{_GCP_CLUSTER_NAME}}}", cluster):
        raise ConfigError(
            f"{where}: cluster_name {cluster} cannot be a part of a machine's name on gcp.",
            hint=f"Use at most {_GCP_CLUSTER_NAME} lowercase letters, digits and -.",
        )
