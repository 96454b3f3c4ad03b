"""The interface of node providers. Calls are idempotent. Each machine carries its node id, and raytide finds the
machine's record by this id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from raytide.core.objects.node import Node, NodeType


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as its provider reports it, under raytide's node id. The time [started_at_s, ended_at_s) is billed."""

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
    """A notice that the provider will reclaim this machine at `deadline_s`, on the wall clock."""

    node_id: str
    deadline_s: float


class Bill(Protocol):
    """The machines of a cluster, with their prices and billed times."""

    def machines(self) -> tuple[Machine, ...]:
        """Returns every machine of this cluster, ended ones included."""


class Provider(Bill, Protocol):
    """A source of nodes. Calls may be repeated after a crash: repeated launches of one node id buy only one machine.

    A subclass must implement `launch`, `terminate` and `machines`. By default, `notices`, `prices` and `problems`
    return empty results, and `watch` and `close` do nothing.
    """

    def launch(self, node: Node, node_type: NodeType) -> None:
        """Buys the machine, unless it was bought before.

        Raises ProviderError if the pool has no machine. The caller then cancels the node. After any other error the
        caller repeats the call.
        """

    def terminate(self, node_id: str) -> None:
        """Terminates the machine. Does nothing if the machine has ended or was never bought."""

    def notices(self) -> tuple[Notice, ...]:
        """Returns the notices of machines that still run."""
        return ()

    def prices(self) -> Mapping[tuple[str, str], int]:
        """Returns present prices by node type and zone, in micro-dollars an hour. A node type in a zone without an
        entry has its configured price.
        """
        return {}

    def problems(self) -> tuple[str, ...]:
        """Returns the provider's problems, as sentences for the operator. Problems do not block decisions."""
        return ()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Makes the provider call `on_change` each time a machine ends or the provider announces that it will reclaim a
        machine. The call may come from any thread.
        """

    def close(self) -> None:
        """Stops watching. Machines keep running."""
