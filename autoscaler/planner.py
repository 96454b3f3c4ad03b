"""The autoscaler's decision: one pure function from a Snapshot to actions, each with its reason in words.

Order is priority: replicas that were published, leases as they were admitted, work without a lease, then the minimum of
each node type; what nobody was promised and has been idle for long enough goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytide.autoscaler import endpoints, shrink
from raytide.core.fleet import NodeState
from raytide.core.gang import Lease, LeaseState, MemberState, Shape
from raytide.core.money import format_usd
from raytide.core.plan import Action, Assign, Launch, Requeue, Scale, Terminate, Unassign, Wait
from raytide.core.replicas import is_replica, missing_replicas, replica_shape
from raytide.core.room import Placements, Room, Seat
from raytide.core.shortfall import Shortfall, amounts
from raytide.core.snapshot import Snapshot

UNMANAGED = "unmanaged"
MINIMUM = "minimum"


def plan(snapshot: Snapshot) -> tuple[Action, ...]:
    """What to do now. `snapshot.leases` already holds those that this decision admitted."""
    if not snapshot.ray_answers:
        reason = "Ray does not answer; nodes, leases and replicas stay as they are, only deadlines are kept"
        return (*shrink.past_deadline(snapshot), Wait("cluster", "signal", reason, "See `raytide doctor`."))
    scales = [scale for view in snapshot.endpoints if (scale := endpoints.decide(view, snapshot.at_s))]
    ends = tuple(shrink.overdue(snapshot))
    snapshot = _ended(_published(snapshot, scales), {end.node_id for end in ends if isinstance(end, Terminate)})
    draft = _Draft(snapshot, Room.of(snapshot), [*ends, *scales])
    _seat_replicas(draft)
    for lease in snapshot.leases:
        _seat_lease(draft, lease)
    _seat_unmanaged(draft)
    _keep_minimum(draft)
    draft.actions += shrink.idle(snapshot, keep=draft.promised)
    return tuple(draft.actions)


@dataclass(slots=True)
class _Draft:
    snapshot: Snapshot
    room: Room
    actions: list[Action]
    promised: set[str] = field(default_factory=set)
    """Nodes that this plan counts on: bought by it, or seating somebody whom Ray does not show there yet."""

    def promise(self, placed: Placements, subject: str, why: str) -> None:
        """Launch the new nodes among the seats, once each, and keep all of them."""
        for seat in placed:
            if seat.is_new and seat.node_id not in self.promised:
                self.actions.append(self._launch(seat, subject, why))
            self.promised.add(seat.node_id)

    def wait(self, subject: str, short: Shortfall) -> None:
        self.actions.append(Wait(subject, short.constraint, short.reason, short.remedy))

    def _launch(self, seat: Seat, subject: str, why: str) -> Launch:
        node_type = next(t for t in self.snapshot.node_types if t.name == seat.node_type)
        price = f"{node_type.market} at {format_usd(node_type.price_micro_usd_h)}/h"
        reason = f"{why}; {seat.node_type} in {seat.zone} ({price}) is the cheapest to be had"
        return Launch(seat.node_id, seat.node_type, seat.zone, subject, reason)


def _published(snapshot: Snapshot, scales: list[Scale]) -> Snapshot:
    """The snapshot once the new targets hold, so that their replicas are seated in this same plan."""
    by_name = {scale.endpoint: scale for scale in scales}
    views = tuple(
        replace(view, endpoint=endpoints.scaled(view.endpoint, by_name[view.endpoint.name]))
        if view.endpoint.name in by_name
        else view
        for view in snapshot.endpoints
    )
    return replace(snapshot, endpoints=views)


def _ended(snapshot: Snapshot, node_ids: set[str]) -> Snapshot:
    """The snapshot once these nodes are being ended, so that nobody is seated on them."""
    views = tuple(
        replace(view, node=replace(view.node, state=NodeState.TERMINATING)) if view.node.id in node_ids else view
        for view in snapshot.nodes
    )
    return replace(snapshot, nodes=views)


def _seat_replicas(draft: _Draft) -> None:
    """The room has seated them already; here their nodes are launched, or the reason is said why they wait."""
    for view in draft.snapshot.endpoints:
        name, shape = view.endpoint.name, replica_shape(view)
        if quiet := endpoints.silence(view, draft.snapshot.at_s):
            draft.actions.append(Wait(name, "signal", quiet, "See that its replicas and the proxies answer."))
        missing = missing_replicas(view, draft.snapshot)
        seats = draft.room.replicas.get(name, ())
        draft.promise(seats, name, f"endpoint {name} lacks {missing} x ({amounts(shape)})")
        if len(seats) < missing:
            draft.wait(name, draft.room.why_not(shape, missing - len(seats), f"endpoint {name}"))
        elif seats:
            draft.actions.append(Wait(name, "starting", f"{missing} replicas start on {_nodes(seats)}"))


def _seat_lease(draft: _Draft, lease: Lease) -> None:
    """Nodes for the members that have none: all that are needed for its minimum or none, beyond it what can be had."""
    if lease.state is LeaseState.RELEASED:
        return
    waiting = [member for member in lease.members if member.state is MemberState.WAITING]
    if not waiting:
        _say_starting(draft, lease)
        return
    needed = max(0, lease.shape.at_least - (len(lease.members) - len(waiting)))
    subject = f"gang {lease.job_id}"
    placed = draft.room.place(lease.shape, len(waiting), at_least=needed, subject=subject)
    if isinstance(placed, Shortfall):
        draft.wait(lease.job_id, placed)
        if not _stands(lease):
            _give_back(draft, lease, placed)
        return
    draft.promise(placed, lease.id, f"{subject} needs {len(waiting)} x ({amounts(lease.shape)})")
    for member, seat in zip(waiting, placed, strict=False):
        there = "bought for it" if seat.is_new else "has room"
        draft.actions.append(Assign(lease.id, member.index, seat.node_id, f"{seat.node_id} ({seat.node_type}) {there}"))
    if rest := len(waiting) - len(placed):
        short = draft.room.why_not(lease.shape, rest, f"the rest of {subject}")
        draft.wait(lease.job_id, short)


def _give_back(draft: _Draft, lease: Lease, short: Shortfall) -> None:
    """A launch transaction that failed half-way ends here: a gang of which nothing stands yet lets go of its nodes.

    When its pools are out of stock and the job named other shapes, they get their turn.
    """
    for member in lease.members:
        if member.state is MemberState.ASSIGNED:
            reason = f"the rest of its gang cannot be placed: {short.reason}"
            draft.actions.append(Unassign(lease.id, member.index, member.node_id, reason))

    job = next((job for job in draft.snapshot.jobs if job.id == lease.job_id), None)
    if short.constraint == "stock" and job is not None and len(job.spec.gang.shapes) > 1:
        reason = f"{lease.shape.describe()} cannot be had ({short.reason}); its other shapes get their turn"
        draft.actions.append(Requeue(job.id, lease.id, reason))


def _stands(lease: Lease) -> bool:
    return any(member.is_usable or member.state is MemberState.FORMING for member in lease.members)


def _say_starting(draft: _Draft, lease: Lease) -> None:
    ready = {view.node.id for view in draft.snapshot.nodes if view.node.state is NodeState.READY}
    coming = sorted({m.node_id for m in lease.members if m.state is MemberState.ASSIGNED and m.node_id not in ready})
    if coming:
        draft.actions.append(Wait(lease.job_id, "starting", f"its nodes start: {', '.join(coming)}"))


def _seat_unmanaged(draft: _Draft) -> None:
    """Raw tasks, actors and foreign placement groups use what is free, and may buy no more than their cap."""
    snapshot, cap = draft.snapshot, draft.snapshot.unmanaged
    bought = sum(view.node.subject == UNMANAGED for view in snapshot.nodes)
    menu = [t for t in snapshot.node_types if cap.gpu or not t.resources.get("GPU")]
    for demand in snapshot.demand:
        if is_replica(demand) or not any(amount > 0 for amount in demand.resources.values()):
            continue
        shape = Shape(resources=dict(demand.resources), labels=dict(demand.labels))
        what = f"work without a lease ({demand.count} x ({amounts(shape)}))"
        before = draft.room.next_node
        placed = draft.room.place(
            shape, demand.count, at_least=0, menu=menu, max_new=max(0, cap.max_nodes - bought), subject=what
        )
        if isinstance(placed, Shortfall):
            continue  # not with at_least=0
        bought += draft.room.next_node - before
        draft.promise(placed, UNMANAGED, f"{what} finds no room")
        if rest := demand.count - len(placed):
            _say_unmanaged(draft, shape, rest, what, is_capped=bought >= cap.max_nodes)


def _say_unmanaged(draft: _Draft, shape: Shape, rest: int, what: str, *, is_capped: bool) -> None:
    cap = draft.snapshot.unmanaged
    short = draft.room.why_not(shape, rest, what)
    if short.constraint == "impossible":
        draft.wait(UNMANAGED, short)
        return
    if not is_capped and (cap.gpu or not shape.resources.get("GPU")):
        draft.wait(UNMANAGED, short)
        return
    kinds = "nodes" if cap.gpu else "nodes without a GPU"
    reason = f"{what} waits: it may buy {cap.max_nodes} {kinds} (metadata.raytide.unmanaged)"
    draft.actions.append(Wait(UNMANAGED, "cap", reason, "Submit it as a job, or raise the cap."))


def _keep_minimum(draft: _Draft) -> None:
    for node_type in draft.snapshot.node_types:
        there = sum(place.seat.node_type == node_type.name for place in draft.room.places)
        for _ in range(node_type.min_nodes - there):
            if (seat := draft.room.buy(node_type)) is None:
                break
            draft.promise((seat,), MINIMUM, f"min_nodes of {node_type.name} is {node_type.min_nodes}")


def _nodes(seats: Placements) -> str:
    return ", ".join(dict.fromkeys(seat.node_id for seat in seats))
