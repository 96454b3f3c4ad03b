"""Explains why an admitted job has not started, and what would help. The reason of a queued job is in the queue's Wait
action.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raytide.core.clock import utc
from raytide.core.objects.gang import Lease, Member, MemberState
from raytide.core.objects.job import Job
from raytide.core.objects.node import NodeState
from raytide.core.objects.snapshot import Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.state import SchedulingState


@dataclass(frozen=True, slots=True)
class PendingReason:
    constraint: str
    """The first unmet constraint, as in `Wait`."""
    reason: str
    remedy: str = ""
    """The nearest change that would meet it."""
    wait_s: float | None = None
    """The seconds until the job would start if no other job came; None if unknown."""


def why_forming(job: Job, lease: Lease, snapshot: Snapshot) -> PendingReason:
    """Returns the reason why an admitted job has not started. There are four possible reasons: members of the job lack
    nodes, other jobs are still leaving the job's slots, the job's nodes are not ready, or Ray is still creating the
    job's placement groups.
    """
    waiting = [member for member in lease.members if member.state is MemberState.WAITING]
    needed = lease.shape.at_least - lease.member_count
    if needed > 0 and waiting:
        room = SchedulingState.from_snapshot(snapshot)
        found = room.place(lease.shape, needed, subject=job.id)
        if isinstance(found, Unschedulable):
            return _vacated(snapshot) or PendingReason(found.constraint, found.reason, found.remedy)
    parts = [f"{lease.id} has {len(lease.usable)} of {lease.shape.at_least} members that it needs"]
    parts += [_waits_for(m, snapshot) for m in lease.members if not (m.is_usable or m.is_parked)]
    remedy = "No action needed: it continues when they are ready."
    return PendingReason("starting", "; ".join(dict.fromkeys(parts)) + ".", remedy)


def given_away_text(lease: Lease) -> str:
    """Returns a text that names the jobs and endpoints to which the lease has yielded members. The text is empty if the
    lease has all of its members.
    """
    to = Counter(member.given_to for member in lease.members if member.gives_way or member.is_parked)
    gpus = lease.shape.resources.get("GPU", 0.0)
    each, what = (gpus, "GPUs") if gpus else (1.0, "members")
    return "; ".join(
        f"it gave {count * each:g} of {len(lease.members) * each:g} {what} to "
        + (name if _is_job(name) else f"endpoint {name} until its load falls")
        for name, count in to.items()
        if name
    )


def _is_job(name: str) -> bool:
    """Returns True for a job's id; no endpoint may have such a name."""
    return name.startswith("job-") and name[4:].isdigit()


def _vacated(snapshot: Snapshot) -> PendingReason | None:
    """Returns the reason of a job whose slots other jobs are still vacating; None if no member yields."""
    yielding = [(m.leaves_at_s or 0.0, lease.job_id) for lease in snapshot.leases for m in lease.members if m.gives_way]
    if not yielding:
        return None
    names = ", ".join(dict.fromkeys(job_id for _, job_id in yielding))
    wait_s = max(0.0, max(yielding)[0] - snapshot.at_s)
    reason = f"{names} yields to it and is usable until {utc(max(yielding)[0])}."
    return PendingReason("starting", reason, "No action needed: it starts then.", wait_s)


def _waits_for(member: Member, snapshot: Snapshot) -> str:
    node = next((view.node for view in snapshot.nodes if view.node.id == member.node_id), None)
    if not member.has_node or node is None:
        return "a node is being chosen"
    if node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
        return f"{node.id} ({node.type}) is starting since {snapshot.at_s - node.requested_at_s:.0f} s"
    return f"a placement group on {node.id} ({node.type}) is being made"
