"""The lifecycle of a node, as pure functions. Observations move a node forward. Decisions are first recorded and then
carried out.

The states are REQUESTED -> LAUNCHING -> READY -> DRAINING -> TERMINATING -> GONE:

- REQUESTED: the launch is decided.
- LAUNCHING: the provider lists the node.
- READY: Ray lists the node as alive.
- DRAINING: a notice came, an operator ordered a drain, or Ray accepted a drain.
- TERMINATING: the end is decided.
- GONE: the machine has ended, or the provider refused the launch or no longer lists the machine.

Every transition can be repeated after a crash. `overdue` lists the decisions that have not been carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.ray_gcs import RayNode
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Drain, Launch, Terminate

TAKEN_BACK = "the provider takes it back"
ENDED_BY_PROVIDER = "ended by the provider"
NEVER_JOINED = "it did not join within"
CANCELLED = "given up before it joined"

RAY_GRACE_S = 30.0
"""The time for which a machine may run without its Ray node before it is terminated."""

DRAINED_BY_OTHERS_S = 600.0
"""The time that work on a node has to end when Ray drains it without raytide's request."""


def observe(
    nodes: Iterable[Node],
    machines: Iterable[Machine] | None,
    ray_nodes: Iterable[RayNode] | None,
    notices: Iterable[Notice],
    now_s: float,
) -> tuple[Node, ...]:
    """Returns all nodes in the states that follow from the observations. If `machines` or `ray_nodes` is None, the
    provider or Ray did not answer, and nothing is concluded from the missing answer.
    """
    listed = None if machines is None else {machine.node_id: machine for machine in machines}
    in_ray = None if ray_nodes is None else by_node_id(ray_nodes)
    notices_by_node = {notice.node_id: notice for notice in notices}
    moved = []
    for node in nodes:
        if listed is not None:
            node = from_provider(node, listed.get(node.id), notices_by_node.get(node.id), now_s)
        if in_ray is not None:
            node = from_ray(node, in_ray.get(node.id), now_s)
        moved.append(node)
    return tuple(moved)


def from_provider(node: Node, machine: Machine | None, notice: Notice | None, now_s: float) -> Node:
    if node.state is NodeState.GONE:
        return node
    if machine is None:
        return node if node.state is NodeState.REQUESTED else _unlisted(node, now_s)
    if (node.started_at_s, node.price_micro_usd_h) != (machine.started_at_s, machine.price_micro_usd_h):
        node = replace(node, started_at_s=machine.started_at_s, price_micro_usd_h=machine.price_micro_usd_h)
    if machine.ended_at_s is not None:
        return _gone(node, machine.ended_at_s, _why_ended(node, machine.reason))
    if node.state is NodeState.REQUESTED:
        node = replace(node, state=NodeState.LAUNCHING, address=machine.address, reason="the provider has it")
    return node if notice is None else _noticed(node, notice)


def from_ray(node: Node, in_ray: RayNode | None, now_s: float) -> Node:
    alive = in_ray if in_ray is not None and in_ray.is_alive else None
    if node.state is NodeState.LAUNCHING and alive is not None:
        node = replace(node, state=NodeState.READY, ready_at_s=now_s, reason="joined Ray")
    if node.state not in (NodeState.READY, NodeState.DRAINING):
        return node
    if alive is None:
        return _without_ray(node, is_listed=in_ray is not None, now_s=now_s)
    address = alive.address or node.address
    if (node.ray_node_id, node.address, node.lost_at_s) != (alive.ray_node_id, address, None):
        node = replace(node, ray_node_id=alive.ray_node_id, address=address, lost_at_s=None)
    if node.state is NodeState.READY and alive.is_draining:
        deadline_s = now_s + DRAINED_BY_OTHERS_S
        return replace(
            node, state=NodeState.DRAINING, drain_deadline_s=deadline_s, reason="drained in Ray by another client"
        )
    return node


def requested(launch: Launch, node_type: NodeType, now_s: float) -> Node:
    """Returns the record of a node whose launch was decided. Store the record before you call the provider."""
    return Node(
        id=launch.node_id,
        type=node_type.name,
        zone=launch.zone,
        market=node_type.market,
        price_micro_usd_h=launch.cost_micro_usd_h or node_type.price_in(launch.zone),
        state=NodeState.REQUESTED,
        requested_at_s=now_s,
        subject=launch.subject,
        reason=launch.reason,
    )


def was_taken_back(node: Node) -> bool:
    """Returns whether the node is a spot node that the provider has reclaimed or is about to reclaim."""
    return node.market is CapacityType.SPOT and (TAKEN_BACK in node.reason or ENDED_BY_PROVIDER in node.reason)


def was_cancelled(node: Node) -> bool:
    """Returns whether raytide itself ended the node before the node could join. Such an end does not count as a failure
    of the node's pool.
    """
    return node.reason.startswith(CANCELLED)


def refused(node: Node, why: str, now_s: float) -> Node:
    """Returns the record of a node whose launch the provider refused. The node never existed, and nothing is billed."""
    return _gone(node, now_s, why)


def drained(node: Node, drain: Drain) -> Node:
    """Returns the record of a node after Ray accepted an idle drain. Call Ray first, because Ray refuses the drain if
    something runs on the node.
    """
    if node.state is not NodeState.READY:
        return node
    return replace(node, state=NodeState.DRAINING, reason=drain.reason)


def terminating(node: Node, terminate: Terminate) -> Node:
    """Returns the record of a node whose termination was decided. Store the record before you call the provider."""
    if node.state is NodeState.GONE:
        return node
    is_cancelled = node.ready_at_s is None and not terminate.reason.startswith(NEVER_JOINED)
    reason = f"{CANCELLED}: {terminate.reason}" if is_cancelled else terminate.reason
    return replace(node, state=NodeState.TERMINATING, reason=reason)


@dataclass(frozen=True, slots=True)
class Overdue:
    """The provider calls that still have to be made. All of these calls are idempotent."""

    launch: tuple[Node, ...] = ()
    terminate: tuple[str, ...] = ()


def overdue(nodes: Iterable[Node], machines: Iterable[Machine]) -> Overdue:
    """Returns the provider calls that are still needed to make the machines agree with the records. Such a call has
    failed, or a crash has prevented it.

    A running machine without a record is terminated. Nothing can be using such a machine, because the record of a
    node is always stored before its machine is bought.
    """
    records: Mapping[str, Node] = {node.id: node for node in nodes}
    listed = {machine.node_id: machine for machine in machines}
    launch = [n for n in records.values() if n.state is NodeState.REQUESTED and n.id not in listed]
    wanted = {n.id for n in records.values() if n.state not in (NodeState.TERMINATING, NodeState.GONE)}
    unwanted = [m.node_id for m in listed.values() if m.ended_at_s is None and m.node_id not in wanted]
    # A provider may have accepted a request that it does not list yet, such as a job in Slurm's queue.
    unlisted = [n.id for n in records.values() if n.state is NodeState.TERMINATING and n.id not in listed]
    return Overdue(tuple(launch), (*unwanted, *unlisted))


def by_node_id(ray_nodes: Iterable[RayNode]) -> dict[str, RayNode]:
    """Returns Ray's nodes, keyed by raytide's node id. If a machine has had several raylets, its entry is the raylet
    that is alive.
    """
    found: dict[str, RayNode] = {}
    for node in ray_nodes:
        if node.node_id:
            known = found.setdefault(node.node_id, node)
            if known is not node and (known.is_alive, known.ray_node_id) <= (node.is_alive, node.ray_node_id):
                found[node.node_id] = node
    return found


def _noticed(node: Node, notice: Notice) -> Node:
    if node.state is NodeState.LAUNCHING:
        return replace(node, state=NodeState.TERMINATING, reason=f"{TAKEN_BACK} before it joined")
    if node.state not in (NodeState.READY, NodeState.DRAINING):
        return node
    known = node.drain_deadline_s
    deadline_s = notice.deadline_s if known is None else min(notice.deadline_s, known)
    return replace(node, state=NodeState.DRAINING, drain_deadline_s=deadline_s, reason=TAKEN_BACK)


def _without_ray(node: Node, *, is_listed: bool, now_s: float) -> Node:
    """Handles a node that is not alive in Ray. A drained raylet that Ray reports dead has left on purpose; other nodes
    get a grace period. A quarantined node keeps its machine.
    """
    if node.quarantined:
        return node
    if node.state is NodeState.DRAINING and is_listed:
        return replace(node, state=NodeState.TERMINATING, reason=f"{node.reason}; its Ray node has left")
    if node.lost_at_s is None:
        return replace(node, lost_at_s=now_s)
    if now_s - node.lost_at_s <= RAY_GRACE_S:
        return node
    return replace(node, state=NodeState.TERMINATING, reason=f"its Ray node has been dead for {RAY_GRACE_S:.0f} s")


def _unlisted(node: Node, now_s: float) -> Node:
    """Ends a node that the provider does not list: its machine is gone, or its end was decided before it was bought."""
    return _gone(node, now_s, _why_ended(node, "it is not listed any more"))


def _why_ended(node: Node, provider_reason: str) -> str:
    """Returns raytide's own reason if raytide asked for the node's end, else the provider's reason."""
    is_requested = node.state in (NodeState.DRAINING, NodeState.TERMINATING)
    return (
        node.reason
        if is_requested
        else f"{ENDED_BY_PROVIDER}: {provider_reason}"
        if provider_reason
        else ENDED_BY_PROVIDER
    )


def _gone(node: Node, ended_at_s: float, reason: str) -> Node:
    return replace(node, state=NodeState.GONE, ended_at_s=ended_at_s, reason=reason)
