"""A simulated cloud on a virtual clock, with launch delays, empty pools, notices, reclaims and prices. It is meant for
raytide's own tests and for tests that users write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.core.clock import Clock
from raytide.core.errors import ProviderError
from raytide.core.objects.node import Node, NodeType


class FakeProvider(Provider):
    """A provider whose machines exist only in memory, for tests and simulations.

    A machine is billed from the launch call. It can join Ray `launch_delay_s` later (see `is_up`).
    """

    def __init__(self, clock: Clock, *, launch_delay_s: float = 5.0) -> None:
        self._clock = clock
        self._launch_delay_s = launch_delay_s
        self._machines: dict[str, Machine] = {}
        self._notices: dict[str, Notice] = {}
        self._stock: dict[tuple[str, str], int] = {}
        self._prices: dict[tuple[str, str], int] = {}
        self._watchers: list[Callable[[], None]] = []

    def launch(self, node: Node, node_type: NodeType) -> None:
        if node.id in self._machines:
            return
        pool = (node.type, node.zone)
        running = sum((m.node_type, m.zone) == pool and m.ended_at_s is None for m in self.machines())
        if running >= self._stock.get(pool, running + 1):
            raise ProviderError(f"{node.zone} has no {node.type} left.", hint="Another zone may have some.")
        price = self._prices.get(pool, node_type.price_in(node.zone))
        self._machines[node.id] = Machine(node.id, node.type, node.zone, price, self._clock.now_s())

    def adopt(self, machine: Machine) -> None:
        """Adds a machine that ran before this provider was created."""
        self._machines[machine.node_id] = machine

    def terminate(self, node_id: str) -> None:
        self._end(node_id, self._clock.now_s(), "terminated")

    def machines(self) -> tuple[Machine, ...]:
        for notice in tuple(self._notices.values()):
            if notice.deadline_s <= self._clock.now_s():
                self._end(notice.node_id, notice.deadline_s, "reclaimed")
        return tuple(self._machines.values())

    def notices(self) -> tuple[Notice, ...]:
        running = {machine.node_id for machine in self.machines() if machine.ended_at_s is None}
        return tuple(notice for notice in self._notices.values() if notice.node_id in running)

    def prices(self) -> Mapping[tuple[str, str], int]:
        return dict(self._prices)

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def close(self) -> None:
        self._watchers.clear()

    def is_up(self, node_id: str) -> bool:
        """Returns whether the machine runs and has had time to join Ray."""
        machine = next((m for m in self.machines() if m.node_id == node_id), None)
        if machine is None or machine.ended_at_s is not None:
            return False
        return self._clock.now_s() >= machine.started_at_s + self._launch_delay_s

    def set_stock(self, node_type: str, zone: str, nodes: int | None) -> None:
        """Limits how many machines of a pool may run at once. None removes the limit. Machines that already run are not
        ended.
        """
        if nodes is None:
            self._stock.pop((node_type, zone), None)
        else:
            self._stock[(node_type, zone)] = nodes

    def set_price(self, node_type: str, zone: str, price_micro_usd_h: int) -> None:
        """Sets the price of later launches in a pool."""
        self._prices[(node_type, zone)] = price_micro_usd_h

    def give_notice(self, node_id: str, notice_s: float) -> None:
        """Announces that the machine will be reclaimed in `notice_s` seconds."""
        self._notices[node_id] = Notice(node_id, self._clock.now_s() + notice_s)
        self._tell()

    def reclaim(self, node_id: str) -> None:
        """Reclaims the machine at once, without a notice."""
        self._end(node_id, self._clock.now_s(), "reclaimed")

    def _end(self, node_id: str, at_s: float, reason: str) -> None:
        machine = self._machines.get(node_id)
        self._notices.pop(node_id, None)
        if machine is not None and machine.ended_at_s is None:
            self._machines[node_id] = replace(machine, ended_at_s=at_s, reason=reason)
            self._tell()

    def _tell(self) -> None:
        for on_change in self._watchers:
            on_change()
