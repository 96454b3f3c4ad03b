"""The provider interface. Calls are idempotent; machines carry raytide's node id, so records can be reconciled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from raytide.core.objects.node import Node, NodeType


@dataclass(frozen=True, slots=True)
class Machine:
    """The provider's view of one node, under raytide's id. It is billed for the time [started_at_s, ended_at_s)."""

    node_id: str
    node_type: str
    zone: str
    price_micro_usd_h: int
    """The present price."""
    started_at_s: float
    ended_at_s: float | None = None
    address: str = ""
    ray_id: str = ""
    """Ray's name for the machine if it is not raytide's id: KubeRay starts each raylet under its pod's name."""
    meter: str = ""
    """`host:port` of the machine's own utilization exporter; empty where Ray's agent covers the machine."""
    reason: str = ""
    """The reason for the machine's end: "terminated", "reclaimed", "exited with 1"."""
    earlier: tuple[tuple[float, int], ...] = ()
    """Earlier prices as (valid until, micro-dollars an hour), oldest first."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice that the provider will reclaim this machine at `deadline_s`."""

    node_id: str
    deadline_s: float


class Bill(Protocol):
    """The machines of a cluster, with their prices and billed times."""

    def machines(self) -> tuple[Machine, ...]:
        """Returns every machine of this cluster, ended ones included."""


class Provider(Bill, Protocol):
    """A source of nodes. Calls may be repeated after a crash: the same node id never buys twice.

    A subclass must have `launch`, `terminate` and `machines`. By default it has no notices, no prices of its own and no
    problems, and `watch` and `close` do nothing.
    """

    def launch(self, node: Node, node_type: NodeType) -> None:
        """Buys the machine, unless it was bought before. Raises ProviderError if the pool has no machine: the node is
        then cancelled. After any other error the call is repeated.
        """

    def terminate(self, node_id: str) -> None:
        """Terminates the machine; does nothing if it has ended or was never bought."""

    def notices(self) -> tuple[Notice, ...]:
        """Returns the notices of machines that still run."""
        return ()

    def prices(self) -> Mapping[tuple[str, str], int]:
        """Returns present prices by node type and zone, in micro-dollars an hour; where one is missing, the configured
        price holds.
        """
        return {}

    def problems(self) -> tuple[str, ...]:
        """Returns problems of this source as sentences for the operator; they hold up no decision."""
        return ()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change`, from any thread, as soon as a machine ends or gets a notice."""

    def close(self) -> None:
        """Stops watching. Machines keep running."""
