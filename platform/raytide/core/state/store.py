"""The state store. Its methods are in three groups: those of the API, those of the controller, and reads.

Each method is one transaction. Each column of a job, node or endpoint has a single writer (see `tables`), so the API
and the controller never conflict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Self

import sqlalchemy as sa

from raytide.core import bounds
from raytide.core.objects.endpoint import Endpoint, ServeSpec
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job, JobSpec
from raytide.core.objects.node import Node
from raytide.core.objects.snapshot import Pool
from raytide.core.state import codec
from raytide.core.state import tables as t
from raytide.core.state.caps import check_live_jobs, check_progress
from raytide.core.state.database import Database, WriteFailure, paged
from raytide.core.state.leader import Leader
from raytide.core.state.queries.jobs import CHANGES, JobQueries, chunked, job_of_key, leases_where, no_job
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.core.state.queries.live import JOB_IS_LIVE, LEASE_IS_LIVE, NODE_IS_LIVE
from raytide.core.state.queries.overview import OverviewQueries
from raytide.core.state.records import Changes, Event, Records, StoredPlan, StoredTeam
from raytide.core.state.registry.datasets import DatasetRecords
from raytide.core.state.registry.endpoints import (
    SignalRecords,
    endpoints,
    reported,
    request_delete,
    save_endpoint,
    served_endpoint,
)
from raytide.core.state.registry.feedback import FeedbackRecords
from raytide.core.state.registry.heads import HeadLease, HeadView, check_head, view_heads
from raytide.core.state.registry.models import ModelRecords
from raytide.core.state.registry.orders import OrderRecords, end_orders, open_orders
from raytide.core.state.registry.revisions import RevisionRecords
from raytide.core.state.registry.rollouts import RolloutRecords, all_serving, commit_rollouts, unended
from raytide.core.state.tenancy.audit import record
from raytide.core.state.tenancy.keys import touch_key_table
from raytide.core.state.tenancy.records import TenancyRecords
from raytide.core.state.write import (
    add_up,
    append,
    next_number,
    note,
    number_reached,
    remove_jobs,
    store_plan,
    transitions,
    update,
    upsert,
    write_team,
)


class Store:
    """The store of one cluster's state. Open it with `Store.open(url)`. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self.books = LedgerQueries(database)
        """Queries on the ledger: entries, open intervals, sums."""
        self.census = JobQueries(database)
        """Queries on jobs and leases."""
        self.overview = OverviewQueries(database)
        """Queries of the web page."""
        self.tenancy = TenancyRecords(database)
        self.models = ModelRecords(database)
        self.datasets = DatasetRecords(database)
        self.revisions = RevisionRecords(database)
        self.rollouts = RolloutRecords(database)
        self.feedback = FeedbackRecords(database)
        self.orders = OrderRecords(database)
        self.signals = SignalRecords(database)
        self._leader: Leader | None = None

    @classmethod
    def open(cls, url: str, *, head_epoch: int = 0, upgrades: bool = True) -> Self:
        """Opens the store and migrates its schema, under a lock that admits one process at a time. Raises ConflictError
        if a newer raytide wrote the schema. With `head_epoch`, all writes of this process fail once another head has
        taken over. Without `upgrades`, the schema of a store that exists stays as it is."""
        database = Database(url)
        try:
            database.upgrade(only_new=not upgrades)
        except BaseException:
            database.close()
            raise
        if head_epoch:
            database.fence = partial(check_head, epoch=head_epoch)
        return cls(database)

    def close(self) -> None:
        self._db.close()

    def last_failure(self) -> WriteFailure | None:
        """Returns the failure of this process's last write, or None if the write succeeded."""
        return self._db.last_failure

    def submit_job(
        self,
        spec: JobSpec,
        user: str,
        now_s: float,
        *,
        key: str | None = None,
        digest: str | None = None,
        most_live: int = bounds.LIVE_JOBS,
    ) -> Job:
        """Queues a job and returns it. If the team has already used `key`, returns the job of that earlier request, so
        that clients may retry.

        Raises ConflictError if the earlier request had another `digest`. Raises QuotaError if the team has
        `most_live` unfinished jobs, or if the specs of its unfinished jobs are too large together."""
        with self._db.write() as c:
            if (job := job_of_key(c, spec.team, key, digest)) is not None:
                return job
            number = next_number(c, "job")  # waits for other requests, which count below
            if (job := job_of_key(c, spec.team, key, digest)) is not None:
                return job
            check_live_jobs(c, spec, most_live)
            c.execute(t.jobs.insert(), {**codec.new_job(number, spec, user, now_s, key), "client_digest": digest})
            note(c, [Event(now_s, f"job-{number}", "", "queued", f"submitted by {user}")])
            record(c, "job.submit", f"job-{number}", codec.audited(spec))
            return codec.job(c.execute(_job(f"job-{number}")).one())

    def request_stop(self, job_id: str) -> Job:
        """Requests the end of a job. Has no effect on a job in a final state."""
        return self._write_job(job_id, "job.stop", stop_requested=True)

    def heartbeat(self, job_id: str, now_s: float) -> Job:
        """Records that the job's driver is alive."""
        return self._write_job(job_id, heartbeat_at_s=now_s)

    def heartbeats(self, at_s: Mapping[str, float]) -> None:
        """Records that the drivers of these jobs were alive at these times.

        Rows that another process is writing are skipped, because two statements that wait for each other's rows would
        deadlock."""
        with self._db.write() as c:
            for moment in sorted(set(at_s.values())):
                for part in chunked(job_id for job_id, each in at_s.items() if each == moment):
                    free = sa.select(t.jobs.c.id).where(t.jobs.c.id.in_(part)).with_for_update(skip_locked=True)
                    c.execute(t.jobs.update().where(t.jobs.c.id.in_(free)).values(heartbeat_at_s=moment))

    def report(self, job_id: str, progress: Mapping[str, float | int | str], now_s: float) -> None:
        """Merges `progress` into the job's stored progress: new values replace old values of the same name. Counts as a
        heartbeat."""
        with self._db.write() as c:
            row = c.execute(_job(job_id).with_for_update()).first()
            if row is None:
                raise no_job(job_id)
            merged = {**row.progress, **codec.finite(progress)}
            check_progress(job_id, merged)
            update(c, t.jobs, {"id": job_id}, {"progress": merged, "heartbeat_at_s": now_s})

    def release(self, job_id: str, *, error: str = "") -> Job:
        """Records that the driver of a GANG job has released its lease. `error` is empty if the work is finished, else
        it says why the work failed."""
        return self._write_job(job_id, released_by_driver=error)

    def save_endpoint(self, spec: ServeSpec, user: str, now_s: float, why: str = "", seen: int = 0) -> Endpoint:
        """Creates an endpoint, or gives an existing endpoint a new spec as a new revision.

        Raises ConflictError if an endpoint of that name has a rollout, is being deleted or belongs to another team, or
        if another revision than `seen`, from which the spec was derived, serves it now."""
        with self._db.write() as c:
            return save_endpoint(c, spec, user, now_s, why, seen)

    def request_delete(self, name: str) -> Endpoint:
        """Requests the deletion of an endpoint. Has no effect on a deleted endpoint. Raises ConflictError if `name` is
        the application of a promoted challenger, because that application now serves the challenger's endpoint.
        """
        with self._db.write() as c:
            return request_delete(c, name)

    def save_team(self, name: str, given: Mapping[str, Any]) -> None:
        """Stores the fields that override the team's configuration. An empty mapping removes all overrides."""
        with self._db.write() as c:
            write_team(c, name, spec=dict(given) or None)
            touch_key_table(c)
            record(c, "team.change", name, {"given": dict(given)})

    def save_spec(self, job_id: str, spec: JobSpec) -> Job:
        """Replaces the job's spec."""
        return self._write_job(job_id, "job.change", spec=spec.model_dump(mode="json"))

    def lead(self, holder: str) -> str:
        """Tries to make the controller `holder` the leader. Returns an empty string on success. Otherwise returns the
        present leader's name. The caller should then try again later.
        """
        if self._leader is None:
            self._leader = Leader(self._db, holder, always_asks=self._db.fence is not None)
        return self._leader.take()

    def check_lead(self) -> None:
        """Raises ConflictError if another controller has taken over. Call it before acting."""
        if self._leader is not None:
            self._leader.check()

    def resign(self) -> None:
        if self._leader is not None:
            self._leader.resign()

    def head_lease(self, holder: str, lease_s: float) -> HeadLease:
        return HeadLease(self._db, holder, lease_s)

    def heads(self) -> HeadView | None:
        """Returns the machine that leads and the machines that wait. Returns None in a cluster that is configured
        without standbys.
        """
        with self._db.read() as c:
            return view_heads(c)

    def load(self) -> Records:
        """Returns all records that are not final, and the next numbers for ids."""
        with self._db.read() as c:
            leases = leases_where(c, LEASE_IS_LIVE)
            live_jobs = t.jobs.select().where(JOB_IS_LIVE).order_by(t.jobs.c.number)
            live_nodes = t.nodes.select().where(NODE_IS_LIVE).order_by(t.nodes.c.number)
            counters: dict[str, int] = {row.name: row.next for row in c.execute(t.counters.select())}
            return Records(
                jobs=tuple(codec.job(row) for row in c.execute(live_jobs)),
                leases=leases,
                nodes=tuple(codec.node(row) for row in c.execute(live_nodes)),
                endpoints=endpoints(c, ended=False),
                pools=tuple(codec.pool(row) for row in c.execute(t.pools.select())),
                intervals={row.node_id: codec.interval(row) for row in c.execute(t.open_intervals.select())},
                teams=_teams(c),
                rollouts=unended(c),
                serving=all_serving(c),
                orders=open_orders(c),
                signals=reported(c),
                next_node=counters.get("node", 1),
                next_lease=counters.get("lease", 1),
            )

    def commit(self, changes: Changes) -> None:
        """Writes the changes of one tick, durably and atomically.

        Raises ConflictError if another controller has taken over the lead.
        """
        ch = changes
        with self._db.write() as c:
            if self._leader is not None:
                self._leader.fence(c)
            moved: tuple[tuple[sa.Column[Any], Sequence[Job | Lease | Node | Endpoint]], ...] = (
                (t.jobs.c.id, ch.jobs),
                (t.leases.c.id, ch.leases),
                (t.nodes.c.id, ch.nodes),
                (t.endpoints.c.name, ch.endpoints),
            )
            events = [*(event for key, records in moved for event in transitions(c, key, records, ch.at_s)), *ch.events]
            changed = {"changed": next_number(c, CHANGES) if ch.jobs or ch.leases else 0}
            for job in ch.jobs:
                update(c, t.jobs, {"id": job.id}, {**codec.job_status_columns(job), **changed})
            for endpoint in ch.endpoints:
                update(c, t.endpoints, {"name": endpoint.name}, codec.endpoint_status_columns(endpoint))
            upsert(c, t.leases, [{**codec.lease_values(lease), **changed} for lease in ch.leases])
            upsert(c, t.members, [codec.member_values(lease.id, m) for lease in ch.leases for m in lease.members])
            upsert(c, t.nodes, [codec.node_values(node) for node in ch.nodes])
            upsert(c, t.pools, [codec.values_of(pool, codec.POOL) for pool in ch.pools])
            number_reached(c, "lease", max((codec.number_of(lease.id) for lease in ch.leases), default=0))
            number_reached(c, "node", max((codec.number_of(node.id) for node in ch.nodes), default=0))
            append(c, t.entries, [codec.values_of(entry, codec.ENTRY) for entry in ch.entries])
            add_up(c, t.totals, codec.totals_of(ch.entries), "amount_micro_usd", "energy_mj")
            for team in ch.teams:
                write_team(c, team.name, recent_gpu_s=team.recent_gpu_s, recent_at_s=team.recent_at_s)
            upsert(c, t.open_intervals, [codec.interval_values(interval) for interval in ch.intervals])
            for part in chunked(ch.closed):
                c.execute(t.open_intervals.delete().where(t.open_intervals.c.node_id.in_(part)))
            note(c, events)
            if ch.plan is not None:
                store_plan(c, ch.plan)
            end_orders(c, ch.orders)
            commit_rollouts(c, ch.rollouts, ch.at_s)  # last: audit entries are ordered by a lock

    def remove_old_jobs(self, ended_before_s: float) -> int:
        """Deletes some of the jobs that ended before this time, with their leases and events. Returns the number of
        deleted jobs.

        Ledger entries stay, so costs stay exact. Raises ConflictError if another controller has taken over the lead.
        """
        with self._db.write() as c:
            if self._leader is not None:
                self._leader.fence(c)
            return remove_jobs(c, ended_before_s)

    def job(self, job_id: str) -> Job:
        with self._db.read() as c:
            if (row := c.execute(_job(job_id)).first()) is None:
                raise no_job(job_id)
            return codec.job(row)

    def jobs(
        self,
        *,
        active: bool = False,
        team: str | None = None,
        limit: int = 100,
        offset: int = 0,
        most_bytes: int | None = None,
    ) -> tuple[Job, ...]:
        """Returns a page of jobs, newest first. The specs on a page take at most `most_bytes` together, but a page has
        at least one job."""
        query = t.jobs.select().order_by(t.jobs.c.number.desc()).limit(limit).offset(offset)
        if active:
            query = query.where(JOB_IS_LIVE)
        if team is not None:
            query = query.where(t.jobs.c.team == team)
        with self._db.read() as c:
            if most_bytes is not None:
                return tuple(codec.job(row) for row in paged(c, query, t.jobs.c.spec, limit, most_bytes))
            return tuple(codec.job(row) for row in c.execute(query))

    def jobs_of(self, ids: Sequence[str]) -> tuple[Job, ...]:
        """Returns the jobs with these ids. Ids that do not exist are ignored."""
        with self._db.read() as c:
            which = (t.jobs.select().where(t.jobs.c.id.in_(part)) for part in chunked(ids))
            return tuple(codec.job(row) for query in which for row in c.execute(query))

    def lease_of(self, job_id: str) -> Lease | None:
        """Returns the newest lease of a job, even if it is released. Returns None if the job was never admitted."""
        return self.census.leases([job_id]).get(job_id)

    def endpoint(self, name: str) -> Endpoint:
        """Returns the record of the application that serves an endpoint. The name in the record's spec is the
        application's name."""
        with self._db.read() as c:
            return served_endpoint(c, name)

    def endpoints(self, *, ended: bool = False) -> tuple[Endpoint, ...]:
        """Returns the records of applications, sorted by name. If `ended` is false, deleted applications are left out.
        If `ended` is true, they are included, except deleted challengers that serve no endpoint.
        """
        with self._db.read() as c:
            return endpoints(c, ended=ended)

    def nodes(
        self, *, live: bool = False, limit: int | None = None, ray_node_ids: Collection[str] | None = None
    ) -> tuple[Node, ...]:
        """Returns nodes, newest first. `live` leaves out nodes that are gone. `ray_node_ids` selects nodes by Ray's
        ids."""
        query = t.nodes.select().order_by(t.nodes.c.number.desc()).limit(limit)
        if live:
            query = query.where(NODE_IS_LIVE)
        if ray_node_ids is not None:
            query = query.where(t.nodes.c.ray_node_id.in_(ray_node_ids))
        return tuple(codec.node(row) for row in self._db.rows(query))

    def teams(self) -> tuple[StoredTeam, ...]:
        with self._db.read() as c:
            return _teams(c)

    def pools(self) -> tuple[Pool, ...]:
        return tuple(codec.pool(row) for row in self._db.rows(t.pools.select()))

    def events(self, subject: str | None = None, *, limit: int = 100) -> tuple[Event, ...]:
        """Returns the newest events of a subject, or of all subjects. They are in the order in which they happened."""
        query = t.events.select().order_by(t.events.c.number.desc()).limit(limit)
        if subject is not None:
            query = query.where(t.events.c.subject == subject)
        return tuple(codec.event(row) for row in self._db.rows(query))[::-1]

    def plans(self, *, limit: int = 20, since_s: float = 0.0, until_s: float | None = None) -> tuple[StoredPlan, ...]:
        """Returns the newest plans that were made no later than `until_s` and valid at `since_s` or later. They are in
        the order in which they were made."""
        query = t.plans.select().where(t.plans.c.last_at_s >= since_s).order_by(t.plans.c.number.desc()).limit(limit)
        if until_s is not None:
            query = query.where(t.plans.c.at_s <= until_s)
        return tuple(codec.stored_plan(row) for row in self._db.rows(query))[::-1]

    def _write_job(self, job_id: str, action: str = "", **values: object) -> Job:
        with self._db.write() as c:
            before = c.execute(_job(job_id)).first()
            update(c, t.jobs, {"id": job_id}, values)
            if before is None or (row := c.execute(_job(job_id)).first()) is None:
                raise no_job(job_id)
            job = codec.job(row)
            if action and any(before._mapping[name] != value for name, value in values.items()):
                record(c, action, job_id, codec.audited(job.spec))
            return job


def _teams(c: sa.Connection) -> tuple[StoredTeam, ...]:
    return tuple(codec.team(row) for row in c.execute(t.teams.select().order_by(t.teams.c.name)))


def _job(job_id: str) -> sa.Select[Any]:
    return t.jobs.select().where(t.jobs.c.id == job_id)
