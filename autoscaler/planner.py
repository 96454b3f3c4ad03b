"""The autoscaler's decision: a pure function from a Snapshot to actions. Each action carries its reason in words.

Needs are served in order of priority: published replicas, admitted leases, work without a lease, resources requested
from Ray, then the minimum and the warm nodes of each type. Nodes that serve these needs are called nominated. Other
nodes are drained once they have been idle for long enough. Last, replicas and gangs move to where they cost less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from raytide.autoscaler.disruption import consolidation, termination
from raytide.autoscaler.disruption.consolidation_candidates import ConsolidationPlanner
from raytide.autoscaler.endpoints import slo_policy
from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.autoscaler.provisioning.provisioner import provision_leases, provision_replicas
from raytide.autoscaler.provisioning.unmanaged import provision_requested, provision_unmanaged
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import Action, Terminate, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.scheduling.state import SchedulingState

MINIMUM = "minimum"
WARM = "warm"


def plan(snapshot: Snapshot, room: SchedulingState | None = None) -> tuple[Action, ...]:
    """Returns the actions for nodes and placements. `snapshot` must contain the replica targets and the admitted leases
    of this decision.

    `room` is the scheduling state of the snapshot, if the caller has built one already. This call changes `room`.
    """
    if not snapshot.ray_answers:
        reason = "Ray does not answer; nodes, leases and replicas stay as they are, only deadlines are kept"
        return (*termination.expired_drains(snapshot), Wait("cluster", "signal", reason, "See `raytide doctor`."))
    ends = tuple(termination.overdue_actions(snapshot))
    snapshot = _ended(snapshot, {end.node_id for end in ends if isinstance(end, Terminate)})
    if room is None or any(end.node_id in room.rows for end in ends):
        room = SchedulingState.from_snapshot(snapshot)
    draft = PlanBuilder(snapshot, replace(room, snapshot=snapshot), NodeOccupancy.from_snapshot(snapshot), list(ends))
    consolidation.reserve_replacements(draft)
    provision_replicas(draft)
    provision_leases(draft)
    provision_requested(draft, provision_unmanaged(draft))
    draft.finish()
    _keep_minimum(draft)
    _keep_warm(draft)
    draft.actions += [drain for drain in slo_policy.drains(snapshot) if drain.node_id not in draft.nominated]
    draft.actions += consolidation.finish_moves(draft)
    draft.actions += [*ConsolidationPlanner(draft).decide()]
    draft.actions += termination.idle_drains(snapshot, keep=draft.nominated, leaving=draft.leaving)
    return tuple(draft.actions)


def _ended(snapshot: Snapshot, node_ids: set[str]) -> Snapshot:
    """Returns the snapshot with these nodes terminating, so that nothing is placed on them."""
    views = tuple(
        replace(view, node=replace(view.node, state=NodeState.TERMINATING)) if view.node.id in node_ids else view
        for view in snapshot.nodes
    )
    return replace(snapshot, nodes=views)


def _keep_minimum(draft: PlanBuilder) -> None:
    counts = Counter(draft.state.slots[row].node_type for row in draft.state.rows.values())
    for node_type in draft.snapshot.node_types:
        for _ in range(node_type.min_nodes - counts[node_type.name]):
            if (slot := draft.state.buy(node_type)) is None:
                break
            by = " by its schedule" if node_type.schedule else ""
            draft.buy(slot, MINIMUM, f"min_nodes of {node_type.name} is {node_type.min_nodes}{by}")


def _keep_warm(draft: PlanBuilder) -> None:
    """Keeps, or buys, up to `warm_nodes` nodes of each type that are empty and not nominated."""
    room = draft.state
    totals = {view.node.id: view.stable_total for view in draft.snapshot.nodes}  # a joined node has what Ray reports
    for node_type in draft.snapshot.node_types:
        if not node_type.warm_nodes:
            continue
        rows = {id: row for id, row in room.rows.items() if room.slots[row].node_type == node_type.name}
        free = [id for id, row in rows.items() if room.node_table.has_free(row, totals.get(id, node_type.resources))]
        draft.nominated.update(free[: node_type.warm_nodes])
        for _ in range(node_type.warm_nodes - len(free)):
            if (slot := room.buy(node_type)) is None:
                break
            draft.buy(slot, WARM, f"warm_nodes of {node_type.name} is {node_type.warm_nodes}, {len(free)} are free")
