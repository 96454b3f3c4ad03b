"""The provider interface: idempotent, and reconcilable by the node id that every machine carries as a tag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from raytide.core.objects.node import Node, NodeType


@dataclass(frozen=True, slots=True)
class Machine:
    """What the provider knows of one node, under raytide's own id. It bills [started_at_s, ended_at_s)."""

    node_id: str
    node_type: str
    zone: str
    price_micro_usd_h: int
    """Now."""
    started_at_s: float
    ended_at_s: float | None = None
    address: str = ""
    ray_id: str = ""
    """What Ray calls it, where that is not raytide's id: KubeRay starts each pod's raylet under the pod's name."""
    meter: str = ""
    """`host:port` of an exporter of its own physical use; empty where Ray's agent speaks for the machine."""
    reason: str = ""
    """Why it ended: "terminated", "reclaimed", "exited with 1"."""
    earlier: tuple[tuple[float, int], ...] = ()
    """Until when which other price held, the first one first."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The provider will take this machine back at `deadline_s`."""

    node_id: str
    deadline_s: float


class Bill(Protocol):
    """What the machines of a cluster cost."""

    def machines(self) -> tuple[Machine, ...]:
        """Every machine of this cluster, ended ones included."""


class Provider(Bill, Protocol):
    """A source of nodes. Calls may be repeated after a crash: the same node id never buys twice."""

    def launch(self, node: Node, node_type: NodeType) -> None:
        """Buy the machine, or return at once when it was bought before. ProviderError when the pool has none: the
        node is given up. After any other error it is asked again."""

    def terminate(self, node_id: str) -> None:
        """End it; nothing happens when it is gone or was never bought."""

    def notices(self) -> tuple[Notice, ...]:
        """Machines that the provider announced it will take back and that still run."""

    def prices(self) -> Mapping[tuple[str, str], int]:
        """Present prices by node type and zone, micro-dollars an hour; of those left out the configured one holds."""

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change`, from any thread, as soon as a machine ends or gets a notice."""

    def close(self) -> None:
        """Stop watching. Machines go on."""
