"""Replicas and gangs move to where they cost less: onto room that is free anyhow, or onto cheaper nodes, back to spot
above all.

A cheaper node is bought first (its subject is `move node-7`), and only once it is ready is the old one drained: what
was bought on demand in need stays until its replacement is there. Serve starts a replica on the new node before it
stops the old one. Nodes of one gang go together, in one stop. Work without a lease is never moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from raytide.autoscaler.disruption import market_migration
from raytide.autoscaler.disruption.consolidation_candidates import MOVE, ConsolidationPlanner, drain_of, may_leave
from raytide.autoscaler.disruption.disruption_cost import disruption_cost
from raytide.autoscaler.disruption.market_migration import constraint_of, is_wanted
from raytide.autoscaler.nodes.occupancy import NodeOccupancy, Tenants
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.core.money import format_usd
from raytide.core.objects.node import NodeState, labels_match
from raytide.core.objects.plan import Drain, Launch
from raytide.core.objects.snapshot import NodeView, Snapshot
from raytide.scheduling import reservations
from raytide.scheduling.state import SchedulingState


def with_reserved(snapshot: Snapshot, room: SchedulingState) -> SchedulingState:
    """A copy, without what is kept for replicas that have no room yet, and for those who will move."""
    room = replace(room.copy(), snapshot=snapshot, _holders=None)
    for kept in snapshot.kept.values():
        reservations.reserve(room, kept)
    if not any(view.node.subject.startswith(MOVE) for view in snapshot.nodes):
        return room
    builder = PlanBuilder(snapshot, room, NodeOccupancy.from_snapshot(snapshot), [])
    reserve_replacements(builder)
    return builder.state


def reserve_replacements(builder: PlanBuilder) -> None:
    """What was bought for a move is kept for those who will move there, unless they may not leave any more, or have
    become too many for it."""
    builder.replacements.update(_replacements(builder))
    olds, now_s = _olds(builder, builder.replacements), builder.snapshot.at_s
    for node_id, old in olds.items():
        new = builder.replacements[node_id]
        row = builder.state.rows[new.node.id]
        fellows = [other for other in olds.values() if other is old or other.leases & old.leases]
        if not builder.state.node_table.has_free(row, old.resources) or not may_leave(old, now_s):
            continue
        if (stance := constraint_of(builder.snapshot, old)) is not None and not is_wanted(stance, new):
            continue
        if disruption_cost(builder.occupancy, fellows, now_s) and all(
            labels_match(shape.labels, new.labels) for shape in old.shapes
        ):
            builder.nominated.add(new.node.id)
            builder.movable.add(node_id)
            builder.state.reserve(new.node.id, old.resources)


def finish_moves(builder: PlanBuilder) -> list[Drain]:
    """Nodes that are left now: what replaces them is ready."""
    return [*_to_replacements(builder, builder.replacements), *market_migration.migrate(builder, MOVE)]


def start_moves(builder: PlanBuilder) -> list[Drain | Launch]:
    """New moves."""
    return [*ConsolidationPlanner(builder, builder.replacements).decide()]


def _replacements(builder: PlanBuilder) -> dict[str, NodeView]:
    """Nodes that were bought for a move, are there or coming, and were not taken by others, by the node that they
    replace."""
    rows, views = builder.state.rows, builder.occupancy.views
    found: dict[str, NodeView] = {}
    for new in builder.snapshot.nodes:
        old = views.get(new.node.subject.removeprefix(MOVE)) if new.node.subject.startswith(MOVE) else None
        if old is None or old.node.state is not NodeState.READY or (row := rows.get(new.node.id)) is None:
            continue
        is_whole = builder.state.node_table.has_free(row, new.countable)
        if is_whole or builder.state.node_table.has_free(row, builder.occupancy.tenants_of(old).resources):
            found[old.node.id] = new
    return found


def _olds(builder: PlanBuilder, coming: Mapping[str, NodeView]) -> dict[str, Tenants]:
    return {node_id: builder.occupancy.tenants_of(builder.occupancy.views[node_id]) for node_id in coming}


def _to_replacements(builder: PlanBuilder, coming: Mapping[str, NodeView]) -> Iterator[Drain]:
    """Drains of nodes whose replacement is ready, and so are those of the rest of their gangs."""
    olds = _olds(builder, coming)
    free_to_go = {
        node_id
        for node_id in olds.keys() & builder.movable - builder.nominated
        if coming[node_id].node.state is NodeState.READY
    }
    waiting = {lease_id for node_id in olds.keys() - free_to_go for lease_id in olds[node_id].leases}
    for old in olds.values():
        if (stance := constraint_of(builder.snapshot, old)) is not None:
            misplaced = {
                lease.id: {*market_migration.misplaced_nodes(builder, lease, stance)} for lease, _ in old.members
            }
            waiting |= {lease_id for lease_id, nodes in misplaced.items() if not nodes <= free_to_go}
    for node_id, old in olds.items():
        if node_id in free_to_go and not old.leases & waiting:
            new = coming[node_id].node
            if (stance := constraint_of(builder.snapshot, old)) is not None:
                yield market_migration.drain(old, [new.id], stance, builder.snapshot.at_s)
                continue
            saved = old.price_micro_usd_h - new.price_micro_usd_h
            reason = f"{new.id} ({new.type}) is ready for {old.description}; saves {format_usd(saved)}/h"
            yield drain_of(old, reason, saved, builder.snapshot.at_s)
