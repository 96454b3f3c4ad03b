"""What jobs hold and would hold, in resources, in quota and in dollars: the sums that the floor works with. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources, dominant_share, plus
from raytide.core.objects.snapshot import EndpointView, Snapshot
from raytide.scheduling.replicas import SERVING_STATES, published_members, replica_shape
from raytide.scheduling.state import Placements


def retained_members(lease: Lease) -> tuple[Member, ...]:
    """Seats that are its own and do not give way: first what it works with, last what waits for a node.

    Who waits for a node holds quota and the room that was promised to it, and loses nothing by giving way.
    """
    there = [member for member in lease.members if not (member.is_parked or member.is_yielding)]
    return tuple(sorted(there, key=lambda member: _KEPT.index(member.state)))


_KEPT = (MemberState.READY, MemberState.LEAVING, MemberState.FORMING, MemberState.ASSIGNED, MemberState.WAITING)


def node_types_by_id(snapshot: Snapshot) -> dict[str, NodeType]:
    """The type of each node that is there."""
    types = {node_type.name: node_type for node_type in snapshot.node_types}
    return {view.node.id: types[view.node.type] for view in snapshot.nodes if view.node.type in types}


def quota_usage(shape: Shape, types: Iterable[NodeType | None]) -> Resources:
    """What one member on each of these types counts: its resources, and its GPUs by the name of the accelerator."""
    total: Resources = {}
    for node_type in types:
        model = node_type.labels.get(ACCELERATOR_LABEL, "") if node_type else shape.labels.get(ACCELERATOR_LABEL, "")
        named = {model: shape.resources["GPU"]} if model and shape.resources.get("GPU") else {}
        total = plus(total, {**shape.resources, **named}) if total else {**shape.resources, **named}
    return total


def lease_quota(lease: Lease, types: Mapping[str, NodeType]) -> Resources:
    """Seats that are promised count like those that are held; given away ones do not."""
    return quota_usage(lease.shape, [types.get(member.node_id) for member in retained_members(lease)])


def least_quota(shape: Shape) -> Resources:
    """What the least that a gang can do with counts, wherever it sits."""
    return {name: amount * shape.at_least for name, amount in quota_usage(shape, [None]).items()}


def node_types_by_ray_id(snapshot: Snapshot) -> dict[str, NodeType]:
    """The type of each node by Ray's id of it."""
    types = {node_type.name: node_type for node_type in snapshot.node_types}
    return {view.node.ray_node_id: types[view.node.type] for view in snapshot.nodes if view.node.type in types}


def replica_quota(view: EndpointView, types: Mapping[str, NodeType]) -> Resources:
    """An endpoint's replicas count against its team, those too that still wait for a node. `types`: of hosts."""
    if view.endpoint.state not in SERVING_STATES:
        return {}
    hosts = view.load.replica_nodes if view.load else ()
    missing = max(0, published_members(view) - len(hosts))
    return quota_usage(replica_shape(view), [*(types.get(host) for host in hosts), *[None] * missing])


def price_per_hour(shape: Shape, types: Iterable[NodeType]) -> float:
    """Micro-dollars an hour of one member on each of these types, by its share of the dominant resource."""
    return sum(
        node_type.price_micro_usd_h * dominant_share(shape.resources, node_type.resources) for node_type in types
    )


def placed_types(placed: Placements, node_types: Sequence[NodeType]) -> list[NodeType]:
    types = {node_type.name: node_type for node_type in node_types}
    return [types[seat.node_type] for seat in placed if seat.node_type in types]


def fleet_capacity(node_types: Iterable[NodeType]) -> Resources:
    """What the whole fleet could hold, accelerators also by name."""
    total: Resources = {}
    for t in node_types:
        model = t.labels.get(ACCELERATOR_LABEL, "")
        named = {model: t.resources["GPU"]} if model and t.resources.get("GPU") else {}
        total = plus(total, {name: amount * t.max_nodes for name, amount in {**t.resources, **named}.items()})
    return total
