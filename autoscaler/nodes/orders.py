"""Pure functions that carry out orders about nodes. An order replaces a node, puts it in quarantine (keeps it out of
use), or lifts its quarantine. Operators issue these orders. Alerts can issue the first two kinds.

A quarantined node is drained like a node that the provider reclaims: gangs get a notice, Ray places nothing new on
it, and its work moves to other nodes. Its machine is then kept without work. When the quarantine is lifted, the
machine is terminated, because Ray does not take a drained node back. An order to replace the node does not lift the
quarantine. If the machine ends while the node is in quarantine, the quarantine ends too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from raytide.autoscaler.nodes.lifecycle import CANCELLED
from raytide.core.objects.node import Node, NodeState
from raytide.core.specs.order import Order

_NODE_ORDERS = ("replace_node", "quarantine_node", "release_node")
DRAIN_S = 60.0
"""The time that work on the node has to end or to move."""


def carry_out(
    nodes: Mapping[str, Node], orders: Iterable[Order], now_s: float
) -> tuple[dict[str, Node], tuple[Order, ...]]:
    """Carries out the orders that concern nodes. Returns the changed nodes, and these orders with their outcomes."""
    after, done = dict(nodes), []
    for order in orders:
        if order.kind not in _NODE_ORDERS:
            continue
        node = after.get(order.subject)
        if node is None or node.state is NodeState.GONE:
            outcome = f"{order.subject} is gone"
        else:
            after[node.id], outcome = _carry_out(node, order, now_s)
        done.append(replace(order, done_at_s=now_s, outcome=outcome))
    return after, tuple(done)


def _carry_out(node: Node, order: Order, now_s: float) -> tuple[Node, str]:
    why = order.reason or f"asked for by {order.user}"
    if order.kind == "release_node":
        if not node.quarantined:
            return node, f"{node.id} was not in quarantine"
        lifted = replace(node, quarantined="", state=NodeState.TERMINATING, reason=f"quarantine lifted: {why}")
        return lifted, "its machine ends: Ray takes no drained node back"
    if node.state is NodeState.TERMINATING:
        return node, f"{node.id} is ending already"
    if node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
        return replace(node, state=NodeState.TERMINATING, reason=f"{CANCELLED}: {why}"), "it had not joined yet"
    is_quarantine = order.kind == "quarantine_node"
    if node.quarantined and not is_quarantine:
        return node, f"{node.id} is in quarantine already"
    quarantined = why if is_quarantine else ""
    deadline_s = min(now_s + DRAIN_S, node.drain_deadline_s or now_s + DRAIN_S)
    reason = f"{'quarantined' if is_quarantine else 'replaced'}: {why}"
    drained = replace(
        node, state=NodeState.DRAINING, drain_deadline_s=deadline_s, reason=reason, quarantined=quarantined
    )
    return drained, f"it drains for at most {DRAIN_S:.0f} s"
