"""Gangs with a deadline go over to the market in which they should sit: from on demand to spot that is cheaper, and
from spot to on demand when their time runs out.

New nodes are bought first, and the gang works on where it is until all of them are ready. It is asked of nobody whether
that pays: the deadline policy has weighed it. A node that others use too is not left.
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
    """Of the one gang on this node; None when it has no deadline to keep."""
    stances = (snapshot.stances.get(lease.job_id) for lease, _ in old.members)
    return next((stance for stance in stances if stance is not None and stance.markets is not None), None)


def is_wanted(stance: MarketConstraint, new: NodeView) -> bool:
    """Whether a node that was bought for a gang is still of the market where that should sit."""
    return stance.wanted is new.node.market


def drain(old: Tenants, new_ids: Sequence[str], stance: MarketConstraint, now_s: float) -> Drain:
    reason = f"{', '.join(new_ids)} is ready for {old.description}: {stance.reason}"
    return Drain(old.view.node.id, "notice", now_s + NOTICE_S, reason, -old.price_micro_usd_h)


def migrate(builder: PlanBuilder, move: str) -> Iterator[Drain]:
    """Buys what is missing, and leaves nodes whose gang has room that is there for all of them."""
    for lease in builder.snapshot.leases:
        stance = builder.snapshot.stances.get(lease.job_id)
        if stance is None or not (olds := _misplaced(builder, lease, stance)):
            continue
        missing = [old for old in olds if old.view.node.id not in builder.replacements]
        if not missing or disruption_cost(builder.occupancy, olds, builder.snapshot.at_s) is None:
            continue
        if _find_slots(builder.state.copy(), missing, stance) is None:
            continue
        seats = _find_slots(builder.state, missing, stance)
        assert seats is not None
        builder.nominated.update(seat.node_id for seat in seats)
        for old, seat in zip(missing, seats, strict=True):
            if seat.is_new:
                why = f"for {lease.job_id} in place of {old.view.node.id}: {stance.reason}"
                builder.buy(seat, f"{move}{old.view.node.id}", why)
        new_ids = {old.view.node.id: seat.node_id for old, seat in zip(missing, seats, strict=True)}
        new_ids |= {id: builder.replacements[id].node.id for id in builder.movable & builder.replacements.keys()}
        if all(_is_ready(builder, new_ids.get(old.view.node.id, "")) for old in olds):
            yield from (drain(old, [new_ids[old.view.node.id]], stance, builder.snapshot.at_s) for old in olds)


def misplaced_nodes(builder: PlanBuilder, lease: Lease, stance: MarketConstraint) -> dict[str, NodeView]:
    """Its nodes of other markets than the wanted one."""
    views = ((id, builder.occupancy.views.get(id)) for id in sorted({m.node_id for m in lease.members if m.has_node}))
    return {id: view for id, view in views if view is not None and not is_wanted(stance, view)}


def _misplaced(builder: PlanBuilder, lease: Lease, stance: MarketConstraint) -> list[Tenants]:
    """Its nodes of other markets than the wanted one, if it may sit there and can be taken from all of them."""
    if not is_allowed(lease.shape, stance):
        return []
    olds = [builder.occupancy.tenants_of(view) for view in misplaced_nodes(builder, lease, stance).values()]
    return olds if all(old.hosts_only(lease) and old.view.node.state is NodeState.READY for old in olds) else []


def _find_slots(room: SchedulingState, olds: Sequence[Tenants], stance: MarketConstraint) -> list[Slot] | None:
    """For all who are on each of these nodes, one node of the wanted market; None when one has none."""
    found: list[Slot] = []
    for old in olds:
        (shape,) = constrain([Shape.computed(old.resources, old.shapes[0].labels)], stance)[:1]
        seats = room.place(shape, 1, subject="")
        if isinstance(seats, Unschedulable):
            return None
        found += seats
    return found


def _is_ready(builder: PlanBuilder, node_id: str) -> bool:
    view = builder.occupancy.views.get(node_id)
    return view is not None and view.node.state is NodeState.READY
