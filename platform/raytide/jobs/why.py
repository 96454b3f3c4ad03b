"""`raytide why JOB`: what it waits for and what would help, from the same functions that decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytide.core.clock import utc
from raytide.core.fleet import NodeState
from raytide.core.gang import Lease, LeaseState, Member, MemberState
from raytide.core.job import Job, JobState
from raytide.core.plan import Admit, Wait
from raytide.core.room import Room
from raytide.core.shortfall import Shortfall
from raytide.core.snapshot import Snapshot
from raytide.jobs.admit import admit, queue
from raytide.jobs.forward import starts_in_s


@dataclass(frozen=True, slots=True)
class Why:
    state: JobState
    position: int | None
    """In the queue's order, from 1; None once it left it."""
    constraint: str
    """As in `Wait`: the first that is unmet; "" when it waits for nothing."""
    reason: str
    remedy: str = ""
    """The nearest thing that would meet it."""
    wait_s: float | None = None
    """When it would start if nothing else came; None when nobody can tell."""


def why(job: Job, snapshot: Snapshot) -> Why:
    if job.state is JobState.QUEUED and not job.stop_requested:
        return _queued(job, snapshot)
    lease = next((lease for lease in snapshot.leases if lease.job_id == job.id), None)
    if job.is_final or job.stop_requested or lease is None:
        return Why(job.state, None, "", job.reason or f"{job.id} is {job.state}")
    if lease.yields:
        return Why(job.state, None, "", f"{job.id} checkpoints: {job.reason}")
    if lease.state is LeaseState.ACTIVE:
        return Why(job.state, None, "", f"{job.id} runs: {lease.reason}")
    return forming(job, lease, snapshot)


def _queued(job: Job, snapshot: Snapshot) -> Why:
    waits = {job.id for job in queue(snapshot)}
    verdicts = [action for action in admit(snapshot) if isinstance(action, Admit | Wait)]
    ids = [a.job_id if isinstance(a, Admit) else a.subject for a in verdicts]
    place = [id for id in ids if id in waits].index(job.id)
    action = verdicts[ids.index(job.id)]
    wait_s = starts_in_s(snapshot).get(job.id)
    if isinstance(action, Wait):
        return Why(job.state, place + 1, action.constraint, action.reason, action.remedy, wait_s)
    return Why(job.state, place + 1, "", f"{job.id} fits and starts with the next decision.", "", 0.0)


def forming(job: Job, lease: Lease, snapshot: Snapshot) -> Why:
    """Admitted: some seats have no node yet, or a node that is not ready, or a group that Ray is making."""
    seatless = [member for member in lease.members if member.state is MemberState.WAITING]
    needed = lease.shape.at_least - lease.held
    if needed > 0 and seatless:
        room = Room.of(snapshot)
        found = room.place(lease.shape, needed, subject=job.id)
        if isinstance(found, Shortfall):
            return _vacated(job, snapshot) or Why(job.state, None, found.constraint, found.reason, found.remedy)
    parts = [f"{lease.id} has {len(lease.usable)} of {lease.shape.at_least} members that it needs"]
    parts += [_waits_for(m, snapshot) for m in lease.members if not (m.is_usable or m.is_parked)]
    remedy = "Nothing to do: it goes on when they are ready."
    return Why(job.state, None, "starting", "; ".join(_unique(parts)) + ".", remedy)


def _vacated(job: Job, snapshot: Snapshot) -> Why | None:
    """It was admitted to seats that others still use until they have given way."""
    going = [(m.leaves_at_s or 0.0, lease.job_id) for lease in snapshot.leases for m in lease.members if m.gives_way]
    if not going:
        return None
    who = ", ".join(dict.fromkeys(job_id for _, job_id in going))
    wait_s = max(0.0, max(going)[0] - snapshot.at_s)
    reason = f"{who} gives way to it and is usable until {utc(max(going)[0])}."
    return Why(job.state, None, "starting", reason, "Nothing to do: it starts then.", wait_s)


def _waits_for(member: Member, snapshot: Snapshot) -> str:
    node = next((view.node for view in snapshot.nodes if view.node.id == member.node_id), None)
    if not member.holds or node is None:
        return "a node is being chosen"
    if node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
        return f"{node.id} ({node.type}) is starting since {snapshot.at_s - node.requested_at_s:.0f} s"
    return f"a placement group on {node.id} ({node.type}) is being made"


def _unique(parts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(parts))
