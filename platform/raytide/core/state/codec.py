"""Converts core objects to database rows and back, without loss.

A field of a dataclass is stored in the column with the field's name. So `fields_of` and `values_of` do most of the
conversion.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import Row, Table

from raytide.core.bounds import encodable, printable, shortened
from raytide.core.money import month_of
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.snapshot import Pool
from raytide.core.state import tables as t
from raytide.core.state.records import Event, StoredPlan, StoredTeam

Values = dict[str, Any]


def shared(record: type, table: Table, *, but: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the names of those fields of the dataclass `record` that are also columns of `table`. The names in `but`
    are left out.
    """
    names = (field.name for field in dataclasses.fields(record))
    return tuple(name for name in names if name in table.c and name not in but)


def values_of(record: object, names: Iterable[str]) -> Values:
    return {name: getattr(record, name) for name in names}


def fields_of(row: Row[Any], names: Iterable[str]) -> Values:
    # By key: `index` and `count` are also methods of a row.
    columns = row._mapping
    return {name: columns[name] for name in names}


_JOB = shared(Job, t.jobs, but=("spec",))
_WRITTEN_BY_API = {"id", "user", "submitted_at_s", "stop_requested", "heartbeat_at_s", "progress", "released_by_driver"}
_JOB_STATUS = [name for name in _JOB if name not in _WRITTEN_BY_API]
_LEASE = shared(Lease, t.leases, but=("shape",))
_MEMBER = shared(Member, t.members)
_NODE = shared(Node, t.nodes)
POOL = shared(Pool, t.pools)
_ENDPOINT = shared(Endpoint, t.endpoints, but=("spec",))
_ENDPOINT_STATUS = [name for name in _ENDPOINT if name not in ("user", "created_at_s")]
_INTERVAL = shared(OpenInterval, t.open_intervals, but=("occupancy",))
ENTRY = shared(Entry, t.entries)
EVENT = shared(Event, t.events)


def number_of(id: str) -> int:
    """Returns the number in an id: 7 for `job-7`. Ids are never reused, so sorting by number is sorting by age."""
    return int(id.rpartition("-")[2])


def job_status_columns(job: Job) -> Values:
    """Returns a job's values for the columns that the controller writes."""
    took_s = None if job.ended_at_s is None else job.ended_at_s - job.submitted_at_s
    return {**values_of(job, _JOB_STATUS), "took_s": took_s}


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
"""The placeholder of a shape that cannot be read."""


def job(row: Row[Any]) -> Job:
    """Returns the job that a row describes, even if its spec cannot be read.

    If this release rejects the stored spec, the job gets a placeholder as its spec, and `unreadable` says why.
    """
    spec, unreadable = read_config(JobSpec, row.spec)
    if spec is None:
        name, gang = printable(row.name, 100) or row.id, GangSpec(shapes=(_ONE_CPU,))
        spec = JobSpec.model_construct(kind=JobKind(row.kind), name=name, team=row.team, gang=gang)
    fields = {**fields_of(row, _JOB), "state": JobState(row.state), "progress": row.progress or {}}
    return Job(**fields, spec=spec, unreadable=unreadable)


def finite(progress: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """Returns a job's progress in a form that JSON can hold. NaN and infinity become strings, and long texts are
    truncated."""
    return {shortened(encodable(name), 100): _finite(value) for name, value in progress.items()}


def _finite(value: float | int | str) -> float | int | str:
    if isinstance(value, str):
        return shortened(encodable(value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def lease_values(lease: Lease) -> Values:
    shape = lease.shape.model_dump(mode="json")
    return {**values_of(lease, _LEASE), "number": number_of(lease.id), "shape": shape}


def member_values(lease_id: str, member: Member) -> Values:
    return {**values_of(member, _MEMBER), "lease_id": lease_id}


def lease(row: Row[Any], members: Iterable[Row[Any]]) -> Lease:
    """Returns the lease that a row describes. `members` are the rows of the lease's members, ordered by index."""
    shape = read_config(Shape, row.shape)[0] or _ONE_CPU  # its job is unreadable too, and ends
    fields = {**fields_of(row, _LEASE), "state": LeaseState(row.state)}
    found = tuple(Member(**{**fields_of(each, _MEMBER), "state": MemberState(each.state)}) for each in members)
    return Lease(**fields, shape=shape, members=found)


def node_values(node: Node) -> Values:
    return {**values_of(node, _NODE), "number": number_of(node.id)}


def node(row: Row[Any]) -> Node:
    return Node(**{**fields_of(row, _NODE), "market": CapacityType(row.market), "state": NodeState(row.state)})


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


def endpoint_status_columns(endpoint: Endpoint) -> Values:
    """Returns an endpoint's values for the columns that the controller writes."""
    return values_of(endpoint, _ENDPOINT_STATUS)


def endpoint(row: Row[Any]) -> Endpoint:
    """Returns the endpoint that a row describes. If its deletion was requested, its state is DELETING even before the
    controller has acted."""
    state = EndpointState(row.state)
    if row.delete_requested and state is not EndpointState.DELETED:
        state = EndpointState.DELETING
    spec, unreadable = read_config(ServeSpec, row.spec)
    if spec is None:
        spec = ServeSpec.model_construct(name=row.name, model="", team=row.team)
    return Endpoint(**{**fields_of(row, _ENDPOINT), "state": state}, spec=spec, unreadable=unreadable)


def audited(spec: JobSpec | ServeSpec) -> Values:
    """Returns what the audit log keeps of a spec: some of its fields, and a hash of the whole spec. The other fields
    are left out because they may contain secrets."""
    kept = ("kind", "name", "team", "priority", "model", "version", "budget_usd", "soft_budget_usd", "budget_per")
    fields = {name: getattr(spec, name) for name in kept if hasattr(spec, name)}
    return {**fields, "sha256": hashlib.sha256(spec.model_dump_json().encode()).hexdigest()}


def pool(row: Row[Any]) -> Pool:
    return Pool(**fields_of(row, POOL))


def interval_values(interval: OpenInterval) -> Values:
    occupancy = [[share.kind, share.subject, share.team, share.weight] for share in interval.occupancy]
    return {**values_of(interval, _INTERVAL), "occupancy": occupancy}


def interval(row: Row[Any]) -> OpenInterval:
    occupancy = tuple(Share(EntryKind(kind), subject, team, weight) for kind, subject, team, weight in row.occupancy)
    return OpenInterval(**fields_of(row, _INTERVAL), occupancy=occupancy)


def entry(row: Row[Any]) -> Entry:
    return Entry(**{**fields_of(row, ENTRY), "kind": EntryKind(row.kind)})


def totals_of(entries: Iterable[Entry]) -> list[Values]:
    """Returns the sums of ledger entries by kind, subject, team and month. An entry counts in the month in which it
    began."""
    sums: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in entries:
        total = sums[(entry.kind, entry.subject, entry.team, month_of(entry.from_us))]
        total[0] += entry.amount_micro_usd
        total[1] += entry.energy_mj
    names = ("kind", "subject", "team", "month", "amount_micro_usd", "energy_mj")
    return [dict(zip(names, (*key, *total), strict=True)) for key, total in sums.items()]


def team(row: Row[Any]) -> StoredTeam:
    return StoredTeam(row.name, row.spec or {}, row.recent_gpu_s, row.recent_at_s)


def event(row: Row[Any]) -> Event:
    return Event(**fields_of(row, EVENT))


def stored_plan(row: Row[Any]) -> StoredPlan:
    return StoredPlan(row.at_s, row.last_at_s, tuple(row.actions))


S = TypeVar("S", bound=BaseModel)


def read_config(cls: type[S], stored: object) -> tuple[S | None, str]:
    """Returns the stored spec and an empty text. If this release rejects the spec, returns None and the reason."""
    try:
        return cls.model_validate(stored), ""
    except (ValueError, TypeError, RecursionError) as error:
        return None, printable(" ".join(str(error).split()), 500)
