"""Several providers in one cluster. Nodes of one type are all bought from the same provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from raytide.autoscaler.providers.base import Bill, Machine, Notice, Provider
from raytide.autoscaler.providers.purchases import in_order
from raytide.autoscaler.providers.source import ProviderSource
from raytide.core.errors import ProviderError
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeType

log = logger(__name__)

T = TypeVar("T")


class MixedBill:
    """The machines of several providers, as one bill."""

    def __init__(self, bills: Mapping[str, Bill]) -> None:
        self._bills = dict(bills)

    def machines(self) -> tuple[Machine, ...]:
        return in_order(machine for bill in self._bills.values() for machine in bill.machines())


class MixedProvider:
    """Several providers behind the interface of one. A failure of one provider does not stop the others.

    If a provider does not answer, the machines of its last answer are used. If it has never answered, the recorded
    machines are used. Only calls for that provider's nodes fail. `node_types` maps each node type to the name of its
    provider.
    """

    def __init__(
        self, sources: Iterable[ProviderSource], node_types: Mapping[str, str], *, began_s: float = 0.0
    ) -> None:
        """`began_s`: the time at which this process began; nodes requested earlier may have been bought by an earlier
        process.
        """
        self._sources = {source.name: source for source in sources}
        self._node_types, self._began_s = dict(node_types), began_s
        self._silent: dict[str, str] = {}
        """Errors of the providers that did not list their machines the last time."""
        self._failures: dict[str, str] = {}
        """Errors of other calls since then, by provider, for the providers that did list their machines."""
        self._in_doubt: set[str] = set()
        """Nodes that may have been bought, because a launch was tried and not refused, and that are not listed yet."""

    def launch(self, node: Node, node_type: NodeType) -> None:
        """Buys the node's machine.

        If the provider of this node type does not answer, raises ProviderError as if the pool were empty, so that
        other pools are tried. However, if an earlier call may already have bought the machine, the request is sent
        to the same provider again.
        """
        source = self._sources[self._node_types[node_type.name]]
        silence = self._silent.get(source.name)
        is_new = source.has_answered or node.requested_at_s >= self._began_s
        if silence is not None and is_new and node.id not in self._in_doubt:
            raise ProviderError(f"provider {source.name}: {silence}", hint="Its pools are tried again later.")
        self._in_doubt.add(node.id)
        try:
            source.launch(node, node_type)
        except ProviderError:
            self._in_doubt.discard(node.id)
            raise

    def terminate(self, node_id: str) -> None:
        """Terminates the node at the provider that lists it. If no provider lists the node, sends the request to all
        providers.
        """
        listed = [
            source
            for source in self._sources.values()
            if any(machine.node_id == node_id for machine in source.last() or ())
        ]
        failed: Exception | None = None
        for source in listed or self._sources.values():
            try:
                source.ask(f"end {node_id}", lambda provider: provider.terminate(node_id))
            except Exception as error:  # the others are asked too
                failed = failed or error
        self._in_doubt.discard(node_id)
        if failed is not None:
            raise failed

    def machines(self) -> tuple[Machine, ...]:
        found: list[Machine] = []
        self._failures.clear()
        for name, source in self._sources.items():
            try:
                found += source.machines()
            except Exception as error:  # each cloud's library has its own errors
                last = source.last()
                if last is None:
                    raise
                if not source.is_buying:
                    self._silent[name] = _noted(name, error, self._silent.get(name))
                found += last
            else:
                self._silent.pop(name, None)
        self._in_doubt.difference_update(machine.node_id for machine in found)
        return in_order(found)

    def notices(self) -> tuple[Notice, ...]:
        asked = self._ask_all("list its notices", lambda provider: provider.notices())
        return tuple(notice for notices in asked for notice in notices)

    def prices(self) -> Mapping[tuple[str, str], int]:
        asked = self._ask_all("give its prices", lambda provider: provider.prices())
        return {pool: price for prices in asked for pool, price in prices.items()}

    def problems(self) -> tuple[str, ...]:
        asked = self._ask_all("name its problems", lambda provider: provider.problems())
        failed = (f"provider {name}: {error}" for name, error in {**self._failures, **self._silent}.items())
        return (*failed, *(text for problems in asked for text in problems))

    def watch(self, on_change: Callable[[], None]) -> None:
        for source in self._sources.values():
            source.watch(on_change)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _ask_all(self, what: str, call: Callable[[Provider], T]) -> list[T]:
        """Returns the answers of the providers that answer. For the others, callers use configured or
        earlier values.
        """
        found = []
        for name, source in self._sources.items():
            if name not in self._silent:
                try:
                    found.append(source.ask(what, call))
                except Exception as error:  # each cloud's library has its own errors
                    self._failures[name] = _noted(name, error, None)
        return found


def _noted(name: str, error: Exception, before: str | None) -> str:
    """Returns the error's text, which is logged unless it is that of the call before: each tick makes the call."""
    if str(error) != before:
        log.warning("source failed", extra={"source": f"provider {name}", "error": str(error)})
    return str(error)
