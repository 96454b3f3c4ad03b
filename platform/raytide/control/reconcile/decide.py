"""decide(Snapshot) = plan(admit(publish(Snapshot))): endpoints get their targets, the queue admits, shrinks and grows,
then the autoscaler plans, so they cannot race.

Before all it is decided where jobs with a deadline may sit, and what the fleet may not cost any more goes: that is for
all of them to keep.
"""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.deadlines.jobs import with_market_constraints
from raytide.autoscaler.disruption import consolidation
from raytide.autoscaler.disruption.cost_limit import enforce_cost_limit, without
from raytide.autoscaler.endpoints.targets import set_targets
from raytide.autoscaler.planner import plan
from raytide.core.objects.plan import Action, Admit, Grow, Plan, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.jobs.admission.member_cap import within_member_cap
from raytide.jobs.admission.scheduler import schedule
from raytide.jobs.lifecycle.leases import apply_action
from raytide.scheduling.reservations import with_reservations
from raytide.scheduling.state import SchedulingState


def decide(snapshot: Snapshot) -> Plan:
    """Everything to be done now, with reasons. Pure: the same snapshot gives the same plan."""
    return decide_constrained(with_market_constraints(snapshot))


def decide_constrained(seen: Snapshot) -> Plan:
    """The same, of a snapshot that has its stances already."""
    seen, over_cap = within_member_cap(seen)
    given_up = enforce_cost_limit(seen)
    seen = with_leases(without(seen, given_up), given_up) if given_up else seen
    published, scales = set_targets(seen)
    room = SchedulingState.of(published)
    published = with_reservations(published, room)
    admissions = schedule(published, consolidation.with_reserved(published, room))
    are_seats_as_before = all(isinstance(action, Admit | Wait) for action in admissions)
    actions = plan(with_leases(published, admissions), room if are_seats_as_before else None)
    return Plan(at_s=seen.at_s, actions=(*given_up, *scales, *admissions, *over_cap, *actions))


def with_leases(snapshot: Snapshot, actions: tuple[Action, ...]) -> Snapshot:
    """The snapshot as it is once those jobs are admitted, and those seats are given away or back."""
    new = tuple(action.lease for action in actions if isinstance(action, Admit))
    leases = {lease.id: lease for lease in snapshot.leases}
    for action in actions:
        if isinstance(action, Shrink | Preempt | Grow):
            leases[action.lease_id] = apply_action(leases[action.lease_id], action, snapshot.at_s)
    return replace(snapshot, leases=(*leases.values(), *new), next_lease=snapshot.next_lease + len(new))
