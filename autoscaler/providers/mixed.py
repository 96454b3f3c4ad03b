"""Several providers in one cluster: each node type is bought at one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raytide.autoscaler.providers.base import Bill, Machine, Notice, Provider
from raytide.autoscaler.providers.purchases import in_order
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeType

__all__ = ["MixedBill", "MixedProvider"]

log = logger(__name__)


class MixedBill:
    """The machines of several providers."""

    def __init__(self, bills: Mapping[str, Bill]) -> None:
        self._bills = dict(bills)

    def machines(self) -> tuple[Machine, ...]:
        return in_order(machine for bill in self._bills.values() for machine in bill.machines())


class MixedProvider:
    """Providers by name, and the name of each node type's, so that a failure of one does not stop the others: while a
    provider does not answer, its machines are those of its last answer, and only calls for its own nodes fail."""

    def __init__(self, providers: Mapping[str, Provider], node_types: Mapping[str, str]) -> None:
        self._providers, self._node_types = dict(providers), dict(node_types)
        self._last: dict[str, tuple[Machine, ...]] = {}
        self._failures: dict[str, str] = {}

    def launch(self, node: Node, node_type: NodeType) -> None:
        self._providers[self._node_types[node_type.name]].launch(node, node_type)

    def terminate(self, node_id: str) -> None:
        """Asks the provider that lists the node; all of them if none does."""
        listed = [name for name, machines in self._last.items() if any(each.node_id == node_id for each in machines)]
        for name in listed or self._providers:
            self._providers[name].terminate(node_id)

    def machines(self) -> tuple[Machine, ...]:
        for name, provider in self._providers.items():
            try:
                self._last[name] = provider.machines()
            except Exception as error:  # each cloud's library has its own errors
                if name not in self._last:
                    raise
                self._fail(name, error)
            else:
                self._failures.pop(name, None)
        return in_order(machine for machines in self._last.values() for machine in machines)

    def notices(self) -> tuple[Notice, ...]:
        found: list[Notice] = []
        for name, provider in self._providers.items():
            try:
                found += provider.notices()
            except Exception as error:  # the notices of the others count
                self._fail(name, error)
        return tuple(found)

    def prices(self) -> Mapping[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for name, provider in self._providers.items():
            try:
                found |= provider.prices()
            except Exception as error:  # the configured prices hold
                self._fail(name, error)
        return found

    def problems(self) -> tuple[str, ...]:
        silent = (f"provider {name}: {error}" for name, error in self._failures.items())
        return (*silent, *(text for provider in self._providers.values() for text in provider.problems()))

    def watch(self, on_change: Callable[[], None]) -> None:
        for provider in self._providers.values():
            provider.watch(on_change)

    def close(self) -> None:
        for provider in self._providers.values():
            provider.close()

    def _fail(self, name: str, error: Exception) -> None:
        log.warning("source failed", extra={"source": f"provider {name}", "error": str(error)})
        self._failures[name] = str(error)
