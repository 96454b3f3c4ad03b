"""How many replicas of an endpoint still wait for a node: promises that the fleet has made and not kept yet."""

from __future__ import annotations

from raytide.core.endpoint import EndpointLoad, EndpointState
from raytide.core.fleet import NodeState
from raytide.core.gang import Shape
from raytide.core.snapshot import Demand, EndpointView, Snapshot

FRESH_S = 10.0
"""Older words from replicas and router are not believed when they would take something away."""

SERVING_STATES = frozenset({EndpointState.DEPLOYING, EndpointState.RUNNING})


def is_fresh(load: EndpointLoad | None, now_s: float) -> bool:
    return load is not None and now_s - load.at_s <= FRESH_S


def replica_shape(view: EndpointView) -> Shape:
    """One replica, as the gang of one that the fleet has to find room for."""
    return Shape(resources=view.endpoint.spec.resources, labels=view.endpoint.spec.labels)


def missing_replicas(view: EndpointView, snapshot: Snapshot) -> int:
    """Published replicas without a node to stay on; those on draining nodes count as missing, Serve moves them.

    Without fresh word from the endpoint only what Ray itself says it cannot place counts, so that a restarted controller
    does not buy for replicas that run.
    """
    if view.endpoint.state not in SERVING_STATES:
        return 0
    leaving = {
        n.node.ray_node_id for n in snapshot.nodes if n.node.state in (NodeState.DRAINING, NodeState.TERMINATING)
    } - {""}
    seated = sum(node not in leaving for node in view.load.replica_nodes) if view.load else 0
    missing = max(0, view.endpoint.target_replicas - seated)
    if is_fresh(view.load, snapshot.at_s):
        return missing
    return min(missing, sum(d.count for d in snapshot.demand if is_replica_of(d, view)))


def is_replica_of(demand: Demand, view: EndpointView) -> bool:
    """Whether work that Ray cannot place looks like a replica of this endpoint; Ray does not say whose it is."""
    wanted = {name: amount for name, amount in view.endpoint.spec.resources.items() if amount}
    return dict(demand.resources) == wanted and dict(demand.labels) == view.endpoint.spec.labels
