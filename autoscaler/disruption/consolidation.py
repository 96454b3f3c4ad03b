"""Consolidation: moves replicas and gangs to places where they cost less. The places are free capacity or cheaper
nodes.

A cheaper node is bought first. The `subject` of the cheaper node says which node it replaces (`move node-7`). The
old node is drained only once the new node is ready. Serve starts a replica on the new node before it stops the old
replica. All nodes of a gang move together, in one stop of the gang. Work without a lease is never moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raytide.autoscaler.disruption import market_migration
from raytide.autoscaler.disruption.consolidation_candidates import MOVE, drain_of, may_leave
from raytide.autoscaler.disruption.disruption_cost import disruption_cost
from raytide.autoscaler.disruption.market_migration import constraint_of, is_wanted
from raytide.autoscaler.nodes.occupancy import NodeOccupancy, Tenants
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.core.money import format_usd
from raytide.core.objects.node import NodeState, labels_match
from raytide.core.objects.plan import Drain
from raytide.core.objects.snapshot import NodeView, Snapshot
from raytide.scheduling import reservations
from raytide.scheduling.state import SchedulingState


def with_reserved(snapshot: Snapshot, state: SchedulingState) -> SchedulingState:
    """Returns a copy of the scheduling state in which capacity is reserved: for replicas without a place, and for
    tenants that will move to replacement nodes.
    """
    state = replace(state.copy(), snapshot=snapshot, _holders=None)
    for reservation in snapshot.kept.values():
        reservations.reserve(state, reservation)
    if not any(view.node.subject.startswith(MOVE) for view in snapshot.nodes):
        return state
    builder = PlanBuilder(snapshot, state, NodeOccupancy.from_snapshot(snapshot), [])
    reserve_replacements(builder)
    return builder.state


def reserve_replacements(builder: PlanBuilder) -> None:
    """Reserves capacity on replacement nodes for the tenants that will move there. Skips tenants that may no longer
    move, and tenants that no longer fit on the replacement node.
    """
    builder.replacements.update(_replacements(builder))
    olds, now_s = _olds(builder), builder.snapshot.at_s
    for node_id, old in olds.items():
        new = builder.replacements[node_id]
        row = builder.state.rows[new.node.id]
        gang_tenants = [other for other in olds.values() if other is old or other.leases & old.leases]
        if not builder.state.node_table.has_free(row, old.resources) or not may_leave(old, now_s):
            continue
        if (constraint := constraint_of(builder.snapshot, old)) is not None and not is_wanted(constraint, new):
            continue
        if disruption_cost(builder.occupancy, gang_tenants, now_s) and all(
            labels_match(shape.labels, new.labels) for shape in old.shapes
        ):
            builder.nominated.add(new.node.id)
            builder.movable.add(node_id)
            builder.state.reserve(new.node.id, old.resources)


def finish_moves(builder: PlanBuilder) -> list[Drain]:
    """Drains the nodes whose replacements are ready. Then moves gangs with a deadline: some to spot nodes, others
    back to on-demand nodes.
    """
    return [*_drain_replaced(builder), *market_migration.migrate(builder, MOVE)]


def _replacements(builder: PlanBuilder) -> dict[str, NodeView]:
    """Returns the usable nodes that were bought for a move, by the id of the node that they replace."""
    rows, views = builder.state.rows, builder.occupancy.views
    found: dict[str, NodeView] = {}
    for new in builder.snapshot.nodes:
        old = views.get(new.node.subject.removeprefix(MOVE)) if new.node.subject.startswith(MOVE) else None
        if old is None or old.node.state is not NodeState.READY or (row := rows.get(new.node.id)) is None:
            continue
        is_whole = builder.state.node_table.has_free(row, new.stable_total)
        if is_whole or builder.state.node_table.has_free(row, builder.occupancy.tenants_of(old).resources):
            found[old.node.id] = new
    return found


def _olds(builder: PlanBuilder) -> dict[str, Tenants]:
    occupancy = builder.occupancy
    return {node_id: occupancy.tenants_of(occupancy.views[node_id]) for node_id in builder.replacements}


def _drain_replaced(builder: PlanBuilder) -> Iterator[Drain]:
    """Drains nodes whose replacements are ready, once the replacements for all other nodes of their gangs are ready
    too.
    """
    olds, replacements = _olds(builder), builder.replacements
    free_to_go = {
        node_id
        for node_id in olds.keys() & builder.movable - builder.nominated
        if replacements[node_id].node.state is NodeState.READY
    }
    waiting = {lease_id for node_id in olds.keys() - free_to_go for lease_id in olds[node_id].leases}
    for old in olds.values():
        if (constraint := constraint_of(builder.snapshot, old)) is not None:
            misplaced = {
                lease.id: {*market_migration.misplaced_nodes(builder, lease, constraint)} for lease, _ in old.members
            }
            waiting |= {lease_id for lease_id, nodes in misplaced.items() if not nodes <= free_to_go}
    for node_id, old in olds.items():
        if node_id in free_to_go and not old.leases & waiting:
            new = replacements[node_id].node
            if (constraint := constraint_of(builder.snapshot, old)) is not None:
                yield market_migration.drain(old, [new.id], constraint, builder.snapshot.at_s)
                continue
            saved = old.price_micro_usd_h - new.price_micro_usd_h
            reason = f"{new.id} ({new.type}) is ready for {old.description}; saves {format_usd(saved)}/h"
            yield drain_of(old, reason, saved, builder.snapshot.at_s)
