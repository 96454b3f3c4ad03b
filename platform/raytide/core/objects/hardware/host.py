"""The operator's own machines, which `metadata.raytide.hosts` of cluster.yaml lists. Each machine is reached over ssh
and can be one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config
from raytide.core.errors import ConfigError
from raytide.core.objects.node import CapacityType, NodeType

Argv = Annotated[tuple[str, ...], Field(max_length=64)]
_PATH = r"^(~/|/)[A-Za-z0-9_./+@-]+$"
"""A path on a machine. The shell there gets it without quotes, so that `~` is the user's home."""


class SshSection(Config):
    """The ssh login on the operator's own machines. Host keys are always checked."""

    user: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=64)
    port: int = Field(default=22, ge=1, le=65_535)
    key: str = Field(default="~/.ssh/id_ed25519", max_length=4096)
    """The file of the private key, without a passphrase."""
    known_hosts: str = Field(default="~/.ssh/known_hosts", max_length=4096)
    """The file of the machines' public keys; a machine that it does not name is refused."""


class Host(Config):
    """One of the operator's own machines."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)
    address: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$", max_length=253)
    """The IPv4 address, or a name of it, by which the head and the other nodes reach it."""
    node_type: str
    zone: str = ""
    """One of its node type's zones, the first by default."""
    labels: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Labels of this machine beside its node type's, such as its rack."""
    port: int | None = Field(default=None, ge=1, le=65_535)
    user: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=64)
    power_on: Argv = ()
    power_off: Argv = ()
    """`power_on` and `power_off` are commands of this machine, in place of those for all machines."""


class HostsSection(Config):
    """The section `metadata.raytide.hosts`: the operator's own machines, by address. Nodes of these machines' node
    types are started on the machines. Nodes of other types are bought from `provider`.
    """

    ssh: SshSection
    python: str = Field(default="~/venv/bin/python", pattern=_PATH, max_length=4096)
    """The interpreter on the machines that has raytide."""
    machines: tuple[Host, ...] = Field(min_length=1, max_length=10_000)
    usd_per_kwh: float = Field(default=0.0, ge=0, le=100)
    """The price of electricity, for node types with `power_w` instead of a price."""
    power_on: Argv = ()
    """A command of the head that switches a machine on, such as `[ipmitool, -H, "{name}-bmc", power, "on"]`. `{name}`
    and `{address}` are replaced."""
    power_off: Argv = ()
    """A command of the head that switches a machine off after its node has ended."""
    power_on_timeout_s: float = Field(default=300.0, gt=0, le=3600)
    """The seconds within which a machine must accept ssh after it was switched on."""

    @field_validator("machines")
    @classmethod
    def _unique(cls, machines: tuple[Host, ...]) -> tuple[Host, ...]:
        for what, values in (
            ("name", [host.name for host in machines]),
            ("address", [f"{host.address}:{host.port or ''}" for host in machines]),
        ):
            value, count = Counter(values).most_common(1)[0]
            if count > 1:
                raise ValueError(f"{count} machines have the {what} {value}")
        return machines

    @model_validator(mode="after")
    def _programs(self) -> HostsSection:
        for host in self.machines:
            for argv in (self.power_on_of(host), self.power_off_of(host)):
                if argv and not argv[0]:
                    raise ValueError(f"the power command of {host.name} has no program")
        return self

    def power_on_of(self, host: Host) -> tuple[str, ...]:
        return _filled(host.power_on or self.power_on, host)

    def power_off_of(self, host: Host) -> tuple[str, ...]:
        return _filled(host.power_off or self.power_off, host)

    def node_types(self) -> frozenset[str]:
        return frozenset(host.node_type for host in self.machines)

    def of_type(self, node_type: str) -> tuple[Host, ...]:
        return tuple(host for host in self.machines if host.node_type == node_type)


def with_hosts(node_types: Iterable[NodeType], hosts: HostsSection, *, where: str) -> tuple[NodeType, ...]:
    """Returns the node types. If the operator's own machines belong to a node type, the type's `max_nodes` is at most
    the number of these machines. Raises ConfigError if a machine cannot be a node of its type.
    """
    known = {node_type.name: node_type for node_type in node_types}
    for host in hosts.machines:
        node_type = known.get(host.node_type)
        if node_type is None:
            raise ConfigError(
                f"{where}: machine {host.name} has the node type {host.node_type}, which does not exist.",
                hint=f"Add it to available_node_types. There are: {', '.join(sorted(known)) or 'none'}.",
            )
        if host.zone and host.zone not in node_type.zones:
            raise ConfigError(
                f"{where}: machine {host.name} is in zone {host.zone}, its node type is not.",
                hint=f"Add it to metadata.raytide.node_types.{node_type.name}.zones.",
            )
        if node_type.market is not CapacityType.ON_DEMAND:
            raise ConfigError(
                f"{where}: node type {node_type.name} has own machines and the market {node_type.market}.",
                hint="Nobody takes own machines back: remove its market.",
            )
    return tuple(_limited(node_type, len(hosts.of_type(node_type.name)), where) for node_type in known.values())


def _limited(node_type: NodeType, machines: int, where: str) -> NodeType:
    if not machines or node_type.max_nodes <= machines:
        return node_type
    if node_type.min_nodes > machines:
        raise ConfigError(
            f"{where}: node type {node_type.name} has min_workers {node_type.min_nodes} and {machines} machines.",
            hint="Name more machines, or reduce min_workers.",
        )
    return node_type.model_copy(update={"max_nodes": machines})


def _filled(argv: tuple[str, ...], host: Host) -> tuple[str, ...]:
    return tuple(part.replace("{name}", host.name).replace("{address}", host.address) for part in argv)
