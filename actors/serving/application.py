"""An endpoint as Ray Serve's controller tells of it: which replicas it has, and whether Serve gave it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Application"]

_STAYING = frozenset({"STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION"})
_READY = frozenset({"RUNNING", "PENDING_MIGRATION"})


@dataclass(frozen=True, slots=True)
class Application:
    """Plain data: nothing here asks Serve."""

    ready: int = 0
    replica_nodes: tuple[str, ...] = ()
    """Ray's id of each replica's node, those that still start included, those that are on their way out not."""
    ready_on: Mapping[str, str] = field(default_factory=dict)
    """The same of those that are ready, by the replica's id."""
    failure: str = ""
    """Why Serve gave it up, in Serve's words; empty while it has not: an UNHEALTHY one it still mends."""

    @classmethod
    def of(cls, details: Mapping[str, Any], node_of: Callable[[str], str]) -> Application:
        """From one entry of `get_serve_instance_details()["applications"]`.

        `node_of` finds the node of an actor by its name: Serve says nothing of a replica's node until it is up.
        """
        replicas = [
            (replica, _node(replica, node_of))
            for deployment in details["deployments"].values()
            for replica in deployment["replicas"]
            if replica["state"] in _STAYING
        ]
        ready = [(replica, node) for replica, node in replicas if replica["state"] in _READY]
        return cls(
            ready=len(ready),
            replica_nodes=tuple(sorted(node for _, node in replicas if node)),
            ready_on={str(replica.get("replica_id")): node for replica, node in ready if node},
            failure=_failure(details) if details.get("status") == "DEPLOY_FAILED" else "",
        )


def _node(replica: Mapping[str, Any], node_of: Callable[[str], str]) -> str:
    return str(replica.get("node_id") or "") or node_of(replica["actor_name"])


def _failure(details: Mapping[str, Any]) -> str:
    said = [str(deployment.get("message", "")) for deployment in details["deployments"].values()]
    return "\n".join(filter(None, [str(details.get("message", "")), *said])) or str(details["status"])
