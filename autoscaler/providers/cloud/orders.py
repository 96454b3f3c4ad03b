"""Tracks orders of machines at Google Cloud, which answers up to minutes later. Ray would wait for the answer, and
block the controller's tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from raytide.autoscaler.providers.cloud.pages import change_clients
from raytide.core.errors import ProviderError
from raytide.core.objects.node import Node


@dataclass(frozen=True, slots=True)
class GoogleOrder:
    """A purchase that Google has accepted. `operations` maps each machine's name to Google's operation."""

    node: Node
    operations: Mapping[str, Any]

    def outcome(self, cloud: Any) -> Literal["made"] | ProviderError | None:
        """Asks Google for the state of the order. Returns an error if the machine could not be made, and None while it
        is being made.
        """
        for name, operation in self.operations.items():
            resource = cloud._get_resource_depending_on_node_name(name)
            try:
                now = resource.wait_for_operation(operation, max_polls=1, poll_interval=0)
            except Exception as error:
                if type(error) is not Exception:  # Ray raises exactly this class for a failed operation
                    raise
                what = f"the {self.node.type} in {self.node.zone}"
                return ProviderError(f"gcp could not make {what} that it sold: {error}")
            if now.get("status") != "DONE" and "response" not in now:
                return None
        return "made"


def without_waits(cloud: Any, kind: str) -> Any:
    """Makes Ray's NodeProvider `cloud` return from a purchase or termination before Google has carried it out, and lets
    it list machines while it waits for label changes. Returns the NodeProvider.
    """
    if kind == "gcp":
        change_clients(cloud, _do_not_wait)
    return cloud


def _do_not_wait(cloud: Any) -> None:
    for resource in cloud.resources.values():
        resource.create_instances = partial(resource.create_instances, wait_for_operation=False)
        resource.delete_instance = partial(resource.delete_instance, wait_for_operation=False)
        resource.wait_for_operation = partial(_wait_unlocked, cloud.lock, resource.wait_for_operation)


def _wait_unlocked(lock: Any, wait: Callable[..., Any], operation: Any, **how: Any) -> Any:
    """Waits for the operation without the NodeProvider's lock, which this thread may hold several times."""
    if not lock._is_owned():
        return wait(operation, **how)
    state = lock._release_save()  # as threading.Condition does
    try:
        return wait(operation, **how)
    finally:
        lock._acquire_restore(state)
