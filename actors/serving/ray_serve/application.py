"""An endpoint as Ray Serve's controller tells of it: which replicas it has, and whether Serve gave it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DEPLOYMENT", "SPANNING", "Application"]

DEPLOYMENT = "replica"
"""The name of the one deployment in each endpoint's Serve application..."""
SPANNING = "spanning-replica"
"""... and when its replicas have several members: Serve's details say nothing else of their placement groups."""

_STAYING = frozenset({"STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION"})
_READY = frozenset({"RUNNING", "PENDING_MIGRATION"})


@dataclass(frozen=True, slots=True)
class Application:
    """Plain data: nothing here asks Serve."""

    ready: int = 0
    replica_nodes: tuple[str, ...] = ()
    """Ray's id of each replica's node, those that still start included, those that are on their way out not; of one
    with several members, of each of them."""
    moving: tuple[str, ...] = ()
    """Of these, the nodes of replicas with several members that Serve moves elsewhere, since the first one's drains."""
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
        moving: list[str] = []
        for name, deployment in details["deployments"].items():
            is_gang = name == SPANNING
            for replica in deployment["replicas"]:
                if replica["state"] in _STAYING:
                    node = _node(replica, node_of)
                    on = nodes_of_group(replica["actor_name"]) if is_gang else (node,)
                    nodes += on
                    moving += on if is_gang and replica["state"] == "PENDING_MIGRATION" else ()
                    ready += [(replica, node)] if replica["state"] in _READY else []
        return cls(
            ready=len(ready),
            replica_nodes=tuple(sorted(node for node in nodes if node)),
            moving=tuple(sorted(moving)),
            ready_on={str(replica.get("replica_id")): node for replica, node in ready if node},
            failure=_failure(details) if details.get("status") == "DEPLOY_FAILED" else "",
        )


def _node(replica: Mapping[str, Any], node_of: Callable[[str], str]) -> str:
    return str(replica.get("node_id") or "") or node_of(replica["actor_name"])


def _failure(details: Mapping[str, Any]) -> str:
    said = [str(deployment.get("message", "")) for deployment in details["deployments"].values()]
    return "\n".join(filter(None, [str(details.get("message", "")), *said])) or str(details["status"])
