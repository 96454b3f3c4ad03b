"""The file cluster.yaml as one ClusterConfig, which joins Ray's sections with raytide's section `metadata.raytide`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config, load_yaml
from raytide.core.errors import ConfigError, DeniedError
from raytide.core.io.environment import NAME_PATTERN
from raytide.core.money import micro_usd
from raytide.core.objects.hardware.clouds import CloudSection, check_clouds, cloud_files, node_type_sources
from raytide.core.objects.hardware.energy import EnergySection
from raytide.core.objects.hardware.host import HostsSection, with_hosts
from raytide.core.objects.hardware.provider_section import check_gcp, check_owned, provider_section
from raytide.core.objects.hardware.slurm import SlurmSection, check_slurm
from raytide.core.objects.hardware.standby import StandbySection, check_standby
from raytide.core.objects.hardware.transfer import TransferSection
from raytide.core.objects.node import CapacityType, Meter, NodeType, ScheduledMinimum
from raytide.core.objects.snapshot import Unmanaged
from raytide.core.objects.team import CLASSES, TeamSpec, check_tree
from raytide.core.telemetry.settings import MonitoringSection, TracingSection

GPU_BUSY_ABOVE = 0.05
ProviderName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$", max_length=30)]
UserName = Annotated[str, Field(pattern=r"^([a-z_][a-z0-9_-]*)?$")]


class NodeTypeSection(Config):
    """The section `metadata.raytide.node_types.<name>`. It adds the properties that Ray's node type of the same name
    does not have."""

    price_usd_h: float | None = Field(default=None, ge=0)
    power_w: float | None = Field(default=None, gt=0, le=1_000_000)
    """The power in watts of an own machine at work. Multiplied by `hosts.usd_per_kwh`, it is the machine's price."""
    market: CapacityType = CapacityType.ON_DEMAND
    zones: tuple[str, ...] = ("local",)
    """The zones, in the order in which they are tried."""
    zone_prices_usd_h: dict[str, float] = Field(default_factory=dict)
    """The prices by zone, for zones whose price differs from the type's."""
    warm_nodes: int = Field(default=0, ge=0)
    """The number of empty nodes kept ready ahead of demand."""
    schedule: tuple[ScheduledMinimum, ...] = Field(default=(), max_length=100)
    """Minimums by hour and weekday, in place of Ray's `min_workers`."""
    launch_timeout_s: float = Field(default=600.0, gt=0)
    busy_above: dict[Meter, float] | None = None
    """Physical use, from 0 to 1, by meter, above which a node is kept although it is idle in Ray.

    The default is `{gpu: 0.05}` for types with GPUs, and nothing for others. Set `{}` for GPUs that Ray's agent cannot
    measure: otherwise none of their nodes is ever removed."""
    speed: float = Field(default=1.0, gt=0)
    """The speed of work on one of the type's GPUs (without GPUs, on the whole node), relative to types of speed 1,
    until it is measured.

    Nodes are bought by cost per work, not per hour."""
    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    """The memory of each GPU in 10^9 bytes, for shapes that ask for GPU memory and for plans. By default it is the
    known size for the accelerator in the type's label."""
    network_gbps: float | None = Field(default=None, gt=0, le=100_000)
    """The bandwidth of the node's network in 10^9 bits a second, for plans."""


class LimitsSection(Config):
    """Limits on the cost of the whole fleet, and on the rate at which the fleet changes. A limit that is left out does
    not apply."""

    soft_usd_h: float | None = Field(default=None, ge=0)
    """The cost in dollars an hour above which only spot nodes are bought."""
    hard_usd_h: float | None = Field(default=None, ge=0)
    """The cost in dollars an hour above which nothing is bought. If the fleet still costs 5 % more, the least valuable
    nodes are removed."""
    month_usd: float | None = Field(default=None, ge=0)
    """The limit in dollars of a calendar month (UTC).

    Nothing is bought that would exceed it if all that runs stayed until the month's end. Running nodes that would
    exceed it are removed as above `hard_usd_h`."""
    launches_per_min: int | None = Field(default=None, ge=1)
    moves_after_s: float | None = Field(default=600.0, ge=0)
    """The age in seconds from which replicas and gangs may leave a node for a cheaper one; null: never."""
    team_members: int = Field(default=bounds.TEAM_MEMBERS, ge=1)
    """The most members that the leases of one team have together. Further jobs wait, because every tick visits each
    member."""
    shrink_for_serving: bool = True
    """True if replicas that do not fit preempt members of elastic trainers, never below their minimum, until the load
    falls."""


class UnmanagedSection(Config):
    """Limits on the nodes that may be bought for work without a lease: raw Ray tasks and foreign placement groups."""

    max_nodes: int = Field(default=1, ge=0)
    gpu: bool = False


class HostedApi(Config):
    """A hosted OpenAI-compatible API that endpoints may use, and the operator's key for it."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+[^\s@?#]*$", max_length=2048)]
    """The base URL, such as `https://api.openai.com/v1`."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
    """The name of the environment variable with the API's key where the cluster is started. Only raytide's own
    processes on the head get it, not those of nodes and users."""


class GatewaySection(Config):
    """The settings of the gateway, the OpenAI-compatible address of all endpoints."""

    require_keys: Literal["auto"] | bool = "auto"
    """True if requests need an API key; with `auto`, they need one unless the gateway listens on a loopback address."""
    hosted: tuple[HostedApi, ...] = Field(default=(), max_length=64)
    """The hosted APIs that the specs of endpoints may name."""
    usage_retention_days: int = Field(default=400, ge=1, le=36_500)
    """The time after which the usage of single requests is deleted; what keys have spent is kept."""
    audit_retention_days: int = Field(default=800, ge=1, le=36_500)
    """The time after which entries of the audit log, and keys that ended, are deleted; the rest stays verifiable."""

    def demands_keys(self, *, is_loopback: bool) -> bool:
        """Returns whether requests need an API key. `auto` means yes, unless the gateway listens on loopback."""
        return not is_loopback if self.require_keys == "auto" else self.require_keys


class BackupRetention(Config):
    """The numbers of snapshots to keep: the newest `last` snapshots, and the newest snapshot of each of the last hours,
    days, weeks and so on."""

    last: int = Field(default=4, ge=1, le=10_000)
    hourly: int = Field(default=24, ge=0, le=10_000)
    daily: int = Field(default=7, ge=0, le=10_000)
    weekly: int = Field(default=5, ge=0, le=10_000)
    monthly: int = Field(default=12, ge=0, le=10_000)
    yearly: int = Field(default=0, ge=0, le=1000)


class SftpSection(Config):
    """The ssh key and the known hosts for logins to `sftp:` repositories. This section replaces the user's own ssh
    configuration. Host keys are checked."""

    key: str = Field(default="~/.ssh/id_ed25519", pattern=r"^(/|~/)", max_length=4096)
    """The file of the private key, without a passphrase."""
    known_hosts: str = Field(default="~/.ssh/known_hosts", pattern=r"^(/|~/)", max_length=4096)


class BackupSection(Config):
    """The settings of backups. Restic makes the backups. Each `raytide backup` makes one backup, and a process of the
    cluster makes backups on a schedule."""

    repository: Annotated[str, Field(min_length=1, max_length=4096)]
    """The repository: a path or a restic URL, such as `s3:s3.amazonaws.com/bucket/path`, `sftp:user@host:/path` or
    `rest:https://host/`."""
    password_file: Annotated[str, Field(pattern=r"^(/|~/)", max_length=4096)]
    """The file with the password that encrypts the repository. Keep a copy of it outside of the cluster."""
    environment_file: Annotated[str, Field(pattern=r"^((/|~/).*)?$", max_length=4096)] = ""
    """The file with credentials of the object store, such as `AWS_SECRET_ACCESS_KEY=...`, one in each line; only this
    user may read it.

    Without it these variables come from the environment in which the cluster was started."""
    sftp: SftpSection | None = None
    every_s: float = Field(default=900.0, ge=60, le=30 * 86_400)
    """The seconds between two backups: the most work that a loss of the head can cost."""
    keep: BackupRetention = BackupRetention()
    """The snapshots to keep; applied once a day."""
    drill_every_s: float = Field(default=86_400.0, ge=600, le=366 * 86_400)
    """The time between two restores into a scratch folder, which are checked and measured."""
    drill_parts: int = Field(default=30, ge=1, le=1000)
    """The number of parts into which the repository is divided. Each drill reads one part, besides all data of the
    newest snapshot."""
    cold_repository: Annotated[str, Field(max_length=4096)] = ""
    """A second repository with the same password, to which the newest snapshot is copied; none if empty."""
    cold_every_s: float = Field(default=7 * 86_400.0, ge=600, le=366 * 86_400)
    paths: tuple[Annotated[str, Field(pattern=r"^(/|~/)", max_length=4096)], ...] = Field(default=(), max_length=1000)
    """Further files and folders of this machine to save."""

    @model_validator(mode="after")
    def _one_login(self) -> BackupSection:
        if self.sftp is not None and self.repository.startswith("sftp:") and self.cold_repository.startswith("sftp:"):
            raise ValueError(
                "sftp is the login of one repository: for two of them use the user's own ssh configuration"
            )
        return self


class RaytideSection(Config):
    """The section `metadata.raytide` of cluster.yaml."""

    most_bytes: ClassVar[int] = bounds.MOST_FILE_BYTES

    version: int = Field(default=1, ge=1, le=1)
    node_types: dict[str, NodeTypeSection]
    providers: dict[ProviderName, CloudSection] = Field(default_factory=dict, max_length=64)
    """Further clouds and regions, beside the file's own `provider`."""
    hosts: HostsSection | None = None
    slurm: SlurmSection | None = None
    transfer: TransferSection | None = None
    """The price of getting data to nodes; None: it costs nothing."""
    limits: LimitsSection = LimitsSection()
    unmanaged: UnmanagedSection = UnmanagedSection()
    gateway: GatewaySection = GatewaySection()
    monitoring: MonitoringSection = MonitoringSection()
    tracing: TracingSection = TracingSection()
    energy: EnergySection = EnergySection()
    backup: BackupSection | None = None
    """The backups; None: nothing is backed up."""
    standby: StandbySection | None = None
    """The heads that take over from each other; None: the cluster has one head."""
    teams: dict[str, TeamSpec] = Field(default_factory=lambda: {"default": TeamSpec()})
    priorities: dict[str, int] = Field(default_factory=lambda: dict(CLASSES))
    """The priority classes. Jobs of a class with a higher number go first, and may preempt those of a lower one."""
    max_live_jobs: int = Field(default=bounds.LIVE_JOBS, ge=1, le=100_000)
    """The most unfinished jobs of one team. Further submissions are refused, because every tick visits all jobs."""
    job_retention_days: int = Field(default=90, ge=1, le=36_500)
    """The time after which finished jobs are deleted with their leases and events; ledger entries are kept."""
    state_url: str = ""
    """The SQLAlchemy URL of the state store; empty for a SQLite file in the run folder."""
    tick_s: float = Field(default=0.5, gt=0, le=60)
    """The time between two decisions if no event triggers one earlier."""

    pass_environment: tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...] = ()
    """The variables to pass to nodes and to users' commands, besides those that raytide always passes
    (docs/security.md). A name that looks like a secret's must be given in full."""
    data_roots: tuple[Annotated[str, Field(pattern=r"^(/|~/|[a-z0-9]+://[^/])", max_length=4096)], ...] = ()
    """The paths and URLs of object stores below which all files of trainings, builds and endpoints must be.

    By default specs may name everything that raytide's user can read and that is not private."""
    run_as: UserName | dict[str, UserName] = ""
    """The user as which scripts run, for all teams or by team; raytide's own user if empty. Needs root."""

    @model_validator(mode="after")
    def _tree(self) -> RaytideSection:
        check_tree(self.teams)
        if isinstance(self.run_as, dict) and self.run_as.keys() != self.teams.keys():
            raise ValueError(f"run_as by team names each team once: {', '.join(sorted(self.teams))}")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> RaytideSection:
        twice = (
            set() if self.hosts is None or self.slurm is None else self.hosts.node_types() & set(self.slurm.node_types)
        )
        if twice:
            raise ValueError(f"node types of both hosts and slurm: {', '.join(sorted(twice))}")
        return self

    def owned_node_types(self) -> dict[str, str]:
        """Returns the node types that are not bought from a cloud, each with its source: `hosts` for own machines,
        `slurm` for jobs of Slurm."""
        own = {} if self.hosts is None else dict.fromkeys(self.hosts.node_types(), "hosts")
        return own if self.slurm is None else own | dict.fromkeys(self.slurm.node_types, "slurm")

    def users(self) -> frozenset[str]:
        """Returns the operating system's users under which scripts run. raytide's own user is left out."""
        named = {self.run_as} if isinstance(self.run_as, str) else set(self.run_as.values())
        return frozenset(named - {""})

    def user_of(self, team: str) -> str:
        """Returns the operating system's user that runs the team's scripts. It is empty for raytide's own user."""
        return self.run_as if isinstance(self.run_as, str) else self.run_as[team]

    def check_packages(self, pip: Collection[str], team: str, what: str) -> None:
        """Raises DeniedError if `pip` lists packages and `run_as` names a separate OS user for the team's code."""
        hint = "Install them on the nodes, or run a script: its packages are its user's."
        self.check_code(f"the packages {', '.join(pip)}" if pip else None, team, what, hint)

    def check_image(self, image: str | None, team: str, what: str) -> None:
        """Raises DeniedError if a job names a container image and `run_as` requires that the team's code runs as a
        separate user of the operating system. An image would run as raytide's user."""
        hint = "Use `pip` in a script, whose packages are its user's, or a node type that starts from the image."
        self.check_code(None if image is None else f"the image {image}", team, what, hint)

    def check_code(self, code: str | None, team: str, what: str, hint: str) -> None:
        """Does the same as `check_packages` for other code. `code` describes the code; None if there is none."""
        if code is not None and self.user_of(team):
            raise DeniedError(
                f"{what}: {code} would run as raytide's user, and run_as gives users' code another.", hint=hint
            )


class ClusterConfig(Config):
    """The node types and the policies of one cluster."""

    name: str
    node_types: tuple[NodeType, ...]
    settings: RaytideSection
    max_nodes: int | None = None
    """Ray's `max_workers`: the most workers of all types together; None if the file has none."""

    @property
    def unmanaged(self) -> Unmanaged:
        return Unmanaged(max_nodes=self.settings.unmanaged.max_nodes, gpu=self.settings.unmanaged.gpu)


def load_cluster(path: Path | str) -> ClusterConfig:
    """Reads and checks a cluster.yaml. Raises one ConfigError that names every wrong key."""
    file = load_yaml(path)
    check_ray_schema(file, where=str(path))
    section = provider_section(file, where=str(path))
    metadata = file.get("metadata")
    raw = metadata.get("raytide") if isinstance(metadata, Mapping) else None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} has no metadata.raytide.", hint="`raytide schema` prints what belongs there.")
    settings = RaytideSection.parse(raw, where=f"{path}: metadata.raytide")
    if settings.standby is not None:
        saved = None if settings.backup is None else settings.backup.paths
        check_standby(settings.standby, settings.state_url, section["type"], saved, where=str(path))
    for name, cloud_file in cloud_files(file, settings.providers).items():
        check_ray_schema(cloud_file, where=f"{path}: metadata.raytide.providers.{name}")
    node_types = _join_node_types(file, settings, where=str(path))
    if settings.hosts is not None:
        node_types = with_hosts(node_types, settings.hosts, where=str(path))
    if settings.slurm is not None:
        check_slurm(settings.slurm, node_types, where=str(path))
    owned = settings.owned_node_types()
    sources = node_type_sources(file, settings.providers, owned)
    mine = [each for each in node_types if sources[each.name] == section["type"]]
    if section["type"] in ("hosts", "slurm"):
        check_owned(section["type"], owned, mine, where=str(path))
    if section["type"] == "gcp":
        check_gcp(section, file, mine, where=str(path))
    if settings.providers:
        check_clouds(file, settings.providers, node_types, owned, where=str(path))
        node_types = tuple(each.model_copy(update={"provider": sources[each.name]}) for each in node_types)
    name, most = str(file.get("cluster_name", "raytide")), cast("int | None", file.get("max_workers"))
    return ClusterConfig(name=name, node_types=node_types, settings=settings, max_nodes=most)


def check_ray_schema(file: Mapping[str, object], *, where: str) -> None:
    """Checks the file against the schema that Ray ships, without importing Ray."""
    import jsonschema

    spec = find_spec("ray")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"cannot check {where}: ray is not installed.", hint="Run `./dev setup`.")
    schema = json.loads((Path(spec.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json").read_text())
    problems = sorted(
        jsonschema.Draft7Validator(schema).iter_errors(file), key=lambda error: list(map(str, error.path))
    )
    if problems:
        lines = [f"{'.'.join(map(str, error.path)) or '(top)'}: {error.message}" for error in problems]
        raise ConfigError(
            f"{where}: " + "; ".join(lines), hint="Correct these keys; raytide's own belong in metadata.raytide."
        )


def _join_node_types(file: Mapping[str, object], settings: RaytideSection, *, where: str) -> tuple[NodeType, ...]:
    ray_types = file.get("available_node_types")
    ray_types = dict(ray_types) if isinstance(ray_types, Mapping) else {}
    for cloud in settings.providers.values():
        ray_types |= {name: each for name, each in cloud.available_node_types.items() if name not in ray_types}
    head = file.get("head_node_type")
    default_max = file.get("max_workers", 2)  # Ray's own defaults
    for name in settings.node_types:
        if name not in ray_types:
            raise ConfigError(
                f"{where}: metadata.raytide.node_types.{name} has no node type of that name in available_node_types.",
                hint="The two must match.",
            )
    return tuple(
        _join(name, ray_type, settings, default_max, where=where)
        for name, ray_type in ray_types.items()
        if name != head
    )


def _join(
    name: str, ray_type: Mapping[str, object], settings: RaytideSection, default_max: object, *, where: str
) -> NodeType:
    section = settings.node_types.get(name)
    price_usd_h = None if section is None else _price_usd_h(section, settings.hosts)
    if section is None or price_usd_h is None:
        raise ConfigError(
            f"{where}: node type {name} has no price.",
            hint=f"Add metadata.raytide.node_types.{name} with price_usd_h (0 for a machine you own and do not book).",
        )
    fields: dict[str, object] = {
        "name": name,
        "resources": ray_type.get("resources", {}),
        "labels": ray_type.get("labels", {}),
        "min_nodes": ray_type.get("min_workers", 0),
        "max_nodes": ray_type.get("max_workers", default_max),
        "price_micro_usd_h": micro_usd(price_usd_h),
        "zone_prices_micro_usd_h": {zone: micro_usd(usd) for zone, usd in section.zone_prices_usd_h.items()},
        **section.model_dump(exclude={"price_usd_h", "power_w", "zone_prices_usd_h"}, exclude_none=True),
    }
    if "idle_timeout_s" in ray_type:
        fields["idle_timeout_s"] = ray_type["idle_timeout_s"]
    node_type = NodeType.parse(fields, where=f"{where}: node type {name}")
    if section.busy_above is None and node_type.resources.get("GPU"):
        return node_type.model_copy(update={"busy_above": {"gpu": GPU_BUSY_ABOVE}})
    return node_type


def _price_usd_h(section: NodeTypeSection, hosts: HostsSection | None) -> float | None:
    if section.price_usd_h is None and section.power_w is not None and hosts is not None:
        return section.power_w / 1000 * hosts.usd_per_kwh
    return section.price_usd_h
