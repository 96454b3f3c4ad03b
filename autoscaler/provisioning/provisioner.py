"""Who gets a node, subject by subject: published replicas, leases, and work without a lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.provisioning.plan_builder import Assignment, PlanBuilder
from raytide.core.clock import utc
from raytide.core.objects.gang import Lease, LeaseState, MemberState, Shape
from raytide.core.objects.node import CapacityType, NodeState, NodeType, Resources
from raytide.core.objects.plan import Requeue, Unassign, Wait
from raytide.core.objects.snapshot import Demand, MarketConstraint, Snapshot, Throughputs
from raytide.scheduling import reservations
from raytide.scheduling.diagnosis import Unschedulable, describe_amounts
from raytide.scheduling.lookahead import PendingDemand, PendingShape
from raytide.scheduling.market_constraint import constrain, is_allowed
from raytide.scheduling.replicas import is_replica, replica_shape
from raytide.scheduling.state import Placements

UNMANAGED = "unmanaged"


@dataclass(frozen=True, slots=True)
class UnmanagedPlacement:
    """How work without a lease was seated."""

    node_types: tuple[NodeType, ...]
    """What it may buy,"""
    max_nodes: int
    """how many of them at a time,"""
    bought: int
    """and how many there are."""
    slots: tuple[tuple[str, Resources], ...]
    """The node of each that waits in Ray and has found room."""


def provision_replicas(draft: PlanBuilder) -> None:
    """The room has seated them already; here their nodes are launched, or the reason is said why they wait."""
    for view in draft.snapshot.endpoints:
        name, shape = view.endpoint.name, replica_shape(view)
        if quiet := targets.stale_signal(view, draft.snapshot.at_s):
            draft.actions.append(Wait(name, "signal", quiet, "See that its replicas and the proxies answer."))
        missing = draft.state.missing.get(name, 0)
        seats = draft.state.replicas.get(name, ())
        what = "replicas" if view.endpoint.spec.members == 1 else "members"
        starting = f"{missing} {what} start" if len(seats) == missing else ""
        draft.assign(
            Assignment(name, f"endpoint {name} lacks {missing} x ({describe_amounts(shape)})", seats, starting=starting)
        )
        if len(seats) < missing:
            short, kept = draft.state.why_not(shape, missing - len(seats), f"endpoint {name}"), draft.snapshot.kept
            draft.wait(name, replace(short, reason=short.reason + _keeps(kept.get(name, ()))))
            reservations.reserve(draft.state, kept.get(name, ()))
            draft.nominated.update(node_id for node_id, free in kept.get(name, ()) if free)


def _keeps(kept: reservations.Reservation) -> str:
    nodes = ", ".join(node_id for node_id, _ in kept)
    return f" What falls free on {nodes} is kept for it." if kept else ""


def provision_leases(draft: PlanBuilder) -> None:
    """In the order in which they were admitted."""
    waiting = [(lease, sum(m.state is MemberState.WAITING for m in lease.members)) for lease in draft.snapshot.leases]
    asks = [PendingShape(lease.shape, count) for lease, count in waiting if count]
    draft.state.pending = PendingDemand(draft.state.offerings, asks) if len(asks) > 1 else None
    for lease, count in waiting:
        if count and draft.state.pending is not None:
            draft.state.pending.advance()
        if lease.state is not LeaseState.RELEASED:
            _provision_lease(draft, lease)
    draft.state.pending = None


def _provision_lease(draft: PlanBuilder, lease: Lease) -> None:
    """Nodes for the members that have none: all that are needed for its minimum or none, beyond it what can be had."""
    waiting = tuple(member for member in lease.members if member.state is MemberState.WAITING)
    stance = draft.snapshot.stances.get(lease.job_id)
    if not waiting:
        if stance is None or not _leaves_spot(draft, lease, stance):
            _add_starting_wait(draft, lease)
    else:
        needed = max(0, lease.shape.at_least - lease.member_count)
        subject, shapes = f"gang {lease.job_id}", constrain([_beside_its_members(draft, lease)], stance)
        if stance is not None and not shapes:
            draft.wait(lease.job_id, Unschedulable("deadline", f"{subject} {stance.reason}.", "Nothing to do."))
            return
        paces = draft.snapshot.paces.get(lease.job_id)
        shape, placed = _first_that_fits(draft, shapes, len(waiting), needed, subject, paces)
        if isinstance(placed, Unschedulable):
            draft.wait(lease.job_id, placed)
            if not _has_started(lease) and not _fits_after_yielding(draft, shape, len(waiting), needed):
                _release_lease(draft, lease, placed)
            return
        why = f"{subject} needs {len(waiting)} x ({describe_amounts(lease.shape)})"
        why += f" ({stance.reason})" if stance is not None else ""
        draft.assign(Assignment(lease.id, why, placed, lease, waiting))
        if rest := len(waiting) - len(placed):
            draft.wait(lease.job_id, draft.state.why_not(shape, rest, f"the rest of {subject}"))
    _replace_leaving(draft, lease)


def _first_that_fits(
    draft: PlanBuilder, shapes: Sequence[Shape], count: int, needed: int, subject: str, paces: Throughputs | None
) -> tuple[Shape, Placements | Unschedulable]:
    """Of some shapes, the best first; when none fits, why the first does not."""
    tried = []
    for shape in shapes:
        placed = draft.state.place(shape, count, at_least=needed, subject=subject, paces=paces)
        if placed and not isinstance(placed, Unschedulable):
            return shape, placed
        tried.append((shape, placed))
    return tried[0]


def _leaves_spot(draft: PlanBuilder, lease: Lease, stance: MarketConstraint) -> bool:
    """A gang that still waits for spot nodes leaves them when it had better be on demand by now, and can be."""
    market = {view.node.id: view.node.market for view in draft.snapshot.nodes}
    seated = [member for member in lease.members if member.state is MemberState.ASSIGNED]
    is_on_spot = any(market.get(member.node_id) is CapacityType.SPOT for member in seated)
    is_misplaced = is_on_spot and stance.wanted is CapacityType.ON_DEMAND and is_allowed(lease.shape, stance)
    if _has_started(lease) or not is_misplaced:
        return False
    shape = constrain([lease.shape], stance)[0]
    if isinstance(draft.state.copy().place(shape, lease.shape.at_least, subject=""), Unschedulable):
        return False
    reason = f"its job is {stance.reason}"
    draft.actions += [Unassign(lease.id, member.index, member.node_id, reason) for member in seated]
    return True


def _replace_leaving(draft: PlanBuilder, lease: Lease) -> None:
    """A node that will be taken back is replaced while its member still works there."""
    leaving = [m for m in lease.members if m.state is MemberState.LEAVING and not m.is_yielding]
    if not leaving:
        return
    draining = {view.node.id: view.node for view in draft.snapshot.nodes if view.node.state is NodeState.DRAINING}
    leaving = [member for member in leaving if member.node_id in draining]
    if not leaving:
        return
    subject, stance = f"gang {lease.job_id}", draft.snapshot.stances.get(lease.job_id)
    if not (shapes := constrain([_beside_its_members(draft, lease)], stance)):
        return
    _, placed = _first_that_fits(draft, shapes, len(leaving), 0, subject, draft.snapshot.paces.get(lease.job_id))
    if not isinstance(placed, Unschedulable):
        node = draining[leaving[0].node_id]
        when = f" at {utc(node.drain_deadline_s)}" if node.drain_deadline_s is not None else ""
        why = f"{subject} loses {', '.join(member.node_id for member in leaving)}{when}"
        draft.assign(Assignment(lease.id, why, placed))


def _beside_its_members(draft: PlanBuilder, lease: Lease) -> Shape:
    """Members that join others of their gang must share the label with them."""
    label = lease.shape.together
    seated = {member.node_id for member in lease.members if member.node_id}
    if not label or not seated:
        return lease.shape
    there = {view.labels[label] for view in draft.snapshot.nodes if view.node.id in seated and label in view.labels}
    if len(there) != 1:
        return lease.shape
    labels = {**lease.shape.labels, label: there.pop()}
    return lease.shape.model_copy(update={"labels": labels, "together": ""})


def _release_lease(draft: PlanBuilder, lease: Lease, short: Unschedulable) -> None:
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


def _fits_after_yielding(draft: PlanBuilder, shape: Shape, count: int, needed: int) -> bool:
    """Whether it has room once the seats that give way are left: it was admitted to them, and waits."""
    seats = [(lease, m.node_id) for lease in draft.snapshot.leases for m in lease.members if m.is_yielding]
    if not seats:
        return False
    room = draft.state.copy()
    for lease, node_id in seats:
        room.release(node_id, lease.shape.resources)
    return not isinstance(room.place(shape, count, at_least=needed, subject=""), Unschedulable)


def _has_started(lease: Lease) -> bool:
    return any(member.is_usable or member.state is MemberState.FORMING for member in lease.members)


def _add_starting_wait(draft: PlanBuilder, lease: Lease) -> None:
    assigned = {m.node_id for m in lease.members if m.state is MemberState.ASSIGNED}
    if not assigned:
        return
    ready = {view.node.id for view in draft.snapshot.nodes if view.node.state is NodeState.READY}
    if coming := sorted(assigned - ready):
        draft.actions.append(Wait(lease.job_id, "starting", f"its nodes start: {', '.join(coming)}"))


def provision_unmanaged(draft: PlanBuilder) -> UnmanagedPlacement:
    """Raw tasks, actors and foreign placement groups use what is free, and may buy no more than their cap.

    The largest first: what they leave over is for the small.
    """
    snapshot, cap = draft.snapshot, draft.snapshot.unmanaged
    bought = sum(view.node.subject == UNMANAGED for view in snapshot.nodes)
    menu = [t for t in snapshot.node_types if cap.gpu or not t.resources.get("GPU")]
    demands = [d for d in snapshot.demand if _is_unmanaged(d)]
    most = {name: max(t.resources.get(name, 0.0) for t in snapshot.node_types) for t in menu for name in t.resources}
    demands.sort(key=lambda demand: -_size(demand, most))
    shapes = [Shape.computed(d.resources, d.labels, d.together) for d in demands]
    in_menu = frozenset(node_type.name for node_type in menu)
    asks = [PendingShape(shape, demand.count, in_menu) for shape, demand in zip(shapes, demands, strict=True)]
    draft.state.pending = PendingDemand(draft.state.offerings, asks) if asks else None
    seats: list[tuple[str, Resources]] = []
    fellows = _bundle_nodes(snapshot, {demand.apart for demand in demands if demand.apart})
    broken: dict[str, bool] = {}  # groups that cannot be had whole
    for demand, shape in zip(demands, shapes, strict=True):
        assert draft.state.pending is not None
        draft.state.pending.advance()
        what = f"work without a lease ({demand.count} x ({describe_amounts(shape)}){' apart' if demand.apart else ''})"
        before, left = draft.state.next_node, max(0, cap.max_nodes - bought)
        if demand.apart and demand.apart not in broken:
            group = [(d, s) for d, s in zip(demands, shapes, strict=True) if d.apart == demand.apart]
            broken[demand.apart] = not _fits_whole(draft, group, fellows[demand.apart], menu, left)
        placed = draft.state.place(
            shape,
            0 if broken.get(demand.apart) else demand.count,
            at_least=demand.count if demand.together or demand.apart else 0,
            menu=menu,
            max_new=left,
            subject=what,
            apart=fellows[demand.apart] if demand.apart else None,
        )
        placed = () if isinstance(placed, Unschedulable) else placed
        bought += draft.state.next_node - before
        if demand.apart:
            fellows[demand.apart] |= {seat.node_id for seat in placed}
        seats += [(seat.node_id, shape.resources) for seat in placed]
        draft.assign(Assignment(UNMANAGED, f"{what} finds no room", placed))
        if rest := demand.count - len(placed):
            is_whole = bool(demand.together or demand.apart)
            is_capped = bought >= cap.max_nodes or (is_whole and _fits_without_cap(draft, demand, shape, menu))
            add_unmanaged_wait(draft, shape, rest, what, is_capped=is_capped)
    return UnmanagedPlacement(tuple(menu), cap.max_nodes, bought, tuple(seats))


def _bundle_nodes(snapshot: Snapshot, groups: set[str]) -> dict[str, frozenset[str]]:
    """The nodes on which each of these groups has a bundle already: it lost others."""
    found = {group: set[str]() for group in groups}
    for view in snapshot.nodes if groups else ():
        for group in groups & view.labels.keys():
            found[group].add(view.node.id)
    return {group: frozenset(nodes) for group, nodes in found.items()}


def _is_unmanaged(demand: Demand) -> bool:
    is_work = not is_replica(demand) and not demand.is_standing
    return is_work and any(amount > 0 for amount in demand.resources.values())


def _fits_whole(
    draft: PlanBuilder, group: list[tuple[Demand, Shape]], fellows: frozenset[str], menu: list[NodeType], left: int
) -> bool:
    """Whether all bundles that must be apart find room when so many nodes may be bought: some of them are of no use."""
    if len(group) < 2:
        return True  # it is asked for whole anyhow
    room = draft.state.copy()
    room.pending = None
    if room.offerings.launches_left:
        room.offerings.launches_left = None  # the rest follows within minutes
    for demand, shape in group:
        before = room.next_node
        seats = room.place(shape, demand.count, menu=menu, max_new=left, subject=UNMANAGED, apart=fellows)
        if isinstance(seats, Unschedulable):
            return False
        left -= room.next_node - before
        fellows |= {seat.node_id for seat in seats}
    return True


def _fits_without_cap(draft: PlanBuilder, demand: Demand, shape: Shape, menu: list[NodeType]) -> bool:
    room, apart = draft.state.copy(), frozenset[str]() if demand.apart else None
    return not isinstance(room.place(shape, demand.count, menu=menu, subject=UNMANAGED, apart=apart), Unschedulable)


def _size(demand: Demand, most: dict[str, float]) -> float:
    """Of one, as the largest share that it takes of the largest node."""
    return max((amount / most[name] for name, amount in demand.resources.items() if most.get(name)), default=0.0)


def add_unmanaged_wait(draft: PlanBuilder, shape: Shape, rest: int, what: str, *, is_capped: bool) -> None:
    cap = draft.snapshot.unmanaged
    short = draft.state.why_not(shape, rest, what)
    if short.constraint == "impossible":
        draft.wait(UNMANAGED, short)
        return
    if not is_capped and (cap.gpu or not shape.resources.get("GPU")):
        draft.wait(UNMANAGED, short)
        return
    kinds = "nodes" if cap.gpu else "nodes without a GPU"
    reason = f"{what} waits: it may buy {cap.max_nodes} {kinds} (metadata.raytide.unmanaged)"
    draft.actions.append(Wait(UNMANAGED, "cap", reason, "Submit it as a job, or raise the cap."))
