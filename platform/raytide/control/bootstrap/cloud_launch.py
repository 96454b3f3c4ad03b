"""`raytide up cluster.yaml` on a cloud: Ray's cluster launcher brings up the head, which runs raytide's controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.control.bootstrap.exposure import check_file
from raytide.core.config import load_yaml
from raytide.core.errors import ConfigError, ProviderError, UsageError
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster, provider_section

if TYPE_CHECKING:
    from raytide.control.bootstrap.rehearsal import Step

__all__ = ["LaunchedHead", "dry_run", "up"]


@dataclass(frozen=True, slots=True)
class LaunchedHead:
    name: str
    ip: str


def up(path: Path, name: str | None = None, *, insecure: bool = False) -> LaunchedHead:
    """Start the head, or bring one that runs up to date. Raises before anything is done when the file cannot work, or
    would start a Ray that is open to others, unless that is wanted (`insecure`)."""
    file, _ = _checked(path, name, insecure)
    from ray.autoscaler import sdk

    try:
        completed = sdk.create_or_update_cluster(file, no_config_cache=True)
        ip = sdk.get_head_node_ip(file)
    except Exception as error:  # each cloud's library has errors of its own, and Ray's launcher its own way to give up
        raise ProviderError(
            f"`ray up` of {path} failed: {error}", hint="Mend what is said above and repeat: what is there is used."
        ) from error
    return LaunchedHead(str(completed["cluster_name"]), str(ip))


def dry_run(path: Path, name: str | None = None, *, insecure: bool = False) -> list[Step]:
    """What `up` and then the controller would do to the head and to a node of each type; nothing is done."""
    file, config = _checked(path, name, insecure)
    from raytide.control.bootstrap.rehearsal import dry_run

    return dry_run(file, config.node_types)


def _checked(path: Path, name: str | None, insecure: bool) -> tuple[dict[str, Any], ClusterConfig]:
    config, file = load_cluster(path), load_yaml(path)
    section = provider_section(file, where=str(path))
    if section["type"] in ("local", "fake"):
        raise UsageError(f"provider {section['type']} is this machine.", hint=f"Say `raytide up {path} --local`.")
    if section["type"] == "kuberay":
        raise UsageError(
            f"{path} is for a RayCluster, which Kubernetes starts.",
            hint="Apply the manifest of docs/providers.md; its head pod runs `raytide head`.",
        )
    _check_head(file, path)
    if not insecure:
        check_file(file, where=str(path))
    for target, source in dict(file.get("file_mounts") or {}).items():  # type: ignore[call-overload]
        if not Path(source).expanduser().exists():
            raise ConfigError(
                f"{path}: file_mounts.{target}: there is no {source}.",
                hint="Commands look for it from the present folder. `pip wheel --no-deps -w dist .` makes raytide's.",
            )
    return (file | {"cluster_name": name} if name else file), config


def _check_head(file: Mapping[str, Any], path: Path) -> None:
    """The one thing that must not go wrong quietly: two autoscalers on one cluster, or none."""
    start = "\n".join(file.get("head_start_ray_commands") or ())
    if "--no-monitor" not in start or "--autoscaling-config" in start:
        raise ConfigError(
            f"{path}: head_start_ray_commands would start Ray's own autoscaler beside raytide's.",
            hint="Say `ray start --head --no-monitor` there, without --autoscaling-config.",
        )
    if "raytide head" not in start:
        raise ConfigError(
            f"{path}: head_start_ray_commands does not start raytide.",
            hint="Add `raytide head ~/ray_bootstrap_config.yaml` after `ray start`.",
        )
