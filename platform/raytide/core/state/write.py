"""Functions that write rows, for both SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.node import Node
from raytide.core.objects.plan import Plan
from raytide.core.state.codec import EVENT, values_of
from raytide.core.state.queries.jobs import REMOVED_JOBS, chunked
from raytide.core.state.queries.live import JOB_IS_LIVE, LEASE_IS_LIVE
from raytide.core.state.records import Event
from raytide.core.state.tables import counters, events, jobs, leases, members, plans, teams

Values = Mapping[str, Any]

KEPT_PLANS = 1000
REMOVED_AT_ONCE = 100
"""The number of old jobs deleted in one transaction, so that deletions never delay other writes."""
KEPT_EVENTS = 500
"""The number of newest events kept for each job, lease, node and endpoint."""


def append(c: sa.Connection, table: sa.Table, rows: Sequence[Values]) -> None:
    if rows:
        c.execute(table.insert(), rows)


def note(c: sa.Connection, noted: Sequence[Event]) -> None:
    """Appends the events in `noted`. Then deletes all but the newest KEPT_EVENTS events of each subject in `noted`."""
    append(c, events, [values_of(event, EVENT) for event in noted])
    for subject in {event.subject for event in noted}:
        newest = sa.select(events.c.number).where(events.c.subject == subject).order_by(events.c.number.desc())
        oldest_kept = newest.limit(1).offset(KEPT_EVENTS - 1).scalar_subquery()
        c.execute(events.delete().where(events.c.subject == subject, events.c.number < oldest_kept))


def update(c: sa.Connection, table: sa.Table, key: Values, values: Values) -> None:
    c.execute(table.update().where(*(table.c[name] == value for name, value in key.items())).values(**values))


def upsert(c: sa.Connection, table: sa.Table, rows: Sequence[Values]) -> None:
    """Inserts rows. A row that exists with the same primary key is replaced."""
    if not rows:
        return
    insert = sqlite.insert(table) if c.dialect.name == "sqlite" else postgresql.insert(table)
    keys = [column.name for column in table.primary_key]
    new = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    c.execute(insert.on_conflict_do_update(index_elements=keys, set_=new), rows)


def add_up(c: sa.Connection, table: sa.Table, rows: Sequence[Values], *amounts: str) -> None:
    """Inserts rows. If a row with the same primary key exists, the new row's values in the columns `amounts` are added
    to the existing row's values.
    """
    if not rows:
        return
    insert = sqlite.insert(table) if c.dialect.name == "sqlite" else postgresql.insert(table)
    keys = [column.name for column in table.primary_key]
    c.execute(
        insert.on_conflict_do_update(
            index_elements=keys, set_={name: table.c[name] + insert.excluded[name] for name in amounts}
        ),
        rows,
    )


def next_number(c: sa.Connection, name: str) -> int:
    """Returns the next number of a counter. A rollback resets the counter as well, so no number is given twice, and a
    failed transaction leaves no gap."""
    upsert_first = sqlite.insert(counters) if c.dialect.name == "sqlite" else postgresql.insert(counters)
    taken = upsert_first.values(name=name, next=2).on_conflict_do_update(
        index_elements=["name"], set_={"next": counters.c.next + 1}
    )
    return int(c.execute(taken.returning(counters.c.next)).scalar_one()) - 1


def number_reached(c: sa.Connection, name: str, number: int) -> None:
    """Records the highest number that the controller has given to a node or a lease, so that numbers are never
    reused."""
    if number == 0:
        return
    reached = c.execute(sa.select(counters.c.next).where(counters.c.name == name)).scalar()
    if reached is None or reached <= number:
        upsert(c, counters, [{"name": name, "next": number + 1}])


def transitions(
    c: sa.Connection, key: sa.Column[Any], records: Sequence[Job | Lease | Node | Endpoint], at_s: float
) -> list[Event]:
    """Returns an event for each record whose state differs from its stored state. The stored state is in the table to
    which the column `key` belongs."""
    if not records:
        return []
    after = {str(getattr(record, key.name)): record for record in records}
    states = sa.select(key, key.table.c.state)
    before = {row[0]: row[1] for part in chunked(after) for row in c.execute(states.where(key.in_(part)))}
    return [
        Event(at_s, subject, before.get(subject, ""), str(record.state), record.reason)
        for subject, record in after.items()
        if before.get(subject) != record.state
    ]


def remove_jobs(c: sa.Connection, ended_before_s: float, limit: int = REMOVED_AT_ONCE) -> int:
    """Deletes the oldest jobs that are in a final state and ended before `ended_before_s`, at most `limit` of them.
    Also deletes the leases and events of these jobs. A job with an unreleased lease is kept. Returns the number of
    deleted jobs.
    """
    is_old = sa.and_(~JOB_IS_LIVE, jobs.c.ended_at_s < ended_before_s)
    held = sa.select(leases.c.job_id).where(LEASE_IS_LIVE)
    query = sa.select(jobs.c.id).where(is_old, jobs.c.id.not_in(held)).order_by(jobs.c.ended_at_s).limit(limit)
    if not (job_ids := list(c.execute(query).scalars())):
        return 0
    lease_ids = list(c.execute(sa.select(leases.c.id).where(leases.c.job_id.in_(job_ids))).scalars())
    for part in chunked(lease_ids):
        c.execute(members.delete().where(members.c.lease_id.in_(part)))
        c.execute(events.delete().where(events.c.subject.in_(part)))
        c.execute(leases.delete().where(leases.c.id.in_(part)))
    c.execute(events.delete().where(events.c.subject.in_(job_ids)))
    c.execute(jobs.delete().where(jobs.c.id.in_(job_ids)))
    add_up(c, counters, [{"name": REMOVED_JOBS, "next": len(job_ids)}], "next")
    return len(job_ids)


def store_plan(c: sa.Connection, plan: Plan) -> None:
    """Appends a plan. If the last plan is equal, only extends the last plan's time. Keeps the newest KEPT_PLANS
    plans."""
    actions = plan.to_json()["actions"]
    last = c.execute(plans.select().order_by(plans.c.number.desc()).limit(1)).first()
    if last is not None and last.actions == actions:
        update(c, plans, {"number": last.number}, {"last_at_s": plan.at_s})
        return
    append(c, plans, [{"at_s": plan.at_s, "last_at_s": plan.at_s, "actions": actions}])
    if last is not None:
        c.execute(plans.delete().where(plans.c.number <= last.number + 1 - KEPT_PLANS))


def write_team(c: sa.Connection, name: str, **values: object) -> None:
    """Writes some columns of a team, and leaves the others unchanged. The API writes the spec, and the controller
    writes the usage."""
    if c.execute(sa.select(teams.c.name).where(teams.c.name == name)).first() is None:
        c.execute(teams.insert(), {"name": name, "spec": None, "recent_gpu_s": 0.0, "recent_at_s": 0.0, **values})
    else:
        update(c, teams, {"name": name}, values)
