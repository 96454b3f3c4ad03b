"""Terminates idle nodes that the plan does not need, and nodes whose drain or launch is overdue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from raytide.autoscaler.nodes.lifecycle import NEVER_JOINED
from raytide.core.money import format_usd
from raytide.core.objects.node import NodeState, NodeType
from raytide.core.objects.plan import Drain, Rejected, Terminate, Wait
from raytide.core.objects.snapshot import NodeView, Snapshot

IDLE_DRAIN_S = 30.0
"""The deadline of idle drains; Ray wants one, though nothing is left to finish."""


def overdue_actions(snapshot: Snapshot) -> Iterator[Drain | Terminate]:
    """Yields actions that terminate nodes, and actions that tell Ray about drain notices. A node is terminated if its
    drain deadline has passed, if it is drained, if it did not join in time, or if its type was removed before it
    joined.
    """
    types = {t.name: t for t in snapshot.node_types}
    yield from expired_drains(snapshot)
    for view in snapshot.nodes:
        if view.node.state is NodeState.DRAINING:
            yield from _draining(view, snapshot.at_s)
        elif view.node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
            yield from _launching(view, types.get(view.node.type), snapshot.at_s)


def expired_drains(snapshot: Snapshot) -> Iterator[Terminate]:
    """Yields a termination for every node whose drain deadline has passed, except for nodes in quarantine."""
    for view in snapshot.nodes:
        deadline_s = view.node.drain_deadline_s
        if view.node.quarantined:
            continue
        if view.node.state is NodeState.DRAINING and deadline_s is not None and deadline_s <= snapshot.at_s:
            yield Terminate(view.node.id, f"its deadline has passed: {view.node.reason}")


def idle_drains(snapshot: Snapshot, *, keep: Collection[str], leaving: Collection[str]) -> Iterator[Drain | Wait]:
    """Yields a drain for each node that has been idle for its type's `idle_timeout_s`. At least `min_nodes` nodes of
    each type stay, and nodes in `keep` stay as well. For an idle node that may still be busy outside of Ray, yields a
    Wait instead. Ray refuses a drain if a task has just started on the node. `leaving` are the ids of nodes that leave
    for other reasons.
    """
    types = {t.name: t for t in snapshot.node_types}
    reservation, gone = {*keep, *_nodes_in_use(snapshot), *leaving}, (NodeState.TERMINATING, NodeState.DRAINING)
    stay = (view.node for view in snapshot.nodes if view.node.state not in gone)
    staying = Counter(node.type for node in stay if node.id not in leaving)
    free = [
        v for v in snapshot.nodes if v.idle_s > 0 and v.node.state is NodeState.READY and v.node.id not in reservation
    ]
    for view in sorted(free, key=lambda view: (len(view.node.id), view.node.id), reverse=True):
        node, node_type = view.node, types.get(view.node.type)
        timeout_s = node_type.idle_timeout_s if node_type else 0.0
        min_nodes = node_type.min_nodes if node_type else 0
        if staying[node.type] <= min_nodes or view.idle_s < timeout_s:
            continue
        if view.busy:
            yield Wait(node.id, "signal", view.busy)
        else:
            staying[node.type] -= 1
            price, saved = node.price_micro_usd_h, format_usd(node.price_micro_usd_h)
            reason = f"idle for {view.idle_s:.0f} s (limit {timeout_s:.0f} s); saves {saved}/h"
            keeping = Rejected(f"keep {node.id}", f"costs {saved}/h, and nothing is planned for it", price)
            yield Drain(node.id, "idle", snapshot.at_s + IDLE_DRAIN_S, reason, -price, (keeping,))


def _draining(view: NodeView, now_s: float) -> Iterator[Drain | Terminate]:
    node = view.node
    if view.is_draining and _is_empty(view) and not node.quarantined:
        yield Terminate(node.id, f"drained and empty: {node.reason}")
    elif not view.is_draining and node.drain_deadline_s is not None and node.drain_deadline_s > now_s:
        yield Drain(node.id, "notice", node.drain_deadline_s, node.reason)


def _launching(view: NodeView, node_type: NodeType | None, now_s: float) -> Iterator[Terminate]:
    age_s = now_s - view.node.requested_at_s
    if node_type is None:
        reason = "its node type was removed from the configuration"
        yield Terminate(view.node.id, reason, -view.node.price_micro_usd_h)
    elif age_s > node_type.launch_timeout_s:
        reason = f"{NEVER_JOINED} {node_type.launch_timeout_s:.0f} s of its launch"
        yield Terminate(view.node.id, reason, -view.node.price_micro_usd_h)


def _nodes_in_use(snapshot: Snapshot) -> set[str]:
    """Returns the ids of nodes that hold members, or that host replicas according to the last report, however old that
    is.
    """
    with_members = {member.node_id for lease in snapshot.leases for member in lease.members if member.node_id}
    hosts = {node for view in snapshot.endpoints if view.load for node in view.load.replica_nodes} - {""}
    return with_members | {view.node.id for view in snapshot.nodes if view.node.ray_node_id in hosts}


def _is_empty(view: NodeView) -> bool:
    return all(view.available.get(name, 0.0) >= amount for name, amount in view.total.items())
