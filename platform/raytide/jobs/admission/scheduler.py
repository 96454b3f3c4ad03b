"""Who starts, who gives way and who grows now: the queue's part of a decision. Pure.

Everybody in the order of `order.py` takes room that is there, may be bought, or is held by lower ones that give way. A
job may be admitted to seats that are still being vacated: its members get them within `GRACE_S`, and nobody else does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import CapacityType, Resources, plus
from raytide.core.objects.plan import Action, Admit, Grow, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.jobs.admission import usage
from raytide.jobs.admission.cycle import run_cycle
from raytide.jobs.admission.priority import Bools, Floats, QueueTable, ranked
from raytide.jobs.admission.serving_reclaim import reclaim_for_serving
from raytide.jobs.admission.shape_request import ShapeRequest, ShapeRequests
from raytide.jobs.admission.state import AdmissionState
from raytide.jobs.budget import Budgets
from raytide.jobs.lifecycle import attained_service
from raytide.jobs.quota import Quotas
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.market_constraint import alternatives, constrain, without_market_constraint
from raytide.scheduling.state import Placements, SchedulingState

GRACE_S = 30.0
"""How long seats that give way are usable at most: for a checkpoint, and for the rest to go on without them."""
SETTLE_S = 15.0
"""A seat that was given away is not given back sooner."""


def schedule(snapshot: Snapshot, room: SchedulingState | None = None) -> tuple[Action, ...]:
    """An Admit or Wait for each job in the queue, in its order; before them who gives way, after them who grows.

    `room`: of the snapshot, when that is there already; it is changed.
    """
    waiting = queued_jobs(snapshot)
    if not snapshot.ray_answers:
        silent = "Ray does not answer, so nobody knows what is free."
        return tuple(Wait(job.id, "signal", silent, "See `raytide doctor`.") for job in waiting)
    floor = admission_state(snapshot, room)
    claims = queue_table(floor)
    for row in np.flatnonzero(claims.within_nominal_quota).tolist():
        floor.waits_for_own(row)
    drained = [*_enforce_budgets(floor, claims), *_change_shape(floor, claims)]
    reclaim_for_serving(floor, claims)
    tried = run_cycle(claims, floor).tolist()
    return (*drained, *_give_way(floor), *_verdicts(floor, tried), *_grow(floor, ranked(claims).tolist()))


def queued_jobs(snapshot: Snapshot) -> tuple[Job, ...]:
    """Jobs that wait for a lease, who was submitted first first."""
    return tuple(job for job in snapshot.jobs if job.state is JobState.QUEUED and not job.stop_requested)


def admission_state(snapshot: Snapshot, room: SchedulingState | None = None) -> AdmissionState:
    """What is there before this decision: seats that give way already count as free, promised ones as taken."""
    room, types = room or SchedulingState.of(snapshot), usage.node_types_by_id(snapshot)
    for lease in snapshot.leases:
        for member in lease.members:
            if member.is_yielding:
                room.release(member.node_id, lease.shape.resources)
    quotas = Quotas.of(snapshot.teams, usage.fleet_capacity(snapshot.node_types))
    hosts = usage.node_types_by_ray_id(snapshot)
    for view in snapshot.endpoints:
        quotas.reserve(view.endpoint.spec.team, usage.replica_quota(view, hosts), is_preemptible=False)
    rows = {job.id: row for row, job in enumerate(snapshot.jobs)}
    promised: dict[tuple[int, int], str] = {}
    for lease in snapshot.leases:
        row, seatless = rows.get(lease.job_id), [m.index for m in lease.members if m.state is MemberState.WAITING]
        found: Placements = ()
        count = sum(member.needs_node for member in lease.members)
        for shape in constrain([lease.shape], snapshot.stances.get(lease.job_id)) if count else ():
            paces = snapshot.paces.get(lease.job_id)
            placed = room.place(shape, count, subject=lease.job_id, at_least=0, paces=paces)
            assert not isinstance(placed, Unschedulable)
            if found := placed:
                break
        if row is not None:
            promised |= {(row, index): seat.node_id for index, seat in zip(seatless, found, strict=False)}
            quotas.reserve(
                snapshot.jobs[row].spec.team,
                usage.lease_quota(lease, types),
                is_preemptible=attained_service.may_be_preempted(snapshot.jobs[row]),
            )
    return AdmissionState(
        snapshot=snapshot,
        jobs=snapshot.jobs,
        leases=_held(snapshot),
        room=room,
        quotas=quotas,
        budgets=Budgets.of(snapshot.teams, snapshot.jobs, snapshot.spent, snapshot.spent_month),
        asks=ShapeRequests(snapshot.node_types, snapshot.stances, room.offerings, snapshot.paces),
        types=types,
        is_preemptible=[attained_service.may_be_preempted(job) for job in snapshot.jobs],
        promised=promised,
    )


def queue_table(floor: AdmissionState) -> QueueTable:
    """The rows of the order; those that neither wait nor hold (stopping, giving way) claim nothing and are held."""
    now_s, jobs = floor.snapshot.at_s, floor.jobs
    waits = {job.id for job in queued_jobs(floor.snapshot)}
    classes, stances = floor.snapshot.classes, floor.snapshot.stances

    # Doublings of recent GPU-hours, so that who was first counts among teams that used about as much.
    shares = {
        team.name: math.floor(math.log2(1.0 + team.recent_gpu_s / 3600.0 / team.spec.weight))
        for team in floor.snapshot.teams
    }

    def size(row: int, job: Job) -> float:
        shape = floor.leases[row].shape if row in floor.leases else job.spec.gang.shapes[0]
        return shape.gpus * shape.at_least

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    claims = QueueTable(
        gpus=column([size(row, job) for row, job in enumerate(jobs)]),
        submitted_s=column([job.submitted_at_s for job in jobs]),
        attained_gpu_s=column([attained_service.attained_gpu_s(job, now_s) for job in jobs]),
        held_s=column([job.held_for_s(now_s) for job in jobs]),
        queued_s=column([attained_service.queued_s(job, now_s) for job in jobs]),
        priority=np.array([classes.get(job.spec.priority, 0) for job in jobs], dtype=np.int64),
        share=column([shares.get(job.spec.team, 0.0) for job in jobs]),
        is_held=np.array([job.id not in waits for job in jobs], dtype=bool),
        is_preemptible=np.array(
            [is_preemptible and row in floor.leases for row, is_preemptible in enumerate(floor.is_preemptible)],
            dtype=bool,
        ),
        in_cooldown=np.array([attained_service.in_cooldown(job, now_s) for job in jobs], dtype=bool),
        is_urgent=np.array([job.id in stances and stances[job.id].is_urgent for job in jobs], dtype=bool),
        within_nominal_quota=np.zeros(len(jobs), dtype=bool),
        aging_cutoff_s=floor.snapshot.old_s,
    )
    return replace(claims, within_nominal_quota=_within_quota(floor, claims))


def _within_quota(floor: AdmissionState, claims: QueueTable) -> Bools:
    """After the first of a team that asks for more than what is left of its own, nobody of the team does: a job passes
    no other of its own team by being small. Who could not start on an empty fleet asks for nothing."""
    own = np.zeros(len(floor.jobs), dtype=bool)
    asked: dict[str, Resources] = {}
    beyond = set[str]()
    for row in ranked(claims).tolist() if floor.quotas.limited else ():
        job = floor.jobs[row]
        if claims.is_held[row] or job.spec.team in beyond or not floor.means(row).may_start:
            continue
        need = plus(asked.get(job.spec.team, {}), floor.asks.first(job).least)
        own[row] = floor.quotas.may_reclaim(job.spec.team, need)
        if own[row]:
            asked[job.spec.team] = need
        else:
            beyond.add(job.spec.team)
    return own


def _held(snapshot: Snapshot) -> dict[int, Lease]:
    """Leases that stay, by the row of their job."""
    of = {lease.job_id: lease for lease in snapshot.leases if not lease.is_preempted}
    able = (JobState.ADMITTED, JobState.RUNNING)
    return {
        row: of[job.id]
        for row, job in enumerate(snapshot.jobs)
        if job.id in of and job.state in able and not job.stop_requested
    }


def _enforce_budgets(floor: AdmissionState, claims: QueueTable) -> list[Preempt]:
    """Whoever's budget is about to run out checkpoints and gives way; what cannot be preempted runs on."""
    held = ((floor.jobs[row], lease) for row, lease in floor.leases.items())
    burning = {job.id: (job, floor.micro_usd_h(lease)) for job, lease in held if floor.budgets.is_limited(job)}
    broke = floor.budgets.jobs_over_budget(burning, floor.snapshot.teams)
    rows = [row for row in floor.leases if floor.jobs[row].id in broke and claims.is_preemptible[row]]
    return [_take_back(floor, claims, row, broke[floor.jobs[row].id]) for row in rows]


def _change_shape(floor: AdmissionState, claims: QueueTable) -> list[Preempt]:
    """Who should sit on demand by now, and holds a shape that only spot has, starts again on another of his when there
    are room, quota and money for that."""
    found = []
    for row, lease in list(floor.leases.items()):
        job, stance = floor.jobs[row], floor.snapshot.stances.get(lease.job_id)
        if stance is None or stance.wanted is not CapacityType.ON_DEMAND or not claims.is_preemptible[row]:
            continue
        allowed = _allowed_instead(floor, row)
        for shape in alternatives(lease.shape, job.spec.gang.shapes, CapacityType.ON_DEMAND):
            if floor.asks.ask(shape) in allowed and not isinstance(
                floor.room.copy().place(shape, shape.at_least, subject=""), Unschedulable
            ):
                found.append(_take_back(floor, claims, row, f"{stance.reason}; it starts again as {shape.describe()}"))
                break
    return found


def _allowed_instead(floor: AdmissionState, row: int) -> list[ShapeRequest]:
    """What its budgets and its quota would allow it if it held nothing."""
    job, held = floor.jobs[row], usage.lease_quota(floor.leases[row], floor.types)
    floor.quotas.release(job.spec.team, held)
    allowed = [ask for ask in floor.means(row).paid if floor.lacks(row, ask.least) is None]
    floor.quotas.reserve(job.spec.team, held)
    return allowed


def _take_back(floor: AdmissionState, claims: QueueTable, row: int, why: str) -> Preempt:
    """All that a holder has, for nobody else."""
    lease, claims.is_preemptible[row] = floor.leases[row], False
    floor.release(row, usage.retained_members(lease), by=lease.job_id)
    del floor.leases[row]
    return _preempt(floor, lease, why)


def _give_way(floor: AdmissionState) -> Iterator[Action]:
    for row, gone in floor.away.items():
        if row not in floor.leases:
            continue  # that was said
        lease = floor.leases[row]
        if len(gone) == len(usage.retained_members(lease)):
            by = tuple(dict.fromkeys(gone.values()))
            reason = f"it gives way to {', '.join(by)}, and goes on when there is room again"
            yield _preempt(floor, lease, reason, by)
        else:
            yield from _shrink(floor, lease, gone)


def _shrink(floor: AdmissionState, lease: Lease, gone: Mapping[int, str]) -> Iterator[Shrink]:
    """One for each for whom seats give way."""
    until_s, left = floor.snapshot.at_s + GRACE_S, len(usage.retained_members(lease))
    for by in dict.fromkeys(gone.values()):
        members = tuple(sorted(index for index, other in gone.items() if other == by))
        instead, left = floor.alternatives.get(by), left - len(members)
        whom = by if instead is None else f"endpoint {by} until its load falls"
        reason = f"{len(members)} of its {left + len(members)} members give way to {whom}; it goes on with {left}"
        yield Shrink(lease.job_id, lease.id, members, until_s, reason, (by,), instead or ())


def _preempt(floor: AdmissionState, lease: Lease, reason: str, by: tuple[str, ...] = ()) -> Preempt:
    return Preempt(lease.job_id, lease.id, floor.snapshot.at_s + GRACE_S, reason, by)


def _verdicts(floor: AdmissionState, order: Sequence[int]) -> Iterator[Action]:
    number = floor.snapshot.next_lease
    for row in order:
        job = floor.jobs[row]
        if row in floor.taken:
            taken = floor.taken[row]
            may_change = job.id in floor.snapshot.stances and not floor.means(row).soft
            shape = without_market_constraint(taken.shape, job.spec.gang.shapes) if may_change else taken.shape
            lease = _lease(f"lease-{number}", job, shape, len(taken.seats), floor.snapshot.at_s)
            yield Admit(job.id, lease, _fits(job, taken.shape, taken.seats), taken.reserved_micro_usd)
            number += 1
        elif row in floor.refused:
            short = floor.refused[row]
            yield Wait(job.id, short.constraint, short.reason, short.remedy)


def _grow(floor: AdmissionState, order: Sequence[int]) -> Iterator[Grow]:
    """Parked seats come back to where nobody in the queue waits for room."""
    able = [row for row in order if row in floor.leases and row not in floor.away and _parked(floor, row)]
    wanted = _wanted(floor) if able else set()
    for row in able:
        lease, job, parked = floor.leases[row], floor.jobs[row], _parked(floor, row)
        if floor.means(row).soft or wanted & floor.asks.ask(lease.shape).on:
            continue
        if (count := floor.room_to_grow(row, len(parked))) > 0:
            back = tuple(member.index for member in parked[:count])
            yield Grow(job.id, lease.id, back, f"there is room for {count} more members, and nobody waits for it")


def _wanted(floor: AdmissionState) -> set[str]:
    """The node types for which somebody waits who would get room there."""
    wanted = {name for shape in floor.unseated for name in floor.asks.ask(shape).on}
    for row, short in floor.refused.items():
        names = {name for shape in floor.jobs[row].spec.gang.shapes for name in floor.asks.ask(shape).on}
        if not names <= wanted and _waits_for_room(floor, row, short):
            wanted |= names
    return wanted


def _waits_for_room(floor: AdmissionState, row: int, short: Unschedulable) -> bool:
    if short.constraint == "budget":
        return bool(floor.means(row).paid)  # the fleet's dollars an hour
    if short.constraint == "quota":
        return floor.is_own(floor.jobs[row])  # which others have borrowed
    return short.constraint in ("capacity", "stock", "behind", "rate")


def _parked(floor: AdmissionState, row: int) -> list[Member]:
    return [m for m in floor.leases[row].members if m.is_parked and _has_settled(m, floor.snapshot.at_s)]


def _has_settled(member: Member, now_s: float) -> bool:
    return member.leaves_at_s is None or now_s - member.leaves_at_s >= SETTLE_S


def _lease(lease_id: str, job: Job, shape: Shape, seated: int, now_s: float) -> Lease:
    """Members that found no room now are parked until there is."""
    states = [MemberState.WAITING] * seated + [MemberState.PARKED] * (shape.members - seated)
    return Lease(
        id=lease_id,
        job_id=job.id,
        shape=shape,
        state=LeaseState.WAITING,
        members=tuple(Member(index, state) for index, state in enumerate(states)),
        form_timeout_s=job.spec.gang.form_timeout_s,
        created_at_s=now_s,
        reason="admitted; its members wait for nodes",
    )


def _fits(job: Job, shape: Shape, placed: Placements) -> str:
    there = sorted({seat.node_id for seat in placed if not seat.is_new})
    new = sorted({(seat.node_id, seat.node_type) for seat in placed if seat.is_new})
    places = [", ".join(there)] if there else []
    if new:
        places.append(f"{len(new)} new of {', '.join(sorted({node_type for _, node_type in new}))}")
    fewer = f", {len(placed)} of them now" if len(placed) < shape.members else ""
    return f"{job.id} has its turn and fits: {shape.describe()}{fewer}; on {' and '.join(places)}."
