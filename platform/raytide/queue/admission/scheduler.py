"""The queue's part of a decision: which jobs are admitted, and which gangs are preempted, shrink or grow.

Jobs are tried in the order of `priority.py`. A job can take free capacity and capacity that can be bought. It can
also take capacity from jobs that come later in the order.

A job may be admitted to slots whose members are still leaving. These slots are reserved for the job, and become free
within `GRACE_S`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import CapacityType, Resources, plus
from raytide.core.objects.plan import Action, Admit, Grow, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import Snapshot
from raytide.queue.admission import usage
from raytide.queue.admission.cycle import run_cycle
from raytide.queue.admission.preemption import Preemptor
from raytide.queue.admission.priority import Bools, Floats, QueueTable, ranked
from raytide.queue.admission.serving_reclaim import reclaim_for_serving
from raytide.queue.admission.shape_request import ShapeRequest, ShapeRequests
from raytide.queue.admission.state import AdmissionState
from raytide.queue.budget import Budgets
from raytide.queue.lifecycle import attained_service
from raytide.queue.quota import Quotas
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.market_constraint import alternatives, constrain, without_market_constraint
from raytide.scheduling.state import Placements, SchedulingState

GRACE_S = 30.0
"""The longest time in seconds that yielding members stay usable: for a checkpoint, and for the remaining members to
form a group again.
"""
SETTLE_S = 15.0
"""The least seconds for which a parked member stays parked."""


def schedule(snapshot: Snapshot, room: SchedulingState | None = None) -> tuple[Action, ...]:
    """Returns the queue's actions. All Preempts and Shrinks come first. An Admit or a Wait for each queued job follows,
    in the order in which the jobs were tried. All Grows come last.

    `room` is the scheduling state of the snapshot, if the caller has computed it already. The function changes `room`.
    """
    if not snapshot.ray_answers:
        silent = "Ray does not answer, so it is unknown which resources are free."
        return tuple(Wait(job.id, "signal", silent, "See `raytide doctor`.") for job in queued_jobs(snapshot))
    state = admission_state(snapshot, room)
    table = queue_table(state)
    for row in np.flatnonzero(table.within_nominal_quota).tolist():
        state.add_quota_owner(row)
    whole = [*_enforce_budgets(state, table), *_change_shape(state, table)]
    preemptor = Preemptor.of(state)
    reclaim_for_serving(preemptor, table)
    tried = run_cycle(table, preemptor).tolist()
    return (*whole, *_preemptions(state), *_verdicts(state, tried), *_grow(state, ranked(table).tolist()))


def queued_jobs(snapshot: Snapshot) -> tuple[Job, ...]:
    """Returns the jobs that wait for a lease, in order of submission."""
    return tuple(job for job in snapshot.jobs if job.state is JobState.QUEUED and not job.stop_requested)


def within_member_cap(snapshot: Snapshot) -> tuple[Snapshot, tuple[Wait, ...]]:
    """Returns the snapshot without the queued jobs that exceed their team's limit of members. Also returns a Wait for
    each of these jobs.

    The number of members is limited because every tick visits each member, however small. A team's jobs are counted in
    order of submission, so that smaller jobs cannot overtake a large job for ever.
    """
    most = snapshot.team_members
    if most is None:
        return snapshot, ()
    teams = {job.id: job.spec.team for job in snapshot.jobs}
    held: Counter[str] = Counter()
    for lease in snapshot.leases:
        held[teams.get(lease.job_id, "")] += len(lease.members)
    waits: list[Wait] = []
    for job in snapshot.jobs:
        if job.state is not JobState.QUEUED or job.stop_requested:
            continue
        team, members = job.spec.team, max(shape.members for shape in job.spec.gang.shapes)
        if held[team] and held[team] + members > most:
            waits.append(_over_cap(job, held[team], most))
            held[team] = most
        else:
            held[team] += members
    if not waits:
        return snapshot, ()
    over = {wait.subject for wait in waits}
    return replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.id not in over)), tuple(waits)


def _over_cap(job: Job, held: int, most: int) -> Wait:
    return Wait(
        job.id,
        "cap",
        f"the jobs of team {job.spec.team} that run or go before it have {held} members; {most} are allowed.",
        "Use fewer, larger members, or wait: metadata.raytide.limits.team_members sets the limit.",
    )


def admission_state(snapshot: Snapshot, room: SchedulingState | None = None) -> AdmissionState:
    """Returns the state at the start of the cycle. The resources of yielding members count as free. The slots that are
    nominated for waiting members count as taken.
    """
    room, types = (
        room or SchedulingState.from_snapshot(snapshot),
        {node_type.name: node_type for node_type in snapshot.node_types},
    )
    views = [view for view in snapshot.nodes if view.node.type in types]
    by_node = {view.node.id: types[view.node.type] for view in views}
    by_ray_node = {view.node.ray_node_id: types[view.node.type] for view in views}
    for lease in snapshot.leases:
        for member in lease.members:
            if member.gives_way:
                room.release(member.node_id, lease.shape.resources)
    quotas = Quotas.of(snapshot.teams, usage.fleet_capacity(snapshot.node_types))
    for view in snapshot.endpoints:
        quotas.reserve(view.endpoint.spec.team, usage.replica_quota(view, by_ray_node), is_preemptible=False)
    is_preemptible = [attained_service.may_be_preempted(job) for job in snapshot.jobs]
    rows = {job.id: row for row, job in enumerate(snapshot.jobs)}
    nominated: dict[tuple[int, int], str] = {}
    for lease in snapshot.leases:
        slots = _nominate(snapshot, room, lease)
        if (row := rows.get(lease.job_id)) is not None:
            waiting = [member.index for member in lease.members if member.state is MemberState.WAITING]
            nominated |= {(row, index): slot.node_id for index, slot in zip(waiting, slots, strict=False)}
            quota = usage.lease_quota(lease, by_node)
            quotas.reserve(snapshot.jobs[row].spec.team, quota, is_preemptible=is_preemptible[row])
    return AdmissionState(
        snapshot=snapshot,
        jobs=snapshot.jobs,
        leases=_leases_by_row(snapshot),
        room=room,
        quotas=quotas,
        budgets=Budgets.of(snapshot.teams, snapshot.jobs, snapshot.spent, snapshot.spent_month),
        requests=ShapeRequests(snapshot.node_types, snapshot.stances, room.offerings, snapshot.paces),
        node_types=by_node,
        is_preemptible=is_preemptible,
        nominated=nominated,
    )


def _nominate(snapshot: Snapshot, room: SchedulingState, lease: Lease) -> Placements:
    """Reserves free slots for the members of a lease that need a node, and returns those reserved."""
    count = sum(member.needs_node for member in lease.members)
    for shape in constrain([lease.shape], snapshot.stances.get(lease.job_id)) if count else ():
        if slots := room.place_some(shape, count, paces=snapshot.paces.get(lease.job_id)):
            return slots
    return ()


def queue_table(state: AdmissionState) -> QueueTable:
    """Returns the jobs as a table with one row for each job.

    A job that is stopping or yielding neither waits nor keeps its lease. The table counts such a job as a job that
    holds GPUs.
    """
    now_s, jobs = state.snapshot.at_s, state.jobs
    waits = {job.id for job in queued_jobs(state.snapshot)}
    classes, stances = state.snapshot.classes, state.snapshot.stances

    # Doublings of recent GPU-hours: among teams that used about as much, the order of submission decides.
    shares = {
        team.name: math.floor(math.log2(1.0 + team.recent_gpu_s / 3600.0 / team.spec.weight))
        for team in state.snapshot.teams
    }

    def size(row: int, job: Job) -> float:
        shape = state.leases[row].shape if row in state.leases else job.spec.gang.shapes[0]
        return shape.gpus * shape.at_least

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    def flags(values: Sequence[bool]) -> Bools:
        return np.array(values, dtype=bool)

    table = QueueTable(
        gpus=column([size(row, job) for row, job in enumerate(jobs)]),
        submitted_s=column([job.submitted_at_s for job in jobs]),
        attained_gpu_s=column([attained_service.attained_gpu_s(job, now_s) for job in jobs]),
        held_s=column([job.held_for_s(now_s) for job in jobs]),
        queued_s=column([attained_service.queued_s(job, now_s) for job in jobs]),
        priority=np.array([classes.get(job.spec.priority, 0) for job in jobs], dtype=np.int64),
        share=column([shares.get(job.spec.team, 0.0) for job in jobs]),
        is_held=flags([job.id not in waits for job in jobs]),
        is_preemptible=flags([may_be and row in state.leases for row, may_be in enumerate(state.is_preemptible)]),
        in_cooldown=flags([attained_service.in_cooldown(job, now_s) for job in jobs]),
        is_urgent=flags([job.id in stances and stances[job.id].is_urgent for job in jobs]),
        within_nominal_quota=np.zeros(len(jobs), dtype=bool),
        aging_cutoff_s=state.snapshot.old_s,
    )
    return replace(table, within_nominal_quota=_within_nominal_quota(state, table))


def _within_nominal_quota(state: AdmissionState, table: QueueTable) -> Bools:
    """Returns, for each row, whether the job and the jobs of its team before it fit into the team's nominal quota.

    Once a job does not fit, no later job of its team counts as within, so a job cannot overtake its own team by being
    small. Jobs that could not start on an empty fleet are left out.
    """
    within = np.zeros(len(state.jobs), dtype=bool)
    requested: dict[str, Resources] = {}
    exceeded = set[str]()
    for row in ranked(table).tolist() if state.quotas.limited else ():
        job = state.jobs[row]
        if table.is_held[row] or job.spec.team in exceeded or not state.affordable_shapes(row).can_start:
            continue
        need = plus(requested.get(job.spec.team, {}), state.requests.first(job).least)
        within[row] = state.quotas.may_reclaim(job.spec.team, need)
        if within[row]:
            requested[job.spec.team] = need
        else:
            exceeded.add(job.spec.team)
    return within


def _leases_by_row(snapshot: Snapshot) -> dict[int, Lease]:
    """Returns the leases that are not being given up, by the row of their job."""
    of_job = {lease.job_id: lease for lease in snapshot.leases if not lease.is_preempted}
    return {
        row: of_job[job.id]
        for row, job in enumerate(snapshot.jobs)
        if job.id in of_job and job.state in (JobState.ADMITTED, JobState.RUNNING) and not job.stop_requested
    }


def _enforce_budgets(state: AdmissionState, table: QueueTable) -> list[Preempt]:
    """Preempts the jobs whose budget is about to run out; those that cannot be preempted run on."""
    leases = ((state.jobs[row], lease) for row, lease in state.leases.items())
    prices = {job.id: (job, state.micro_usd_h(lease)) for job, lease in leases if state.budgets.has_limit(job)}
    over = state.budgets.jobs_over_budget(prices, state.snapshot.teams)
    rows = [row for row in state.leases if state.jobs[row].id in over and table.is_preemptible[row]]
    return [_preempt_whole(state, table, row, over[state.jobs[row].id]) for row in rows]


def _change_shape(state: AdmissionState, table: QueueTable) -> list[Preempt]:
    """Preempts deadline jobs that must leave spot but hold a spot-only shape, if an on-demand shape of theirs fits, is
    within quota and is affordable.
    """
    found = []
    for row, lease in list(state.leases.items()):
        job, stance = state.jobs[row], state.snapshot.stances.get(lease.job_id)
        if stance is None or stance.wanted is not CapacityType.ON_DEMAND or not table.is_preemptible[row]:
            continue
        allowed = _allowed_instead(state, row)
        for shape in alternatives(lease.shape, job.spec.gang.shapes, CapacityType.ON_DEMAND):
            if state.requests.request(shape) in allowed and not isinstance(
                state.room.copy().place(shape, shape.at_least, subject=""), Unschedulable
            ):
                reason = f"{stance.reason}; it starts again as {shape.describe()}"
                found.append(_preempt_whole(state, table, row, reason))
                break
    return found


def _allowed_instead(state: AdmissionState, row: int) -> list[ShapeRequest]:
    """Returns the shapes that budgets and quota would allow the job if it held no nodes."""
    job, quota = state.jobs[row], usage.lease_quota(state.leases[row], state.node_types)
    state.quotas.release(job.spec.team, quota)
    affordable = state.affordable_shapes(row).affordable
    allowed = [request for request in affordable if state.lacking_quota(row, request.least) is None]
    state.quotas.reserve(job.spec.team, quota)
    return allowed


def _preempt_whole(state: AdmissionState, table: QueueTable, row: int, why: str) -> Preempt:
    """Preempts a whole gang for a reason other than a place for another job."""
    lease, table.is_preemptible[row] = state.leases[row], False
    state.release(row, usage.retained_members(lease), by=lease.job_id)
    del state.leases[row]
    return _preempt(state, lease, why)


def _preemptions(state: AdmissionState) -> Iterator[Action]:
    for row, yielded in state.yielded.items():
        if row not in state.leases:
            continue  # preempted whole, by `_preempt_whole`
        lease = state.leases[row]
        if len(yielded) == len(usage.retained_members(lease)):
            by = tuple(dict.fromkeys(yielded.values()))
            reason = f"it is preempted by {', '.join(by)}, and continues when there is room again"
            yield _preempt(state, lease, reason, by)
        else:
            yield from _shrink(state, lease, yielded)


def _shrink(state: AdmissionState, lease: Lease, yielded: Mapping[int, str]) -> Iterator[Shrink]:
    """Yields one Shrink for each preemptor."""
    until_s, left = state.snapshot.at_s + GRACE_S, len(usage.retained_members(lease))
    for by in dict.fromkeys(yielded.values()):
        members = tuple(sorted(index for index, other in yielded.items() if other == by))
        rejected, left = state.alternatives.get(by), left - len(members)
        preemptor = by if rejected is None else f"endpoint {by} until its load falls"
        reason = f"{len(members)} of its {left + len(members)} members yield to {preemptor}; it continues with {left}"
        yield Shrink(lease.job_id, lease.id, members, until_s, reason, (by,), rejected or ())


def _preempt(state: AdmissionState, lease: Lease, reason: str, by: tuple[str, ...] = ()) -> Preempt:
    return Preempt(lease.job_id, lease.id, state.snapshot.at_s + GRACE_S, reason, by)


def _verdicts(state: AdmissionState, order: Sequence[int]) -> Iterator[Action]:
    """Yields an Admit or a Wait for each row that was tried."""
    number = state.snapshot.next_lease
    for row in order:
        job = state.jobs[row]
        if (admission := state.admitted.get(row)) is not None:
            shape = admission.shape
            if job.id in state.snapshot.stances and not state.affordable_shapes(row).over_soft_limit:
                shape = without_market_constraint(shape, job.spec.gang.shapes)
            lease = _lease(f"lease-{number}", job, shape, len(admission.placed), state.snapshot.at_s)
            reason = _admission_reason(job, admission.shape, admission.placed)
            yield Admit(job.id, lease, reason, admission.reserved_micro_usd)
            number += 1
        elif (refusal := state.refused.get(row)) is not None:
            yield Wait(job.id, refusal.constraint, refusal.reason, refusal.remedy)


def _grow(state: AdmissionState, order: Sequence[int]) -> Iterator[Grow]:
    """Brings parked members back, on node types for which no job waits."""
    rows = [row for row in order if row in state.leases and row not in state.yielded and _parked(state, row)]
    contended = _contended_types(state) if rows else set()
    for row in rows:
        lease, job, parked = state.leases[row], state.jobs[row], _parked(state, row)
        types = state.requests.request(lease.shape).node_types
        if state.affordable_shapes(row).over_soft_limit or contended & types:
            continue
        if (count := state.reserve_to_grow(row, len(parked))) > 0:
            back = tuple(member.index for member in parked[:count])
            yield Grow(job.id, lease.id, back, f"there is room for {count} more members, and no job waits for it")


def _contended_types(state: AdmissionState) -> set[str]:
    """Returns the node types for which replicas or queued jobs wait."""
    contended = {name for shape in state.unplaced for name in state.requests.request(shape).node_types}
    for row, refusal in state.refused.items():
        shapes = state.jobs[row].spec.gang.shapes
        names = {name for shape in shapes for name in state.requests.request(shape).node_types}
        if not names <= contended and _waits_for_room(state, row, refusal):
            contended |= names
    return contended


def _waits_for_room(state: AdmissionState, row: int, refusal: Unschedulable) -> bool:
    if refusal.constraint == "budget":
        return bool(state.affordable_shapes(row).affordable)  # it waits for the fleet's limit, not for its own budget
    if refusal.constraint == "quota":
        return state.may_reclaim(state.jobs[row])  # it waits for quota that others borrow
    return refusal.constraint in ("capacity", "stock", "behind", "rate")


def _parked(state: AdmissionState, row: int) -> list[Member]:
    """Returns the parked members that may come back."""
    latest_s = state.snapshot.at_s - SETTLE_S
    members = state.leases[row].members
    return [m for m in members if m.is_parked and (m.leaves_at_s is None or m.leaves_at_s <= latest_s)]


def _lease(lease_id: str, job: Job, shape: Shape, placed: int, now_s: float) -> Lease:
    """Returns a new lease; members beyond the placed ones are parked."""
    states = [MemberState.WAITING] * placed + [MemberState.PARKED] * (shape.members - placed)
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


def _admission_reason(job: Job, shape: Shape, placed: Placements) -> str:
    existing = sorted({slot.node_id for slot in placed if not slot.is_new})
    new = sorted({(slot.node_id, slot.node_type) for slot in placed if slot.is_new})
    places = [", ".join(existing)] if existing else []
    if new:
        places.append(f"{len(new)} new of {', '.join(sorted({node_type for _, node_type in new}))}")
    fewer = f", {len(placed)} of them now" if len(placed) < shape.members else ""
    return f"{job.id} is next and fits: {shape.describe()}{fewer}; on {' and '.join(places)}."
