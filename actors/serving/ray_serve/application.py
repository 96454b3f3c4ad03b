"""An endpoint's state in Ray Serve: its replicas, and the error if its deployment failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEPLOYMENT = "replica"
"""The name of the one deployment in each endpoint's Serve application."""
SPANNING = "spanning-replica"
"""The deployment's name if replicas have several members. Nothing else in Serve's details shows that they do."""

_STAYING = frozenset({"STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION"})
_READY = frozenset({"RUNNING", "PENDING_MIGRATION"})


@dataclass(frozen=True, slots=True)
class Application:
    """The state of an endpoint's Serve application, as Serve last reported it.

    It is plain data. Its methods do not call Serve.
    """

    ready: int = 0
    replica_nodes: tuple[str, ...] = ()
    """Ray's node id of each replica, starting ones included, stopping ones excluded; for replicas with several members,
    that of each member.
    """
    moving: tuple[str, ...] = ()
    """The nodes of multi-member replicas that Serve moves elsewhere because the first member's node drains."""
    ready_on: Mapping[str, str] = field(default_factory=dict)
    """The node of each ready replica, by the replica's id."""
    replica_ids: frozenset[str] = frozenset()
    """All replicas that Serve knows, in any state."""
    ordered_at_s: Mapping[str, float] = field(default_factory=dict)
    """The time at which Serve ordered each replica that does not stop."""
    stopping_ids: frozenset[str] = frozenset()
    """The ids of replicas that accept no further requests."""
    failure: str = ""
    """Serve's message if the deployment failed, else empty. UNHEALTHY is no failure, because Serve repairs it."""

    @classmethod
    def of(
        cls,
        details: Mapping[str, Any],
        node_of: Callable[[str], str],
        nodes_of_group: Callable[[str], tuple[str, ...]] = lambda name: (),
    ) -> Application:
        """Reads one entry of `get_serve_instance_details()["applications"]`.

        `node_of` takes an actor's name and returns the actor's node. It is needed because Serve reports a replica's
        node only once the replica is up. `nodes_of_group` takes the name of a replica's placement group and returns
        the nodes of the group. The group has the same name as the replica's actor.
        """
        ready: list[tuple[Mapping[str, Any], str]] = []
        nodes: list[str] = []
        moving: list[str] = []
        for name, deployment in details["deployments"].items():
            is_gang = name == SPANNING
            for replica in deployment["replicas"]:
                if replica["state"] in _STAYING:
                    node = str(replica.get("node_id") or "") or node_of(replica["actor_name"])
                    on = nodes_of_group(replica["actor_name"]) if is_gang else (node,)
                    nodes += on
                    moving += on if is_gang and replica["state"] == "PENDING_MIGRATION" else ()
                    ready += [(replica, node)] if replica["state"] in _READY else []
        replicas = [replica for deployment in details["deployments"].values() for replica in deployment["replicas"]]
        states = {str(replica.get("replica_id")): replica["state"] for replica in replicas}
        return cls(
            ready=len(ready),
            replica_nodes=tuple(sorted(node for node in nodes if node)),
            moving=tuple(sorted(moving)),
            ready_on={str(replica.get("replica_id")): node for replica, node in ready if node},
            ordered_at_s={
                str(replica["replica_id"]): float(replica["start_time_s"])
                for replica in replicas
                if replica["state"] in _STAYING and "start_time_s" in replica
            },
            replica_ids=frozenset(states),
            stopping_ids=frozenset(name for name, state in states.items() if state not in _STAYING),
            failure=_failure(details) if details.get("status") == "DEPLOY_FAILED" else "",
        )


def _failure(details: Mapping[str, Any]) -> str:
    said = [str(deployment.get("message", "")) for deployment in details["deployments"].values()]
    return "\n".join(filter(None, [str(details.get("message", "")), *said])) or str(details["status"])
