"""Provisions nodes for replicas and leases. unmanaged.py provisions nodes for work without a lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytide.autoscaler.endpoints import targets
from raytide.autoscaler.provisioning.plan_builder import Assignment, PlanBuilder
from raytide.core.clock import utc
from raytide.core.objects.gang import Lease, LeaseState, MemberState, Shape
from raytide.core.objects.node import CapacityType, NodeState
from raytide.core.objects.plan import Requeue, Unassign, Wait
from raytide.core.objects.snapshot import MarketConstraint, Throughputs
from raytide.scheduling import reservations
from raytide.scheduling.diagnosis import Unschedulable, describe_amounts
from raytide.scheduling.lookahead import PendingDemand, PendingShape
from raytide.scheduling.market_constraint import constrain, is_allowed
from raytide.scheduling.replicas import replica_shape
from raytide.scheduling.state import Placements


def provision_replicas(builder: PlanBuilder) -> None:
    """Launches nodes for replicas that do not run yet and fit on no existing node. If a replica must wait, the plan
    says why.

    `SchedulingState` has already placed the replicas.
    """
    for view in builder.snapshot.endpoints:
        name, shape = view.endpoint.name, replica_shape(view)
        if stale := targets.stale_signal(view, builder.snapshot.at_s):
            builder.actions.append(Wait(name, "signal", stale, "See that its replicas and the proxies answer."))
        missing = builder.state.missing.get(name, 0)
        slots = builder.state.replicas.get(name, ())
        what = "replicas" if view.endpoint.spec.members == 1 else "members"
        starting = f"{missing} {what} start" if len(slots) == missing else ""
        builder.assign(
            Assignment(name, f"endpoint {name} lacks {missing} x ({describe_amounts(shape)})", slots, starting=starting)
        )
        if len(slots) < missing:
            unschedulable, reserved = (
                builder.state.why_not(shape, missing - len(slots), f"endpoint {name}"),
                builder.snapshot.kept,
            )
            builder.wait(name, replace(unschedulable, reason=unschedulable.reason + _keeps(reserved.get(name, ()))))
            reservations.reserve(builder.state, reserved.get(name, ()))
            builder.nominated.update(node_id for node_id, free in reserved.get(name, ()) if free)


def _keeps(reserved: reservations.Reservation) -> str:
    nodes = ", ".join(node_id for node_id, _ in reserved)
    return f" Resources that become free on {nodes} are reserved for it." if reserved else ""


def provision_leases(builder: PlanBuilder) -> None:
    """Provisions leases in order of admission. Each purchase takes the demand of the later leases into account."""
    waiting = [(lease, sum(m.state is MemberState.WAITING for m in lease.members)) for lease in builder.snapshot.leases]
    pending = [PendingShape(lease.shape, count) for lease, count in waiting if count]
    builder.state.pending = PendingDemand(builder.state.offerings, pending) if len(pending) > 1 else None
    for lease, count in waiting:
        if count:
            builder.state.advance()
        if lease.state is not LeaseState.RELEASED:
            _provision_lease(builder, lease)
    builder.state.forget_pending()


def _provision_lease(builder: PlanBuilder, lease: Lease) -> None:
    """Assigns nodes to waiting members: to all members of the gang's minimum or to none, then to as many further
    members as fit.
    """
    waiting = tuple(member for member in lease.members if member.state is MemberState.WAITING)
    constraint = builder.snapshot.stances.get(lease.job_id)
    if not waiting:
        if constraint is None or not _leaves_spot(builder, lease, constraint):
            _add_starting_wait(builder, lease)
    else:
        needed = max(0, lease.shape.at_least - lease.member_count)
        subject, shapes = f"gang {lease.job_id}", constrain([_beside_its_members(builder, lease)], constraint)
        if constraint is not None and not shapes:
            builder.wait(lease.job_id, Unschedulable("deadline", f"{subject} {constraint.reason}.", "Nothing to do."))
            return
        paces = builder.snapshot.paces.get(lease.job_id)
        shape, placed = _first_that_fits(builder, shapes, len(waiting), needed, subject, paces)
        if isinstance(placed, Unschedulable):
            builder.wait(lease.job_id, placed)
            if not _has_started(lease) and not _fits_after_yielding(builder, shape, len(waiting), needed):
                _release_lease(builder, lease, placed)
            return
        reason = f"{subject} needs {len(waiting)} x ({describe_amounts(lease.shape)})"
        reason += f" ({constraint.reason})" if constraint is not None else ""
        builder.assign(Assignment(lease.id, reason, placed, lease, waiting))
        if rest := len(waiting) - len(placed):
            builder.wait(lease.job_id, builder.state.why_not(shape, rest, f"the rest of {subject}"))
    _replace_leaving(builder, lease)


def _first_that_fits(
    builder: PlanBuilder, shapes: Sequence[Shape], count: int, needed: int, subject: str, paces: Throughputs | None
) -> tuple[Shape, Placements | Unschedulable]:
    """Returns the first shape that fits, with its slots; if none fits, the first shape with the reason
    why it does not.
    """
    tried = []
    for shape in shapes:
        placed = builder.state.place(shape, count, at_least=needed, subject=subject, paces=paces)
        if placed and not isinstance(placed, Unschedulable):
            return shape, placed
        tried.append((shape, placed))
    return tried[0]


def _leaves_spot(builder: PlanBuilder, lease: Lease, constraint: MarketConstraint) -> bool:
    """Unassigns the spot nodes of a gang that has not formed yet, if its deadline now requires on-demand that fits."""
    market = {view.node.id: view.node.market for view in builder.snapshot.nodes}
    assigned = [member for member in lease.members if member.state is MemberState.ASSIGNED]
    is_on_spot = any(market.get(member.node_id) is CapacityType.SPOT for member in assigned)
    is_misplaced = is_on_spot and constraint.wanted is CapacityType.ON_DEMAND and is_allowed(lease.shape, constraint)
    if _has_started(lease) or not is_misplaced:
        return False
    shape = constrain([lease.shape], constraint)[0]
    if isinstance(builder.state.copy().place(shape, lease.shape.at_least, subject=""), Unschedulable):
        return False
    reason = f"its job is {constraint.reason}"
    builder.actions += [Unassign(lease.id, member.index, member.node_id, reason) for member in assigned]
    return True


def _replace_leaving(builder: PlanBuilder, lease: Lease) -> None:
    """Buys replacements for draining nodes while their members still run."""
    leaving = [m for m in lease.members if m.state is MemberState.LEAVING and not m.gives_way]
    if not leaving:
        return
    draining = {view.node.id: view.node for view in builder.snapshot.nodes if view.node.state is NodeState.DRAINING}
    leaving = [member for member in leaving if member.node_id in draining]
    if not leaving:
        return
    subject, constraint = f"gang {lease.job_id}", builder.snapshot.stances.get(lease.job_id)
    if not (shapes := constrain([_beside_its_members(builder, lease)], constraint)):
        return
    _, placed = _first_that_fits(builder, shapes, len(leaving), 0, subject, builder.snapshot.paces.get(lease.job_id))
    if not isinstance(placed, Unschedulable):
        node = draining[leaving[0].node_id]
        when = f" at {utc(node.drain_deadline_s)}" if node.drain_deadline_s is not None else ""
        reason = f"{subject} loses {', '.join(member.node_id for member in leaving)}{when}"
        builder.assign(Assignment(lease.id, reason, placed))


def _beside_its_members(builder: PlanBuilder, lease: Lease) -> Shape:
    """Returns the shape with the label value that the gang's placed members share, so that the remaining members join
    them.
    """
    label = lease.shape.together
    assigned = {member.node_id for member in lease.members if member.node_id}
    if not label or not assigned:
        return lease.shape
    there = {view.labels[label] for view in builder.snapshot.nodes if view.node.id in assigned and label in view.labels}
    if len(there) != 1:
        return lease.shape
    labels = {**lease.shape.labels, label: there.pop()}
    return lease.shape.model_copy(update={"labels": labels, "together": ""})


def _release_lease(builder: PlanBuilder, lease: Lease, unschedulable: Unschedulable) -> None:
    """Unassigns the nodes of a gang that has too few of them to form, so that a launch that half failed occupies
    nothing.

    If its pools are out of stock and the job has alternative shapes, the job is requeued to try them.
    """
    for member in lease.members:
        if member.state is MemberState.ASSIGNED:
            reason = f"the rest of its gang cannot be placed: {unschedulable.reason}"
            builder.actions.append(Unassign(lease.id, member.index, member.node_id, reason))

    job = next((job for job in builder.snapshot.jobs if job.id == lease.job_id), None)
    if unschedulable.constraint == "stock" and job is not None and len(job.spec.gang.shapes) > 1:
        reason = f"{lease.shape.describe()} is unavailable ({unschedulable.reason}); its other shapes are tried next"
        builder.actions.append(Requeue(job.id, lease.id, reason))


def _fits_after_yielding(builder: PlanBuilder, shape: Shape, count: int, needed: int) -> bool:
    """Returns whether the lease fits once yielding members have left: it was admitted to their nodes and has to wait
    for them.
    """
    slots = [(lease, m.node_id) for lease in builder.snapshot.leases for m in lease.members if m.gives_way]
    if not slots:
        return False
    state = builder.state.copy()
    for lease, node_id in slots:
        state.release(node_id, lease.shape.resources)
    return not isinstance(state.place(shape, count, at_least=needed, subject=""), Unschedulable)


def _has_started(lease: Lease) -> bool:
    return any(member.is_usable or member.state is MemberState.FORMING for member in lease.members)


def _add_starting_wait(builder: PlanBuilder, lease: Lease) -> None:
    assigned = {m.node_id for m in lease.members if m.state is MemberState.ASSIGNED}
    if not assigned:
        return
    ready = {view.node.id for view in builder.snapshot.nodes if view.node.state is NodeState.READY}
    if coming := sorted(assigned - ready):
        builder.actions.append(Wait(lease.job_id, "starting", f"its nodes start: {', '.join(coming)}"))
