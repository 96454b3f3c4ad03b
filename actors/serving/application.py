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
    """Ray's id of each replica's node, those that still start included, those that are on their way out not; of one
    with several members, of each of them."""
    ready_on: Mapping[str, str] = field(default_factory=dict)
    """The node of those that are ready, by the replica's id."""
    failure: str = ""
    """Why Serve gave it up, in Serve's words; empty while it has not: an UNHEALTHY one it still mends."""

    @classmethod
    def of(
        cls,
        details: Mapping[str, Any],
        node_of: Callable[[str], str],
        nodes_of_group: Callable[[str], tuple[str, ...]] = lambda name: (),
    ) -> Application:
        """From one entry of `get_serve_instance_details()["applications"]`.

        `node_of` finds the node of an actor by its name: Serve says nothing of a replica's node until it is up.
        `nodes_of_group` finds those of its placement group, which has the same name.
        """
        ready: list[tuple[Mapping[str, Any], str]] = []
        nodes: list[str] = []
        for deployment in details["deployments"].values():
            is_gang = bool((deployment.get("deployment_config") or {}).get("placement_group_bundles"))
            for replica in deployment["replicas"]:
                if replica["state"] in _STAYING:
                    node = _node(replica, node_of)
                    nodes += nodes_of_group(replica["actor_name"]) if is_gang else [node]
                    ready += [(replica, node)] if replica["state"] in _READY else []
        return cls(
            ready=len(ready),
            replica_nodes=tuple(sorted(node for node in nodes if node)),
            ready_on={str(replica.get("replica_id")): node for replica, node in ready if node},
            failure=_failure(details) if details.get("status") == "DEPLOY_FAILED" else "",
        )


def _node(replica: Mapping[str, Any], node_of: Callable[[str], str]) -> str:
    return str(replica.get("node_id") or "") or node_of(replica["actor_name"])


def _failure(details: Mapping[str, Any]) -> str:
    said = [str(deployment.get("message", "")) for deployment in details["deployments"].values()]
    return "\n".join(filter(None, [str(details.get("message", "")), *said])) or str(details["status"])
