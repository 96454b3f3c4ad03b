"""Who may start now. First form of the policy: strictly first come, first served.

The head of the queue takes the first of its shapes that fits, on nodes that are there or that may be bought. While it
does not fit, those behind it wait too, so that a large gang cannot be overtaken for ever. A job that no fleet of these
node types could hold blocks nobody.
"""

from __future__ import annotations

from raytide.core.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.job import Job, JobState
from raytide.core.plan import Action, Admit, Wait
from raytide.core.room import Placements, Room
from raytide.core.shortfall import Shortfall
from raytide.core.snapshot import Snapshot


def admit(snapshot: Snapshot) -> tuple[Action, ...]:
    """One Admit or Wait for each job in the queue, in its order."""
    if not snapshot.ray_answers:
        silent = "Ray does not answer, so nobody knows what is free."
        return tuple(Wait(job.id, "signal", silent, "See `raytide doctor`.") for job in queue(snapshot))
    room = room_beside_leases(snapshot)
    actions: list[Action] = []
    head = ""
    number = snapshot.next_lease
    for job in queue(snapshot):
        if head:
            actions.append(
                Wait(
                    job.id,
                    "behind",
                    f"{job.id} waits behind {head}.",
                    f"It starts after {head}, or when {head} is stopped.",
                )
            )
            continue
        found = _seat(room, job)
        if isinstance(found, Shortfall):
            actions.append(Wait(job.id, found.constraint, found.reason, found.remedy))
            head = "" if found.constraint == "impossible" else job.id
            continue
        shape, seats = found
        actions.append(Admit(job.id, _lease(f"lease-{number}", job, shape, snapshot.at_s), _fits(job, shape, seats)))
        number += 1
    return tuple(actions)


def queue(snapshot: Snapshot) -> tuple[Job, ...]:
    """Jobs that wait for a lease, who is first first."""
    return tuple(job for job in snapshot.jobs if job.state is JobState.QUEUED and not job.stop_requested)


def room_beside_leases(snapshot: Snapshot) -> Room:
    """The room that is left when every lease has got the seats it still lacks."""
    room = Room.of(snapshot)
    for lease in snapshot.leases:
        if missing := sum(member.state is MemberState.WAITING for member in lease.members):
            room.place(lease.shape, missing, subject=lease.job_id, at_least=0)
    return room


def _seat(room: Room, job: Job) -> tuple[Shape, Placements] | Shortfall:
    shortfalls = []
    for shape in job.spec.gang.shapes:
        seats = room.place(shape, shape.members, subject=job.id, at_least=shape.at_least)
        if not isinstance(seats, Shortfall):
            return shape, seats
        shortfalls.append(seats)
    return next((s for s in shortfalls if s.constraint != "impossible"), shortfalls[0])


def _lease(lease_id: str, job: Job, shape: Shape, now_s: float) -> Lease:
    return Lease(
        id=lease_id,
        job_id=job.id,
        shape=shape,
        state=LeaseState.WAITING,
        members=tuple(Member(index) for index in range(shape.members)),
        form_timeout_s=job.spec.gang.form_timeout_s,
        created_at_s=now_s,
        reason="admitted; its members wait for nodes",
    )


def _fits(job: Job, shape: Shape, seats: Placements) -> str:
    there = sorted({seat.node_id for seat in seats if not seat.is_new})
    new = sorted({(seat.node_id, seat.node_type) for seat in seats if seat.is_new})
    places = [", ".join(there)] if there else []
    if new:
        places.append(f"{len(new)} new of {', '.join(sorted({node_type for _, node_type in new}))}")
    fewer = f", {len(seats)} of them now" if len(seats) < shape.members else ""
    return f"{job.id} is first in the queue and fits: {shape.describe()}{fewer}; on {' and '.join(places)}."
