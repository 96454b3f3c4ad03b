"""Provisions nodes for work without a lease (tasks, actors and placement groups that raytide did not start), and then
for standing requests.

A standing request asks for capacity through `ray.autoscaler.sdk.request_resources`. The capacity is kept even if no
work is waiting for it. Resources that unmanaged work uses count towards the request, as in Ray. Resources that jobs
and endpoints use do not count. One cap limits the nodes bought for both unmanaged work and standing requests. A node
that a standing request needs is never drained as idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytide.autoscaler.provisioning.plan_builder import Assignment, PlanBuilder
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeType, Resources, minus, plus
from raytide.core.objects.plan import UNMANAGED, Wait
from raytide.core.objects.snapshot import Demand, Snapshot
from raytide.scheduling.diagnosis import Unschedulable, describe_amounts
from raytide.scheduling.lookahead import PendingDemand, PendingShape
from raytide.scheduling.placement import Slot, Tenant
from raytide.scheduling.replicas import is_replica
from raytide.scheduling.state import SchedulingState
from raytide.scheduling.unattributed import UnattributedUsage


@dataclass(frozen=True, slots=True)
class UnmanagedPlacement:
    """The placements of unmanaged work (work without a lease), and the limits on further nodes for it."""

    node_types: tuple[NodeType, ...]
    """The node types that may be bought for unmanaged work."""
    max_nodes: int
    """The cap on nodes that are bought for unmanaged work."""
    bought: int
    """The number of nodes bought for unmanaged work, including those of this plan."""
    slots: tuple[tuple[str, Resources], ...]
    """Node id and resources of each unit of pending work that was placed."""


def provision_unmanaged(builder: PlanBuilder) -> UnmanagedPlacement:
    """Places unmanaged work on free resources, and on new nodes up to the cap. The largest demand is placed first."""
    snapshot, cap = builder.snapshot, builder.snapshot.unmanaged
    bought = sum(view.node.subject == UNMANAGED for view in snapshot.nodes)
    node_types = [t for t in snapshot.node_types if cap.gpu or not t.resources.get("GPU")]
    demands = [d for d in snapshot.demand if _is_unmanaged(d)]
    most = {
        name: max(t.resources.get(name, 0.0) for t in snapshot.node_types) for t in node_types for name in t.resources
    }
    demands.sort(key=lambda demand: -_size(demand, most))
    shapes = [Shape.computed(d.resources, d.labels, d.together) for d in demands]
    allowed = frozenset(node_type.name for node_type in node_types)
    pending = [PendingShape(shape, demand.count, allowed) for shape, demand in zip(shapes, demands, strict=True)]
    builder.state.pending = PendingDemand(builder.state.offerings, pending) if pending else None
    slots: list[tuple[str, Resources]] = []
    bundle_nodes = _bundle_nodes(snapshot, {demand.apart for demand in demands if demand.apart})
    unplaceable: dict[str, bool] = {}  # groups that cannot be had whole
    for demand, shape in zip(demands, shapes, strict=True):
        builder.state.advance()
        what = f"work without a lease ({demand.count} x ({describe_amounts(shape)}){' apart' if demand.apart else ''})"
        before, left = builder.state.next_node, max(0, cap.max_nodes - bought)
        if demand.apart and demand.apart not in unplaceable:
            group = [(d, s) for d, s in zip(demands, shapes, strict=True) if d.apart == demand.apart]
            unplaceable[demand.apart] = not _fits_whole(builder, group, bundle_nodes[demand.apart], node_types, left)
        placed = builder.state.place(
            shape,
            0 if unplaceable.get(demand.apart) else demand.count,
            at_least=demand.count if demand.together or demand.apart else 0,
            menu=node_types,
            max_new=left,
            subject=what,
            apart=bundle_nodes[demand.apart] if demand.apart else None,
        )
        placed = () if isinstance(placed, Unschedulable) else placed
        bought += builder.state.next_node - before
        if demand.apart:
            bundle_nodes[demand.apart] |= {slot.node_id for slot in placed}
        slots += [(slot.node_id, shape.resources) for slot in placed]
        builder.assign(Assignment(UNMANAGED, f"{what} finds no room", placed))
        if rest := demand.count - len(placed):
            is_whole = bool(demand.together or demand.apart)
            is_capped = bought >= cap.max_nodes or (is_whole and _fits_without_cap(builder, demand, shape, node_types))
            add_unmanaged_wait(builder, shape, rest, what, is_capped=is_capped)
    builder.state.forget_pending()
    return UnmanagedPlacement(tuple(node_types), cap.max_nodes, bought, tuple(slots))


def provision_requested(builder: PlanBuilder, placement: UnmanagedPlacement) -> None:
    """Finds or buys capacity for standing requests, which users make through Ray's `request_resources`. `placement`
    describes the unmanaged work. The caller must have placed this work before.
    """
    standing = [
        d for d in builder.snapshot.demand if d.is_standing and any(amount > 0 for amount in d.resources.values())
    ]
    if not standing:
        return
    work, state, bought = _unmanaged_use(builder, placement), builder.state.copy(), placement.bought
    bought_here = set[str]()
    for node_id, resources in work.items():
        state.release(node_id, resources)
    for demand in standing:
        shape = Shape.computed(demand.resources, demand.labels)
        what = f"room for {demand.count} x ({describe_amounts(shape)}), which request_resources asks for,"
        left, first = max(0, placement.max_nodes - bought), state.next_node
        found = state.place_some(shape, demand.count, menu=placement.node_types, max_new=left)
        for number in range(first, state.next_node):
            bought_here.add(builder.state.buy_offer(state.bought[f"node-{number}"]).node_id)
        bought += state.next_node - first
        slots = tuple(slot for slot in found if not slot.is_new or slot.node_id in bought_here)
        for slot in slots:
            _reserve(builder.state, slot, shape, placement, work)
        builder.assign(Assignment(UNMANAGED, f"{what} is not there", slots))
        if rest := demand.count - len(found):
            add_unmanaged_wait(builder, shape, rest, what, is_capped=bought >= placement.max_nodes)


def _unmanaged_use(builder: PlanBuilder, placement: UnmanagedPlacement) -> dict[str, Resources]:
    """Returns the resources of each node that unmanaged work uses, or that this plan reserved for it."""
    unattributed, work = UnattributedUsage(builder.snapshot), dict[str, Resources]()
    for view in builder.snapshot.nodes:
        if view.node.id in builder.state.rows:
            work[view.node.id] = {name: amount for name, amount in unattributed.amount(view).items() if amount > 0}
    for node_id, resources in placement.slots:
        work[node_id] = plus(work.get(node_id, {}), resources)
    return {node_id: resources for node_id, resources in work.items() if resources}


def _reserve(
    state: SchedulingState, slot: Slot, shape: Shape, placement: UnmanagedPlacement, work: dict[str, Resources]
) -> None:
    """Reserves the part of the slot that unmanaged work does not use already."""
    if slot.is_new:
        state.tenants[slot.node_id].append(Tenant(shape, frozenset(t.name for t in placement.node_types)))
    has, need = work.get(slot.node_id, {}), shape.resources
    both = {name: min(amount, has.get(name, 0.0)) for name, amount in need.items()}
    work[slot.node_id] = minus(has, both)
    state.reserve(slot.node_id, minus(need, both))


def _bundle_nodes(snapshot: Snapshot, groups: set[str]) -> dict[str, frozenset[str]]:
    """Returns, for each placement group that has lost bundles, the nodes on which it still has one."""
    found = {group: set[str]() for group in groups}
    for view in snapshot.nodes if groups else ():
        for group in groups & view.labels.keys():
            found[group].add(view.node.id)
    return {group: frozenset(nodes) for group, nodes in found.items()}


def _is_unmanaged(demand: Demand) -> bool:
    is_work = not is_replica(demand) and not demand.is_standing
    return is_work and any(amount > 0 for amount in demand.resources.values())


def _fits_whole(
    builder: PlanBuilder,
    group: list[tuple[Demand, Shape]],
    bundle_nodes: frozenset[str],
    node_types: list[NodeType],
    left: int,
) -> bool:
    """Returns whether all bundles of a spread group fit with at most `left` new nodes; placing only some of them would
    be useless.
    """
    if len(group) < 2:
        return True  # a single demand is placed whole or not at all
    state = builder.state.copy()
    state.forget_pending()
    if (state.offerings.launches_left or 0) > 0:
        state.offerings.launches_left = None  # the launch rate only delays the rest by minutes
    for demand, shape in group:
        before = state.next_node
        slots = state.place(shape, demand.count, menu=node_types, max_new=left, subject=UNMANAGED, apart=bundle_nodes)
        if isinstance(slots, Unschedulable):
            return False
        left -= state.next_node - before
        bundle_nodes |= {slot.node_id for slot in slots}
    return True


def _fits_without_cap(builder: PlanBuilder, demand: Demand, shape: Shape, node_types: list[NodeType]) -> bool:
    state, apart = builder.state.copy(), frozenset[str]() if demand.apart else None
    return not isinstance(
        state.place(shape, demand.count, menu=node_types, subject=UNMANAGED, apart=apart), Unschedulable
    )


def _size(demand: Demand, most: dict[str, float]) -> float:
    """Returns the largest share that one unit of the demand takes of any resource of the largest node."""
    return max((amount / most[name] for name, amount in demand.resources.items() if most.get(name)), default=0.0)


def add_unmanaged_wait(builder: PlanBuilder, shape: Shape, rest: int, what: str, *, is_capped: bool) -> None:
    cap = builder.snapshot.unmanaged
    unschedulable = builder.state.why_not(shape, rest, what)
    is_allowed = not is_capped and (cap.gpu or not shape.resources.get("GPU"))
    if is_allowed or unschedulable.constraint == "impossible":
        builder.wait(UNMANAGED, unschedulable)
        return
    allowed = "nodes" if cap.gpu else "nodes without a GPU"
    reason = f"{what} waits: it may buy {cap.max_nodes} {allowed} (metadata.raytide.unmanaged)"
    builder.actions.append(Wait(UNMANAGED, "cap", reason, "Submit it as a job, or raise the cap."))
