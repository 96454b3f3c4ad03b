"""Migrates gangs with a deadline to the market that the deadline policy chose: to cheaper spot nodes, or back to
on-demand nodes when the time runs out.

New nodes are bought first. The gang keeps working on its old nodes until all new nodes are ready. There is no check
that the migration pays back, because the deadline policy has already compared the costs. If other work runs on one
of the gang's nodes, the gang stays on that node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytide.autoscaler.disruption.disruption_cost import NOTICE_S, disruption_cost
from raytide.autoscaler.nodes.occupancy import Tenants
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.core.objects.gang import Lease, Shape
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import Drain
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.market_constraint import constrain, is_allowed
from raytide.scheduling.placement import Slot
from raytide.scheduling.state import SchedulingState


def constraint_of(snapshot: Snapshot, old: Tenants) -> MarketConstraint | None:
    """Returns the market constraint of the gang on this node. Returns None if the gang has no deadline or can no longer
    meet it.
    """
    stances = (snapshot.stances.get(lease.job_id) for lease, _ in old.members)
    return next((each for each in stances if each is not None and each.markets is not None), None)


def is_wanted(constraint: MarketConstraint, new: NodeView) -> bool:
    """Returns whether the node `new`, which was bought for a gang, has the market that the constraint wants."""
    return constraint.wanted is new.node.market


def drain(old: Tenants, new_ids: Sequence[str], constraint: MarketConstraint, now_s: float) -> Drain:
    reason = f"{', '.join(new_ids)} is ready for {old.description}: {constraint.reason}"
    return Drain(old.view.node.id, "notice", now_s + NOTICE_S, reason, -old.price_micro_usd_h)


def migrate(builder: PlanBuilder, move: str) -> Iterator[Drain]:
    """Buys replacements for nodes of the wrong market. Drains a gang's nodes of the wrong market once all their
    replacements are ready.
    """
    for lease in builder.snapshot.leases:
        constraint = builder.snapshot.stances.get(lease.job_id)
        if constraint is None or not (olds := _misplaced(builder, lease, constraint)):
            continue
        missing = [old for old in olds if old.view.node.id not in builder.replacements]
        if not missing or disruption_cost(builder.occupancy, olds, builder.snapshot.at_s) is None:
            continue
        if _find_slots(builder.state.copy(), missing, constraint) is None:
            continue
        slots = _find_slots(builder.state, missing, constraint)
        assert slots is not None
        builder.nominated.update(slot.node_id for slot in slots)
        for old, slot in zip(missing, slots, strict=True):
            if slot.is_new:
                why = f"for {lease.job_id} in place of {old.view.node.id}: {constraint.reason}"
                builder.buy(slot, f"{move}{old.view.node.id}", why)
        new_ids = {old.view.node.id: slot.node_id for old, slot in zip(missing, slots, strict=True)}
        new_ids |= {id: builder.replacements[id].node.id for id in builder.movable & builder.replacements.keys()}
        if all(_is_ready(builder, new_ids.get(old.view.node.id, "")) for old in olds):
            yield from (drain(old, [new_ids[old.view.node.id]], constraint, builder.snapshot.at_s) for old in olds)


def misplaced_nodes(builder: PlanBuilder, lease: Lease, constraint: MarketConstraint) -> dict[str, NodeView]:
    """Returns, by node id, those nodes of the gang that do not have the wanted market."""
    views = ((id, builder.occupancy.views.get(id)) for id in sorted({m.node_id for m in lease.members if m.has_node}))
    return {id: view for id, view in views if view is not None and not is_wanted(constraint, view)}


def _misplaced(builder: PlanBuilder, lease: Lease, constraint: MarketConstraint) -> list[Tenants]:
    """Returns the tenants of the gang's misplaced nodes; an empty list if the gang may not move or cannot leave all of
    these nodes.
    """
    if not is_allowed(lease.shape, constraint):
        return []
    olds = [builder.occupancy.tenants_of(view) for view in misplaced_nodes(builder, lease, constraint).values()]
    return olds if all(old.hosts_only(lease) and old.view.node.state is NodeState.READY for old in olds) else []


def _find_slots(state: SchedulingState, olds: Sequence[Tenants], constraint: MarketConstraint) -> list[Slot] | None:
    """Returns a slot on a node of the wanted market for each of these tenants; None if one of them fits nowhere."""
    found: list[Slot] = []
    for old in olds:
        (shape,) = constrain([Shape.computed(old.resources, old.shapes[0].labels)], constraint)[:1]
        slots = state.place(shape, 1, subject="")
        if isinstance(slots, Unschedulable):
            return None
        found += slots
    return found


def _is_ready(builder: PlanBuilder, node_id: str) -> bool:
    view = builder.occupancy.views.get(node_id)
    return view is not None and view.node.state is NodeState.READY
