"""What raytide uses of Ray that is not Ray's public API, all in one place. Checked against ray 2.60.

A new Ray is checked here. Nothing is imported before it is used. Only serving/policy.py has a private import of its
own: Serve runs it by value, where raytide may not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GcsClient = Any
"""ray._raylet.GcsClient, which is compiled and has no types."""


def gcs_client(address: str) -> GcsClient:
    """A client without a driver's connection. It blocks for 40 s when nobody listens there."""
    from ray import _raylet

    return _raylet.GcsClient(address=address)  # type: ignore[attr-defined]


def connected_gcs() -> GcsClient:
    """This process's own client, after `ray.init`."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.check_connected()
    return worker.gcs_client


def autoscaler_messages() -> Any:
    """Ray's generated protobuf module, whose classes are made at import and have no types."""
    from ray.core.generated import autoscaler_pb2

    return autoscaler_pb2


def label_in_operator() -> int:
    from ray.core.generated import common_pb2

    return int(common_pb2.LabelSelectorOperator.LABEL_OPERATOR_IN)  # type: ignore[attr-defined]


def serve_controller() -> Any:
    """The handle of Serve's controller; ValueError when Serve does not run."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def replica_node(actor_name: str) -> str:
    """Ray's id of the node on which a replica of Serve starts, which Serve itself says only later; empty if nowhere."""
    import ray
    from ray._private import state
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        actor: Any = ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return ""
    address = (state.actors(actor._actor_id.hex()) or {}).get("Address", {})
    return str(address["NodeID"]) if address.get("IPAddress") else ""  # while it waits, its id is the head's


def start_raylet(parameters: Mapping[str, Any]) -> int:
    """Start a node's raylet with these RayParams and return its pid at once; it joins the cluster a few seconds later.

    Two `ray start` in one second pick the same socket name, which it cannot set, and one of them dies.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    node = Node(RayParams(**parameters), head=False, shutdown_at_exit=False, spawn_reaper=True)
    return int(node.all_processes["raylet"][0].process.pid)
