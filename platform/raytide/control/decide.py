"""decide(Snapshot) = plan(admit(Snapshot)): the queue admits, then the autoscaler plans, so they cannot race.

Before both it is decided where jobs with a deadline may sit: that is for both of them to keep.
"""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.deadline_jobs import judged
from raytide.autoscaler.planner import plan
from raytide.core.plan import Action, Admit, Grow, Plan, Preempt, Shrink
from raytide.core.snapshot import Snapshot
from raytide.jobs.admit import admit
from raytide.jobs.leases import changed


def decide(snapshot: Snapshot) -> Plan:
    """Everything to be done now, with reasons. Pure: the same snapshot gives the same plan."""
    snapshot = judged(snapshot)
    admissions = admit(snapshot)
    actions = plan(with_leases(snapshot, admissions))
    return Plan(at_s=snapshot.at_s, actions=(*admissions, *actions))


def with_leases(snapshot: Snapshot, actions: tuple[Action, ...]) -> Snapshot:
    """The snapshot as it is once those jobs are admitted, and those seats are given away or back."""
    new = tuple(action.lease for action in actions if isinstance(action, Admit))
    of = {action.lease_id: action for action in actions if isinstance(action, Shrink | Preempt | Grow)}
    old = tuple(changed(x, of[x.id], snapshot.at_s) if x.id in of else x for x in snapshot.leases)
    return replace(snapshot, leases=(*old, *new), next_lease=snapshot.next_lease + len(new))
