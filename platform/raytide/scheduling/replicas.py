"""The replicas of endpoints: their shapes, their loads, and how many of them still need a node."""

from __future__ import annotations

from raytide.core.objects.endpoint import EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import FRESH_S, NodeState
from raytide.core.objects.snapshot import Demand, EndpointView, Snapshot, Throughputs

REPLICA_LABEL = "raytide.io/replica-of"
"""The label key that each replica's label selector negates. Every node matches the selector, and Ray's queue shows the
endpoint in it.
"""

SERVING_STATES = frozenset({EndpointState.DEPLOYING, EndpointState.RUNNING})


def is_fresh(load: EndpointLoad | None, now_s: float) -> bool:
    return load is not None and now_s - load.at_s <= FRESH_S


def silent_replicas(load: EndpointLoad, now_s: float) -> int:
    """Returns the number of ready replicas that have not reported recently."""
    return max(0, load.ready - sum(now_s - replica.at_s <= FRESH_S for replica in load.replicas))


def replica_selector(spec: ServeSpec) -> dict[str, str]:
    """Returns the label selector of the endpoint's replica actors."""
    return {**spec.labels, REPLICA_LABEL: _mark(spec.name)}


def replica_shape(view: EndpointView) -> Shape:
    """Returns the shape of one member of a replica."""
    spec = view.endpoint.spec
    return Shape(resources=spec.resources, labels=spec.labels, inputs=spec.inputs)


def replica_throughputs(view: EndpointView) -> Throughputs:
    """Returns the relative throughput of the endpoint's replicas on each node type, as far as it is known."""
    traffic = view.load.traffic if view.load is not None else None
    return traffic.paces if traffic is not None else {}


def published_members(view: EndpointView) -> int:
    """Returns the endpoint's target number of replicas, multiplied by the number of members of a replica."""
    return view.endpoint.target_replicas * view.endpoint.spec.members


def departing_nodes(snapshot: Snapshot) -> frozenset[str]:
    """Returns Ray's ids of the nodes that are draining or terminating. Replicas leave these nodes."""
    gone = (NodeState.DRAINING, NodeState.TERMINATING)
    return frozenset(view.node.ray_node_id for view in snapshot.nodes if view.node.state in gone) - {""}


def released_nodes(snapshot: Snapshot) -> frozenset[str]:
    """Returns Ray's ids of the nodes that endpoints give up in this decision. Replicas leave these nodes."""
    given_up = {node_id for view in snapshot.endpoints for node_id in view.given_up}
    return frozenset(view.node.ray_node_id for view in snapshot.nodes if view.node.id in given_up) - {""}


def missing_replicas(view: EndpointView, snapshot: Snapshot, leaving: frozenset[str]) -> int:
    """Returns the number of replica members for which the endpoint still needs nodes.

    Members on draining nodes are included, because Ray Serve moves a replica with all its members. If there is no
    fresh report, only members that Ray itself cannot place are counted. A restarted controller thus does not buy
    nodes for replicas that already run.
    """
    if view.endpoint.state not in SERVING_STATES:
        return 0
    placed = _staying(view.load, leaving) if view.load else 0
    missing = max(0, published_members(view) - placed)
    if is_fresh(view.load, snapshot.at_s):
        return missing
    return min(missing, sum(d.count for d in snapshot.demand if is_replica_of(d, view.endpoint.name)))


def is_overloaded(view: EndpointView, now_s: float) -> bool:
    """Returns True if the endpoint's load is above the target of its ready replicas."""
    load, spec = view.load, view.endpoint.spec.replicas
    if load is None or not is_fresh(load, now_s):
        return False
    ttft_s = load.traffic.ttft_s if load.traffic is not None else None
    is_slow = spec.slo_ttft_s is not None and ttft_s is not None and ttft_s > spec.slo_ttft_s
    waits = any(replica.waiting > 0 for replica in load.replicas)
    return is_slow or waits or load.ongoing > load.ready * spec.target_ongoing


def is_replica_of(demand: Demand, endpoint: str) -> bool:
    """Returns True if the demand is for a replica of this endpoint."""
    return demand.labels.get(REPLICA_LABEL) == _mark(endpoint)


def is_replica(demand: Demand) -> bool:
    return REPLICA_LABEL in demand.labels


def _staying(load: EndpointLoad, leaving: frozenset[str]) -> int:
    hosts, moving = (sum(node not in leaving for node in nodes) for nodes in (load.replica_nodes, load.moving))
    return hosts - moving


def _mark(endpoint: str) -> str:
    """Returns the endpoint's name as a label value, which must end in a letter or digit."""
    return "!" + endpoint.replace("~", ".R").rstrip("._-")
