"""The decision of one tick. Each step works on the result of the step before, so the steps cannot contradict each
other.

First, jobs with a deadline get their market constraints, and nodes above the fleet's cost limit are drained. Second,
endpoints get their target numbers of replicas. Third, the queue admits, preempts and grows gangs. Last, the autoscaler
plans nodes and placements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytide.autoscaler.deadlines.jobs import with_market_constraints
from raytide.autoscaler.disruption import consolidation
from raytide.autoscaler.disruption.cost_limit import enforce_cost_limit, without
from raytide.autoscaler.endpoints.targets import set_targets
from raytide.autoscaler.planner import plan
from raytide.autoscaler.provisioning.alternatives import data_transfer
from raytide.control.views import Waiting
from raytide.core.objects.gang import Lease, LeaseState, Shape
from raytide.core.objects.plan import UNMANAGED, Action, Admit, Grow, Plan, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.queue.admission.scheduler import schedule, within_member_cap
from raytide.queue.lifecycle.leases import apply_action
from raytide.queue.lifecycle.pending_reason import why_forming
from raytide.scheduling.offerings import Offering, OfferingTable
from raytide.scheduling.reservations import with_reservations
from raytide.scheduling.state import SchedulingState

_REMEDY = "Correct `pip` in the spec, or pip's configuration on the nodes, and serve it again."
_TRIED_AGAIN = "It is tried again: see that the nodes reach the package index and have free space."


def decide(snapshot: Snapshot) -> Plan:
    """Returns all actions of this tick, with reasons. The same snapshot always gives the same plan."""
    return decide_constrained(with_market_constraints(snapshot))


def decide_constrained(seen: Snapshot) -> Plan:
    """Returns the plan of `decide` for a snapshot that already has its market constraints."""
    seen, over_cap = within_member_cap(seen)
    shed = enforce_cost_limit(seen)
    seen = with_leases(without(seen, shed), shed) if shed else seen
    published, scales = set_targets(seen)
    room = SchedulingState.from_snapshot(published)
    published = with_reservations(published, room)
    admissions = schedule(published, consolidation.with_reserved(published, room))
    is_room_valid = all(isinstance(action, Admit | Wait) for action in admissions)  # no member yields or comes back
    actions = plan(with_leases(published, admissions), room if is_room_valid else None)
    return Plan(at_s=seen.at_s, actions=(*shed, *scales, *admissions, *over_cap, *actions))


def with_leases(snapshot: Snapshot, actions: tuple[Action, ...]) -> Snapshot:
    """Returns the snapshot as it will be after these actions. Only actions that admit, preempt, shrink or grow gangs
    are applied."""
    new = tuple(action.lease for action in actions if isinstance(action, Admit))
    leases = {lease.id: lease for lease in snapshot.leases}
    for action in actions:
        if isinstance(action, Shrink | Preempt | Grow):
            leases[action.lease_id] = apply_action(leases[action.lease_id], action, snapshot.at_s)
    return replace(snapshot, leases=(*leases.values(), *new), next_lease=snapshot.next_lease + len(new))


def waiting_reasons(snapshot: Snapshot, plan: Plan, starts: Mapping[str, float]) -> dict[str, Waiting]:
    """Returns for each waiting job, lease or endpoint the reason why it waits. The reason comes from the plan. For an
    admitted job, the reason says why the job's lease is not active yet."""
    waiting = {
        a.subject: Waiting(a.constraint, a.reason, a.remedy, starts.get(a.subject))
        for a in plan.actions
        if isinstance(a, Wait)
    }
    unmanaged = [a for a in plan.actions if isinstance(a, Wait) and a.subject == UNMANAGED]
    if unmanaged:  # one Wait for each kind of work
        reasons = " ".join(dict.fromkeys(f"{a.reason}." for a in unmanaged))
        waiting[UNMANAGED] = Waiting(unmanaged[0].constraint, reasons, unmanaged[0].remedy)
    for view in snapshot.endpoints:
        load = view.load
        if load is not None and (failed := load.install) is not None and load.ready < view.endpoint.target_replicas:
            waiting[view.endpoint.name] = Waiting("packages", failed.why, _REMEDY if failed.is_final else _TRIED_AGAIN)
    leases = {lease.job_id: lease for lease in snapshot.leases if lease.state is not LeaseState.ACTIVE}
    is_yielding = any(member.gives_way for lease in snapshot.leases for member in lease.members)
    for job in snapshot.jobs:
        if job.id in leases and not job.stop_requested and (is_yielding or job.id not in waiting):
            found = why_forming(job, leases[job.id], snapshot)
            if job.id not in waiting or found.wait_s is not None:
                waiting[job.id] = Waiting(found.constraint, found.reason, found.remedy, found.wait_s)
    return waiting


def data_costs(snapshot: Snapshot) -> dict[str, str]:
    """Returns, by job id, a text with the hourly cost of moving a job's data to its nodes. Jobs without such a cost are
    left out. If a job has no nodes yet, the text is for the cheapest nodes that could be bought.
    """
    if snapshot.transfer is None:
        return {}
    table = OfferingTable.from_snapshot(snapshot)
    pools = {(each.node_type.name, each.zone): each for each in table.offerings}
    pool_of = {view.node.id: pools.get((view.node.type, view.node.zone)) for view in snapshot.nodes}
    leases = {lease.job_id: lease for lease in snapshot.leases}
    found = {}
    for job in snapshot.jobs:
        lease = leases.get(job.id)
        shape = job.spec.gang.shapes[0] if lease is None else lease.shape
        if not shape.inputs:
            continue
        costs = {each.name: data_transfer(table, each, shape) for each in _pools(table, shape, lease, pool_of)}
        found[job.id] = "; ".join(
            f"{cost}/h a member on {name}: {paid}" for name, (cost, paid) in costs.items() if paid
        )
    return {job_id: words for job_id, words in found.items() if words}


def _pools(
    table: OfferingTable, shape: Shape, lease: Lease | None, pool_of: Mapping[str, Offering | None]
) -> list[Offering]:
    """Returns the offerings on which a lease's nodes run; without nodes, the cheapest offering for the shape."""
    if lease is not None and (own := [pool for m in lease.members if (pool := pool_of.get(m.node_id)) is not None]):
        return own
    data = table.data_cost((shape,))
    fits = table.offerings_for(shape)
    costs = [(each.cost_micro_usd_h / min(fit, shape.members) + data[each.row], each.name) for each, fit in fits]
    return [fits[costs.index(min(costs))][0]] if costs else []
