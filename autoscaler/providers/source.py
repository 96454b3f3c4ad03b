"""Wraps one of several providers. The provider is created at the first call.

Each call has a timeout, so that a hanging provider does not stop the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raytide.autoscaler.providers.base import Bill, Machine, Provider
from raytide.core.errors import ClusterError
from raytide.core.objects.node import Node, NodeType

ANSWER_S = 20.0
"""The time that a call may take. A call that takes longer continues, and no other begins before its end."""
PURCHASE_S = 300.0
"""The time that a purchase may take before its provider counts as silent: some clouds answer when the machine runs."""
_RECONNECT_S, _MOST_RECONNECT_S = 1.0, 60.0
"""The seconds between two attempts to connect to a provider double from the first of these to the second, because an
attempt sends many requests to a cloud, and each tick would make one."""
_SILENT_S = 1.0
"""The time that a tick waits for a provider whose last call took too long. The usual limit holds again once a call has
succeeded.
"""

T = TypeVar("T")


class ProviderSource:
    """A provider that may fail to answer.

    `make` connects to the provider. It is called again, after growing pauses, until it succeeds. `recorded` supplies
    the stored records of the provider's machines. These records are used until the provider first answers this
    process.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Provider],
        recorded: Bill | None = None,
        *,
        answer_s: float = ANSWER_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._monotonic_s = monotonic_s
        self._make, self._recorded, self._answer_s = make, recorded, answer_s
        self._provider: Provider | None = None
        self._refusal: Exception | SystemExit | None = None
        """The error of the last attempt to connect."""
        self._reconnect_at_s, self._reconnect_in_s = 0.0, _RECONNECT_S
        self._slow: tuple[str, threading.Thread] | None = None
        self._patience_s = answer_s
        self._buying_until_s = 0.0
        self._last: tuple[Machine, ...] | None = None
        self._on_change: Callable[[], None] | None = None

    @property
    def has_answered(self) -> bool:
        """True if the provider has listed its machines since this process began."""
        return self._last is not None

    @property
    def is_buying(self) -> bool:
        """True while a purchase whose call has timed out is still in progress."""
        return self._slow is not None and self._slow[1].is_alive() and self._monotonic_s() < self._buying_until_s

    def launch(self, node: Node, node_type: NodeType) -> None:
        before, began_s = self._slow, self._monotonic_s()
        try:
            self.ask(f"launch {node.id}", lambda provider: provider.launch(node, node_type))
        finally:
            if self._slow is not before:
                self._buying_until_s = began_s + PURCHASE_S

    def ask(self, what: str, call: Callable[[Provider], T]) -> T:
        """Calls the provider and returns its answer. Raises the errors of the call, and ClusterError if the call times
        out, if an earlier call still runs, or if the provider's library exits.
        """
        if self._slow is not None and self._slow[1].is_alive():
            raise ClusterError(
                f"it does not answer: to {self._slow[0]} takes longer than {self._answer_s:g} s.",
                hint="The other providers go on; its machines count as they were last seen.",
            )
        done: list[T] = []
        failed: list[Exception | SystemExit] = []

        def run() -> None:
            try:
                done.append(call(self._connected()))
            except (Exception, SystemExit) as error:  # raised below; Ray's launcher may exit
                failed.append(error)
            else:
                self._patience_s = self._answer_s

        thread = threading.Thread(target=run, name=f"{self.name}: {what}", daemon=True)
        patience_s, self._patience_s = self._patience_s, min(_SILENT_S, self._answer_s)  # until `run` resets it
        thread.start()
        thread.join(patience_s)
        if thread.is_alive():
            self._slow = what, thread
            self._buying_until_s = 0.0
            raise ClusterError(
                f"it does not answer: to {what} takes too long.",
                hint="The other providers go on; its machines count as they were last seen.",
            )
        if failed:
            self._patience_s = patience_s
            error = failed[0]
            raise error if isinstance(error, Exception) else ClusterError(f"could not {what}: {error}") from error
        return done[0]

    def machines(self) -> tuple[Machine, ...]:
        """Returns the provider's machines, and stores them as the provider's last answer."""
        self._last = self.ask("list its machines", lambda provider: provider.machines())
        return self._last

    def last(self) -> tuple[Machine, ...] | None:
        """Returns the machines of the provider's last answer. Before its first answer, returns the recorded machines,
        or None if there are no records.
        """
        if self._last is None and self._recorded is not None:
            return self._recorded.machines()
        return self._last

    def watch(self, on_change: Callable[[], None]) -> None:
        """Makes the provider call `on_change` after changes. If the provider is not connected yet, the calls begin when
        it has connected.
        """
        self._on_change = on_change
        if self._provider is not None:
            self._provider.watch(on_change)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.close()

    def _connected(self) -> Provider:
        if self._provider is None:
            if self._refusal is not None and self._monotonic_s() < self._reconnect_at_s:
                raise self._refusal.with_traceback(None)
            try:
                made = self._make()
            except (Exception, SystemExit) as error:
                self._refusal, self._reconnect_at_s = error, self._monotonic_s() + self._reconnect_in_s
                self._reconnect_in_s = min(2 * self._reconnect_in_s, _MOST_RECONNECT_S)
                raise
            if self._on_change is not None:
                made.watch(self._on_change)
            self._provider = made
        return self._provider
