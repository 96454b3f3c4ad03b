"""The section `metadata.raytide.providers`: further clouds and regions of one cluster. Each entry has the same keys as
Ray's cluster.yaml.

Ray's launcher completes only the top-level `provider` section of cluster.yaml, and leaves `metadata` unchanged. So
each further entry lists its own node types. On the head, raytide completes each entry with Ray's bootstrap for the
entry's cloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Annotated, Any

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.objects.hardware.provider_section import CLOUDS, check_gcp, provider_section
from raytide.core.objects.node import NodeType

HEAD_STAND_IN = "raytide-no-head"
"""A placeholder for the type of the head, which Ray's bootstrap requires and a further cloud does not have."""
_SHARED = (
    *("cluster_name", "max_workers", "docker", "file_mounts", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
    *("initialization_commands", "worker_start_ray_commands"),
)
"""The keys that a section takes from the file unless it sets them itself."""
_PLACE = {
    "aws": ("region",),
    "aliyun": ("region",),
    "gcp": ("project_id", "availability_zone"),
    "azure": ("subscription_id", "resource_group"),
}
"""The keys of a `provider` section that say where Ray lists the machines of a cluster."""

Commands = tuple[Annotated[str, Field(max_length=65_536)], ...]


class CloudSection(Config):
    """One additional cloud or region. Settings that are left out have the values of the rest of the file. The private
    key in `auth` is an exception: it belongs to the head's region and is therefore not copied.
    """

    provider: dict[str, object]
    """Ray's `provider` section: `{type: aws, region: us-west-2, ...}`."""
    auth: dict[str, object] | None = None
    available_node_types: dict[str, dict[str, object]] = Field(min_length=1, max_length=1000)
    """Ray's node types, whose names differ from those of all other sections."""
    file_mounts: dict[str, str] | None = None
    initialization_commands: Commands | None = None
    setup_commands: Commands | None = None
    """The commands in place of the file's `setup_commands` and `worker_setup_commands`."""
    worker_start_ray_commands: Commands | None = None


def cloud_files(file: Mapping[str, object], sections: Mapping[str, CloudSection]) -> dict[str, dict[str, Any]]:
    """Returns a mapping from the name of each section to a separate cluster.yaml for this section. The head in such a
    cluster.yaml is only a placeholder."""
    return {name: _cloud_file(file, section) for name, section in sections.items()}


def node_type_sources(
    file: Mapping[str, object], sections: Mapping[str, CloudSection], owned: Mapping[str, str]
) -> dict[str, str]:
    """Returns the source of each node type, including the head's. The source is the name of a section in `providers`,
    the word `hosts` or `slurm`, or the type of the file's own provider. `owned` maps the node types of own machines and
    of Slurm to their sources."""
    section = file.get("provider")
    main = str(section.get("type")) if isinstance(section, Mapping) else ""
    sources = {name: owned.get(name, main) for name in _types(file)}
    for name, cloud in sections.items():
        sources |= dict.fromkeys(cloud.available_node_types, name)
    return sources


def check_clouds(
    file: Mapping[str, object],
    sections: Mapping[str, CloudSection],
    node_types: Iterable[NodeType],
    owned: Mapping[str, str],
    *,
    where: str,
) -> None:
    """Raises ConfigError if two providers have machines, node types or zones that could be confused."""
    main = provider_section(file, where=where)
    places = {_place(main): f"provider {main['type']}"}
    names = dict.fromkeys(_types(file), "available_node_types")
    for name, section in sections.items():
        here = f"{where}: metadata.raytide.providers.{name}"
        if name in (main["type"], "hosts", "slurm"):
            raise ConfigError(f"{here}: another provider of this file has that name.", hint="Choose another name.")
        kind = provider_section({"provider": section.provider}, where=here)["type"]
        if kind not in (*CLOUDS, "fake"):
            raise ConfigError(
                f"{here}: provider {kind} cannot stand beside another.",
                hint=f"Its type is one of {', '.join(CLOUDS)}. Own machines and Slurm have sections of their own.",
            )
        if kind != "fake" and (other := places.setdefault(_place(section.provider), name)) != name:
            raise ConfigError(
                f"{here}: its machines would be listed with those of {other}.",
                hint="Put the node types of one region (on gcp, of one zone of a project) into one section.",
            )
        for node_type in section.available_node_types:
            if (other := names.setdefault(node_type, name)) != name:
                raise ConfigError(
                    f"{here}: node type {node_type} is in {other} too.",
                    hint=f"Call it {node_type}.{name}, for example.",
                )
    _check_zones(node_types, node_type_sources(file, sections, owned), where=where)
    for name, cloud_file in cloud_files(file, sections).items():
        if sections[name].provider["type"] == "gcp":
            here = f"{where}: metadata.raytide.providers.{name}"
            mine = [each for each in node_types if each.name in sections[name].available_node_types]
            check_gcp(sections[name].provider, cloud_file, mine, where=here)


def _check_zones(node_types: Iterable[NodeType], sources: Mapping[str, str], *, where: str) -> None:
    """Raises ConfigError for a zone of two providers: labels, prices and reclaim histories know a zone only by its
    name.
    """
    owners: dict[str, str] = {}
    for node_type in node_types:
        source = sources[node_type.name]
        for zone in node_type.zones:
            if (other := owners.setdefault(zone, source)) != source:
                raise ConfigError(
                    f"{where}: zone {zone} is both of {other} and of {source} (node type {node_type.name}).",
                    hint=f"Give each its own in metadata.raytide.node_types.{node_type.name}.zones.",
                )


def _place(section: Mapping[str, object]) -> str:
    kind = str(section["type"])
    keys = _PLACE.get(kind, tuple(sorted(section)))
    return json.dumps([kind, *(str(section.get(key)) for key in keys)])


def _cloud_file(file: Mapping[str, object], section: CloudSection) -> dict[str, Any]:
    own = section.model_dump(exclude_none=True, exclude={"setup_commands"})
    auth = file.get("auth")
    inherited = (
        {key: value for key, value in auth.items() if key != "ssh_private_key"} if isinstance(auth, Mapping) else {}
    )
    set_up = _worker_setup(file) if section.setup_commands is None else list(section.setup_commands)
    first = next(iter(section.available_node_types.values())).get("node_config", {})
    return deepcopy(
        {
            "auth": inherited,
            "max_workers": 2,  # Ray's own default for its clouds, which an external one lacks
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "initialization_commands": [],
            **{key: file[key] for key in _SHARED if key in file},
            **{key: list(value) if isinstance(value, tuple) else value for key, value in own.items()},
            "head_node_type": HEAD_STAND_IN,
            "available_node_types": {
                HEAD_STAND_IN: {"resources": {}, "max_workers": 0, "node_config": deepcopy(first)},
                **section.available_node_types,
            },
            "head_setup_commands": [],
            "setup_commands": [],
            "worker_setup_commands": set_up,
        }
    )


def _worker_setup(file: Mapping[str, object]) -> list[object]:
    """Returns a worker's set-up commands, whether or not Ray has merged the shared ones into the file's list yet."""
    shared, workers = (_list(file.get(key)) for key in ("setup_commands", "worker_setup_commands"))
    return workers if workers[: len(shared)] == shared else shared + workers


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _types(file: Mapping[str, object]) -> Iterator[str]:
    types = file.get("available_node_types")
    yield from (str(name) for name in types) if isinstance(types, Mapping) else ()
