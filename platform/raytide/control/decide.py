"""decide(Snapshot) = plan(admit(Snapshot)): the queue admits, then the autoscaler plans, so they cannot race."""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.planner import plan
from raytide.core.plan import Action, Admit, Plan
from raytide.core.snapshot import Snapshot
from raytide.jobs.admit import admit


def decide(snapshot: Snapshot) -> Plan:
    """Everything to be done now, with reasons. Pure: the same snapshot gives the same plan."""
    admissions = admit(snapshot)
    actions = plan(with_leases(snapshot, admissions))
    return Plan(at_s=snapshot.at_s, actions=(*admissions, *actions))


def with_leases(snapshot: Snapshot, actions: tuple[Action, ...]) -> Snapshot:
    """The snapshot as it is once those jobs are admitted."""
    leases = tuple(action.lease for action in actions if isinstance(action, Admit))
    return replace(snapshot, leases=(*snapshot.leases, *leases), next_lease=snapshot.next_lease + len(leases))
