"""The resources, quota and dollars that gangs and replicas use or would use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources, dominant_share, plus
from raytide.core.objects.snapshot import EndpointView
from raytide.scheduling.replicas import SERVING_STATES, published_members, replica_shape
from raytide.scheduling.state import Placements

_RETAINED = (MemberState.READY, MemberState.LEAVING, MemberState.FORMING, MemberState.ASSIGNED, MemberState.WAITING)


def retained_members(lease: Lease) -> tuple[Member, ...]:
    """Returns the lease's members that are neither parked nor yielding, the most useful member first.

    Members that wait for a node are last. They use quota and a reserved slot, but lose no work by yielding.
    """
    members = [member for member in lease.members if not (member.is_parked or member.gives_way)]
    return tuple(sorted(members, key=lambda member: _RETAINED.index(member.state)))


def quota_usage(shape: Shape, types: Iterable[NodeType | None]) -> Resources:
    """Returns the total quota that members on nodes of the given types use. There is one member for each item of
    `types`.

    GPUs count twice: as `GPU`, and under the accelerator's name. A type of None stands for a node that is not chosen
    yet.
    """
    total: Resources = {}
    for node_type in types:
        model = node_type.labels.get(ACCELERATOR_LABEL, "") if node_type else shape.labels.get(ACCELERATOR_LABEL, "")
        named = {model: shape.resources["GPU"]} if model and shape.resources.get("GPU") else {}
        total = plus(total, {**shape.resources, **named}) if total else {**shape.resources, **named}
    return total


def lease_quota(lease: Lease, types: Mapping[str, NodeType]) -> Resources:
    """Returns the quota that the lease's members use. This includes the members that have no node yet, but not parked
    or yielding members.

    `types` maps node ids to node types.
    """
    return quota_usage(lease.shape, [types.get(member.node_id) for member in retained_members(lease)])


def least_quota(shape: Shape) -> Resources:
    """Returns the quota that a gang of minimum size uses, whichever nodes it gets."""
    return {name: amount * shape.at_least for name, amount in quota_usage(shape, [None]).items()}


def replica_quota(view: EndpointView, types: Mapping[str, NodeType]) -> Resources:
    """Returns the quota that the endpoint's replicas use. This includes the replicas that have no node yet.

    `types` maps Ray's node ids to node types.
    """
    if view.endpoint.state not in SERVING_STATES:
        return {}
    hosts = view.load.replica_nodes if view.load else ()
    missing = max(0, published_members(view) - len(hosts))
    return quota_usage(replica_shape(view), [*(types.get(host) for host in hosts), *[None] * missing])


def price_per_hour(shape: Shape, types: Iterable[NodeType]) -> float:
    """Returns the total price in micro-dollars an hour of members on nodes of the given types. There is one member for
    each item of `types`. A member pays its dominant share of the node's price.
    """
    return sum(
        node_type.price_micro_usd_h * dominant_share(shape.resources, node_type.resources) for node_type in types
    )


def placed_types(placed: Placements, node_types: Sequence[NodeType]) -> list[NodeType]:
    types = {node_type.name: node_type for node_type in node_types}
    return [types[slot.node_type] for slot in placed if slot.node_type in types]


def fleet_capacity(node_types: Iterable[NodeType]) -> Resources:
    """Returns the resources of the largest fleet that `max_nodes` allows. GPUs count twice: as `GPU`, and under the
    accelerator's name.
    """
    total: Resources = {}
    for t in node_types:
        model = t.labels.get(ACCELERATOR_LABEL, "")
        named = {model: t.resources["GPU"]} if model and t.resources.get("GPU") else {}
        total = plus(total, {name: amount * t.max_nodes for name, amount in {**t.resources, **named}.items()})
    return total
