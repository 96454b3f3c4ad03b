"""`raytide why JOB`: what it waits for and what would help, from the same functions that decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytide.core.fleet import NodeState
from raytide.core.gang import Lease, LeaseState, Member, MemberState
from raytide.core.job import Job, JobState
from raytide.core.plan import Wait
from raytide.core.room import Room
from raytide.core.shortfall import Shortfall
from raytide.core.snapshot import Snapshot
from raytide.jobs.admit import admit, queue


@dataclass(frozen=True, slots=True)
class Why:
    state: JobState
    position: int | None
    """In the queue, from 1; None once it left it."""
    constraint: str
    """As in `Wait`; "" when it waits for nothing."""
    reason: str
    remedy: str = ""


def why(job: Job, snapshot: Snapshot) -> Why:
    if job.state is JobState.QUEUED and not job.stop_requested:
        return _queued(job, snapshot)
    lease = next((lease for lease in snapshot.leases if lease.job_id == job.id), None)
    if job.is_final or job.stop_requested or lease is None:
        return Why(job.state, None, "", job.reason or f"{job.id} is {job.state}")
    if lease.state is LeaseState.ACTIVE:
        return Why(job.state, None, "", f"{job.id} runs: {lease.reason}")
    return _forming(job, lease, snapshot)


def _queued(job: Job, snapshot: Snapshot) -> Why:
    position = [other.id for other in queue(snapshot)].index(job.id) + 1
    for action in admit(snapshot):
        if isinstance(action, Wait) and action.subject == job.id:
            return Why(job.state, position, action.constraint, action.reason, action.remedy)
    return Why(job.state, position, "", f"{job.id} fits and starts with the next decision.")


def _forming(job: Job, lease: Lease, snapshot: Snapshot) -> Why:
    """Admitted: some seats have no node yet, or a node that is not ready, or a group that Ray is making."""
    seatless = [member for member in lease.members if member.state is MemberState.WAITING]
    needed = lease.shape.at_least - (len(lease.members) - len(seatless))
    if needed > 0:
        room = Room.of(snapshot)
        found = room.place(lease.shape, needed, subject=job.id)
        if isinstance(found, Shortfall):
            return Why(job.state, None, found.constraint, found.reason, found.remedy)
    parts = [f"{lease.id} has {len(lease.usable)} of {lease.shape.at_least} members that it needs"]
    parts += [_waits_for(member, snapshot) for member in lease.members if not member.is_usable]
    remedy = "Nothing to do: it goes on when they are ready."
    return Why(job.state, None, "starting", "; ".join(_unique(parts)) + ".", remedy)


def _waits_for(member: Member, snapshot: Snapshot) -> str:
    node = next((view.node for view in snapshot.nodes if view.node.id == member.node_id), None)
    if member.state is MemberState.WAITING or node is None:
        return "a node is being chosen"
    if node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
        return f"{node.id} ({node.type}) is starting since {snapshot.at_s - node.requested_at_s:.0f} s"
    return f"a placement group on {node.id} ({node.type}) is being made"


def _unique(parts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(parts))
