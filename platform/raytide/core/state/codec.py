"""Converts core objects to rows and back, without loss."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import Row

from raytide.core.bounds import encodable, printable, shortened
from raytide.core.money import month_of
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.snapshot import Pool
from raytide.core.state.records import Event, StoredPlan, StoredTeam

Values = dict[str, Any]


def number_of(id: str) -> int:
    """Returns 7 for `job-7`. Ids are never reused, so the number also orders them."""
    return int(id.rpartition("-")[2])


def job_status_columns(job: Job) -> Values:
    """Returns the columns of a job that the controller writes."""
    return {
        "state": job.state,
        "admitted_at_s": job.admitted_at_s,
        "started_at_s": job.started_at_s,
        "ended_at_s": job.ended_at_s,
        "took_s": None if job.ended_at_s is None else job.ended_at_s - job.submitted_at_s,
        "reason": job.reason,
        "restarts": job.restarts,
        "head_losses": job.head_losses,
        "attained_gpu_s": job.attained_gpu_s,
        "held_s": job.held_s,
        "spell_since_s": job.spell_since_s,
        "spell_gpus": job.spell_gpus,
        "preemptions": job.preemptions,
        "preempted_at_s": job.preempted_at_s,
        "reserved_micro_usd": job.reserved_micro_usd,
        "struck_at_s": job.struck_at_s,
        "struck_by": job.struck_by,
        "lost_s": job.lost_s,
    }


def new_job(number: int, spec: JobSpec, user: str, now_s: float, key: str | None) -> Values:
    return {
        "number": number,
        "id": f"job-{number}",
        "name": spec.name,
        "kind": spec.kind,
        "team": spec.team,
        "user": user,
        "spec": spec.model_dump(mode="json"),
        "client_key": key,
        "submitted_at_s": now_s,
        "stop_requested": False,
        "progress": {},
        "state": JobState.QUEUED,
        "reason": "",
        "restarts": 0,
    }


_ONE_CPU = Shape(resources={"CPU": 1.0})
"""Replaces a shape that cannot be read."""


def job(row: Row[Any]) -> Job:
    """Returns the job of any row. If this release rejects the stored spec, the job is `unreadable` and has a
    placeholder."""
    spec, unreadable = read_config(JobSpec, row.spec)
    if spec is None:
        name, gang = printable(row.name, 100) or row.id, GangSpec(shapes=(_ONE_CPU,))
        spec = JobSpec.model_construct(kind=JobKind(row.kind), name=name, team=row.team, gang=gang)
    return Job(
        id=row.id,
        spec=spec,
        unreadable=unreadable,
        user=row.user,
        state=JobState(row.state),
        submitted_at_s=row.submitted_at_s,
        admitted_at_s=row.admitted_at_s,
        started_at_s=row.started_at_s,
        ended_at_s=row.ended_at_s,
        stop_requested=row.stop_requested,
        reason=row.reason,
        restarts=row.restarts,
        head_losses=row.head_losses,
        heartbeat_at_s=row.heartbeat_at_s,
        progress=row.progress or {},
        released_by_driver=row.released_by_driver,
        attained_gpu_s=row.attained_gpu_s,
        held_s=row.held_s,
        spell_since_s=row.spell_since_s,
        spell_gpus=row.spell_gpus,
        preemptions=row.preemptions,
        preempted_at_s=row.preempted_at_s,
        reserved_micro_usd=row.reserved_micro_usd,
        struck_at_s=row.struck_at_s,
        struck_by=row.struck_by,
        lost_s=row.lost_s,
    )


def finite(progress: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """Returns progress that JSON can hold: NaN and infinity become strings, and long texts are truncated."""
    return {shortened(encodable(name), 100): _finite(value) for name, value in progress.items()}


def _finite(value: float | int | str) -> float | int | str:
    if isinstance(value, str):
        return shortened(encodable(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def lease_values(lease: Lease) -> Values:
    return {
        "number": number_of(lease.id),
        "id": lease.id,
        "job_id": lease.job_id,
        "shape": lease.shape.model_dump(mode="json"),
        "state": lease.state,
        "epoch": lease.epoch,
        "form_timeout_s": lease.form_timeout_s,
        "created_at_s": lease.created_at_s,
        "forming_since_s": lease.forming_since_s,
        "reason": lease.reason,
    }


def member_values(lease_id: str, member: Member) -> Values:
    return {
        "lease_id": lease_id,
        "index": member.index,
        "state": member.state,
        "node_id": member.node_id,
        "ray_node_id": member.ray_node_id,
        "address": member.address,
        "placement_group_id": member.placement_group_id,
        "incarnation": member.incarnation,
        "leaves_at_s": member.leaves_at_s,
        "gives_way": member.gives_way,
        "given_to": member.given_to,
    }


def lease(row: Row[Any], members: Iterable[Row[Any]]) -> Lease:
    """Returns the lease of a row. `members` must be ordered by index."""
    return Lease(
        id=row.id,
        job_id=row.job_id,
        shape=read_config(Shape, row.shape)[0] or _ONE_CPU,  # its job is unreadable too, and ends
        state=LeaseState(row.state),
        members=tuple(_member(member) for member in members),
        epoch=row.epoch,
        form_timeout_s=row.form_timeout_s,
        created_at_s=row.created_at_s,
        forming_since_s=row.forming_since_s,
        reason=row.reason,
    )


def _member(row: Row[Any]) -> Member:
    # By key: `index` and `count` are also methods of a row.
    return Member(
        index=row._mapping["index"],
        state=MemberState(row.state),
        node_id=row.node_id,
        ray_node_id=row.ray_node_id,
        address=row.address,
        placement_group_id=row.placement_group_id,
        incarnation=row.incarnation,
        leaves_at_s=row.leaves_at_s,
        gives_way=row.gives_way,
        given_to=row.given_to,
    )


def node_values(node: Node) -> Values:
    return {
        "number": number_of(node.id),
        "id": node.id,
        "type": node.type,
        "zone": node.zone,
        "market": node.market,
        "price_micro_usd_h": node.price_micro_usd_h,
        "state": node.state,
        "requested_at_s": node.requested_at_s,
        "started_at_s": node.started_at_s,
        "ready_at_s": node.ready_at_s,
        "drain_deadline_s": node.drain_deadline_s,
        "ended_at_s": node.ended_at_s,
        "lost_at_s": node.lost_at_s,
        "ray_node_id": node.ray_node_id,
        "address": node.address,
        "subject": node.subject,
        "reason": node.reason,
        "quarantined": node.quarantined,
    }


def node(row: Row[Any]) -> Node:
    return Node(
        id=row.id,
        type=row.type,
        zone=row.zone,
        market=CapacityType(row.market),
        price_micro_usd_h=row.price_micro_usd_h,
        state=NodeState(row.state),
        requested_at_s=row.requested_at_s,
        started_at_s=row.started_at_s,
        ready_at_s=row.ready_at_s,
        drain_deadline_s=row.drain_deadline_s,
        ended_at_s=row.ended_at_s,
        lost_at_s=row.lost_at_s,
        ray_node_id=row.ray_node_id,
        address=row.address,
        subject=row.subject,
        reason=row.reason,
        quarantined=row.quarantined,
    )


def new_endpoint(spec: ServeSpec, user: str, now_s: float) -> Values:
    return {
        "name": spec.name,
        "team": spec.team,
        "user": user,
        "spec": spec.model_dump(mode="json"),
        "delete_requested": False,
        "created_at_s": now_s,
        "state": EndpointState.DEPLOYING,
        "target_replicas": 0 if spec.backend else max(1, spec.replicas.min),
        "low_since_s": None,
        "high_since_s": None,
        "ended_at_s": None,
        "reason": "",
    }


def endpoint_verdict(endpoint: Endpoint) -> Values:
    """Returns the columns of an endpoint that the controller writes."""
    return {
        "state": endpoint.state,
        "target_replicas": endpoint.target_replicas,
        "low_since_s": endpoint.low_since_s,
        "high_since_s": endpoint.high_since_s,
        "ended_at_s": endpoint.ended_at_s,
        "reason": endpoint.reason,
    }


def endpoint(row: Row[Any]) -> Endpoint:
    """Returns the endpoint of a row. A delete request shows as DELETING before the controller has acted on it."""
    state = EndpointState(row.state)
    if row.delete_requested and state is not EndpointState.DELETED:
        state = EndpointState.DELETING
    spec, unreadable = read_config(ServeSpec, row.spec)
    if spec is None:
        spec = ServeSpec.model_construct(name=row.name, model="", team=row.team)
    return Endpoint(
        spec=spec,
        unreadable=unreadable,
        user=row.user,
        state=state,
        created_at_s=row.created_at_s,
        target_replicas=row.target_replicas,
        low_since_s=row.low_since_s,
        high_since_s=row.high_since_s,
        ended_at_s=row.ended_at_s,
        reason=row.reason,
    )


def audited(spec: JobSpec | ServeSpec) -> Values:
    """Returns what the audit log keeps of a spec: no configuration, which may hold secrets, but its hash."""
    kept = ("kind", "name", "team", "priority", "model", "version", "budget_usd", "soft_budget_usd", "budget_per")
    fields = {name: getattr(spec, name) for name in kept if hasattr(spec, name)}
    return {**fields, "sha256": hashlib.sha256(spec.model_dump_json().encode()).hexdigest()}


def pool_values(pool: Pool) -> Values:
    return {
        "node_type": pool.node_type,
        "zone": pool.zone,
        "failures": pool.failures,
        "retry_at_s": pool.retry_at_s,
        "reason": pool.reason,
    }


def pool(row: Row[Any]) -> Pool:
    return Pool(row.node_type, row.zone, row.failures, row.retry_at_s, row.reason)


def interval_values(interval: OpenInterval) -> Values:
    return {
        "node_id": interval.node_id,
        "price_micro_usd_h": interval.price_micro_usd_h,
        "origin_us": interval.origin_us,
        "from_us": interval.from_us,
        "occupancy": [[share.kind, share.subject, share.team, share.weight] for share in interval.occupancy],
    }


def interval(row: Row[Any]) -> OpenInterval:
    occupancy = tuple(Share(EntryKind(kind), subject, team, weight) for kind, subject, team, weight in row.occupancy)
    return OpenInterval(row.node_id, row.price_micro_usd_h, row.origin_us, row.from_us, occupancy)


def entry_values(entry: Entry) -> Values:
    return {
        "node_id": entry.node_id,
        "from_us": entry.from_us,
        "to_us": entry.to_us,
        "kind": entry.kind,
        "subject": entry.subject,
        "team": entry.team,
        "price_micro_usd_h": entry.price_micro_usd_h,
        "amount_micro_usd": entry.amount_micro_usd,
        "is_reversal": entry.is_reversal,
        "cause": entry.cause,
        "energy_mj": entry.energy_mj,
    }


def entry(row: Row[Any]) -> Entry:
    return Entry(
        node_id=row.node_id,
        from_us=row.from_us,
        to_us=row.to_us,
        kind=EntryKind(row.kind),
        subject=row.subject,
        team=row.team,
        price_micro_usd_h=row.price_micro_usd_h,
        amount_micro_usd=row.amount_micro_usd,
        is_reversal=row.is_reversal,
        cause=row.cause,
        energy_mj=row.energy_mj,
    )


def totals_of(entries: Iterable[Entry]) -> list[Values]:
    """Returns the sums of the entries by kind, subject, team and the month in which each began."""
    sums: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in entries:
        total = sums[(entry.kind, entry.subject, entry.team, month_of(entry.from_us))]
        total[0] += entry.amount_micro_usd
        total[1] += entry.energy_mj
    names = ("kind", "subject", "team", "month", "amount_micro_usd", "energy_mj")
    return [dict(zip(names, (*key, *total), strict=True)) for key, total in sums.items()]


def team(row: Row[Any]) -> StoredTeam:
    return StoredTeam(row.name, row.spec or {}, row.recent_gpu_s, row.recent_at_s)


def event_values(event: Event) -> Values:
    return {
        "at_s": event.at_s,
        "subject": event.subject,
        "from_state": event.from_state,
        "to_state": event.to_state,
        "reason": event.reason,
    }


def event(row: Row[Any]) -> Event:
    return Event(row.at_s, row.subject, row.from_state, row.to_state, row.reason)


def stored_plan(row: Row[Any]) -> StoredPlan:
    return StoredPlan(row.at_s, row.last_at_s, tuple(row.actions))


S = TypeVar("S", bound=BaseModel)


def read_config(cls: type[S], stored: object) -> tuple[S | None, str]:
    """Returns the spec, or None and the reason why this release rejects it."""
    try:
        return cls.model_validate(stored), ""
    except (ValueError, TypeError, RecursionError) as error:
        return None, printable(" ".join(str(error).split()), 500)
