"""Room that gangs gave to replicas, and that Ray does not show as free yet."""

from __future__ import annotations

from raytide.core.fleet import Resources, fits, minus, plus
from raytide.core.gang import MemberState
from raytide.core.snapshot import NodeView, Snapshot

VACATED_S = 3.0
"""So long after a seat was given away Ray may still count it as taken, or Serve not know yet who took it."""

_COUNTED = (MemberState.FORMING, MemberState.READY, MemberState.LEAVING)

Room = list[tuple[str, Resources]]
"""Nodes, and what becomes free there."""


def vacated(snapshot: Snapshot) -> dict[str, Room]:
    """By endpoint, the seats that are being left for its replicas, or were left a moment ago."""
    nodes = {view.node.id: view for view in snapshot.nodes}
    hidden: dict[str, Resources] = {}
    found: dict[str, Room] = {}
    for lease in snapshot.leases:
        need = lease.shape.resources
        for member in lease.members:
            if not member.given_to or member.node_id not in nodes:
                continue
            if member.is_parked:
                node_id = member.node_id
                free = hidden[node_id] if node_id in hidden else _hidden(nodes[node_id], snapshot)
                is_hidden = fits(need, free)
                hidden[node_id] = minus(free, need) if is_hidden else free
                if not is_hidden:
                    continue
            found.setdefault(member.given_to, []).append((member.node_id, need))
    return found


def _hidden(view: NodeView, snapshot: Snapshot) -> Resources:
    """What Ray counts as taken there by nobody that is known."""
    known: Resources = {}
    for lease in snapshot.leases:
        for member in lease.members:
            if member.node_id == view.node.id and member.state in _COUNTED:
                known = plus(known, lease.shape.resources)
    for served in snapshot.endpoints:
        for ray_id in served.load.replica_nodes if served.load else ():
            if ray_id == view.node.ray_node_id:
                known = plus(known, served.endpoint.spec.resources)
    return minus(minus(view.total, known), view.available)
