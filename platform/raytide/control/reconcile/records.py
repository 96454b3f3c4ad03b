"""Updates the records from an observation, and builds the Snapshot from which the tick makes its decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from raytide.autoscaler.endpoints import targets as endpoints
from raytide.autoscaler.nodes import launch_backoff as pools
from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.nodes.lifecycle import by_node_id
from raytide.autoscaler.nodes.orders import carry_out
from raytide.control.accounting.billing_intervals import Booking
from raytide.control.accounting.lost_work import lost_nodes, on_disruption
from raytide.control.accounting.team_usage import recent_usage
from raytide.control.reconcile.observation import ClusterObservation
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint import Endpoint, EndpointState
from raytide.core.objects.gang import Lease, LeaseState
from raytide.core.objects.job import Job, JobKind
from raytide.core.objects.ledger_entry import OpenInterval
from raytide.core.objects.node import Node, NodeState, NodeType, Signal
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import EndpointView, NodeView, Pool, Snapshot
from raytide.core.specs.order import Order
from raytide.core.specs.rollout import Rollout
from raytide.core.state.records import Changes, Records, StoredTeam
from raytide.queue.lifecycle import jobs, leases
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus

T = TypeVar("T")


@dataclass(slots=True)
class ClusterRecords:
    """All records of one tick, by id. Each step of the tick updates them."""

    jobs: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    pools: dict[tuple[str, str], Pool] = field(default_factory=dict)
    intervals: dict[str, OpenInterval] = field(default_factory=dict)
    teams: tuple[StoredTeam, ...] = ()
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    orders: tuple[Order, ...] = ()
    signals: Mapping[tuple[str, str], Signal] = field(default_factory=dict)
    next_node: int = 1
    next_lease: int = 1

    def book_later(self, stored: Iterable[Node]) -> Booking:
        """Returns an empty booking, and leaves the costs of this tick to a later one.

        Nodes that ended in this tick end in that tick, too, because ended nodes are not loaded again. Other intervals
        stay open.
        """
        self.nodes |= {node.id: node for node in stored if self.nodes[node.id].state is NodeState.GONE}
        return Booking((), (), ())

    @classmethod
    def of(cls, records: Records) -> ClusterRecords:
        return cls(
            jobs={job.id: job for job in records.jobs},
            leases={lease.id: lease for lease in records.leases},
            nodes={node.id: node for node in records.nodes},
            endpoints={endpoint.name: endpoint for endpoint in records.endpoints},
            pools={(pool.node_type, pool.zone): pool for pool in records.pools},
            intervals=dict(records.intervals),
            teams=records.teams,
            rollouts={rollout.number: rollout for rollout in records.rollouts},
            orders=records.orders,
            signals=records.signals,
            next_node=records.next_node,
            next_lease=records.next_lease,
        )


class Guard(Protocol):
    """Calls `act` for one record and returns its result. If `act` raises, keeps the error and returns `default`."""

    def __call__(self, record: Job | Endpoint, act: Callable[[], T], default: T, now_s: float) -> T: ...


def unguarded(record: Job | Endpoint, act: Callable[[], T], default: T, now_s: float) -> T:
    return act()


def advance(records: ClusterRecords, observed: ClusterObservation, now_s: float, guard: Guard = unguarded) -> None:
    """Updates every record from the observation. If the update of a record raises, that record stays unchanged."""
    before = tuple(records.nodes.values())
    moved = lifecycle.observe(before, observed.machines, observed.ray_nodes, observed.notices, now_s)
    rested = pools.update_pools(tuple(records.pools.values()), before, moved, now_s)
    records.nodes, done = carry_out({node.id: node for node in moved}, records.orders, now_s)
    ended = {order.id: order for order in done}
    records.orders = tuple(ended.get(order.id, order) for order in records.orders)
    records.pools = {(pool.node_type, pool.zone): pool for pool in rested}
    for lease in tuple(records.leases.values()):
        _advance_lease(records, lease, observed, now_s, guard)
    _advance_jobs(records, observed, now_s, guard)
    for endpoint in tuple(records.endpoints.values()):
        observe = partial(endpoints.observe, endpoint, observed.loads.get(endpoint.name), now_s)
        records.endpoints[endpoint.name] = guard(endpoint, observe, endpoint, now_s)


def take_snapshot(
    records: ClusterRecords,
    observed: ClusterObservation,
    idle: IdleClock,
    config: ClusterConfig,
    now_s: float,
    wall_ahead_s: float = 0.0,
) -> Snapshot:
    """Returns the immutable input of the decision."""
    return Snapshot(
        at_s=now_s,
        node_types=tuple(node_type.at(now_s + wall_ahead_s) for node_type in config.node_types),
        nodes=tuple(_views(records, observed, idle, config, now_s)),
        jobs=tuple(job for job in records.jobs.values() if not job.is_final),
        leases=tuple(lease for lease in records.leases.values() if lease.state is not LeaseState.RELEASED),
        endpoints=tuple(
            EndpointView(endpoint, observed.loads.get(name))
            for name, endpoint in records.endpoints.items()
            if not endpoint.unreadable
        ),
        demand=observed.demand,
        pools=tuple(records.pools.values()),
        transfer=config.settings.transfer,
        unmanaged=config.unmanaged,
        team_members=config.settings.limits.team_members,
        next_node=records.next_node,
        next_lease=records.next_lease,
        ray_answers=observed.ray_nodes is not None,
        wall_ahead_s=wall_ahead_s,
    )


def served_names(records: ClusterRecords) -> tuple[str, ...]:
    return tuple(name for name, e in records.endpoints.items() if e.state is not EndpointState.DELETING)


def has_drivers(records: ClusterRecords) -> bool:
    """Returns whether any job driver may exist. If no driver can exist, the tick does not ask Ray for drivers."""
    return any(job.spec.kind is not JobKind.GANG and job.admitted_at_s is not None for job in records.jobs.values())


def has_gangs(records: ClusterRecords) -> bool:
    return any(job.spec.kind is JobKind.GANG for job in records.jobs.values())


def changes(stored: Records, records: ClusterRecords, booking: Booking, plan: Plan, now_s: float) -> Changes:
    """Returns what to write at the end of the tick: the records that differ from those in `stored`, the booked costs
    and the plan."""
    old = ClusterRecords.of(stored)
    return Changes(
        at_s=now_s,
        jobs=tuple(job for key, job in records.jobs.items() if old.jobs.get(key) != job),
        leases=tuple(lease for key, lease in records.leases.items() if old.leases.get(key) != lease),
        nodes=tuple(node for key, node in records.nodes.items() if old.nodes.get(key) != node),
        endpoints=tuple(e for key, e in records.endpoints.items() if old.endpoints.get(key) != e),
        rollouts=tuple(rollout for key, rollout in records.rollouts.items() if old.rollouts.get(key) != rollout),
        pools=tuple(pool for pool_key, pool in records.pools.items() if old.pools.get(pool_key) != pool),
        entries=booking.entries,
        intervals=booking.intervals,
        closed=booking.closed,
        teams=recent_usage(records.teams, records.jobs.values(), now_s),
        orders=tuple(order for order in records.orders if order.done_at_s is not None),
        plan=plan.for_storage() if plan.actions else None,
    )


def metered(records: ClusterRecords, types: Mapping[str, NodeType]) -> dict[str, NodeType]:
    """Returns a mapping from node id to node type, for the ready nodes whose node type sets `busy_above`. Such a node
    is kept while its measured use is high, even if it is idle in Ray."""
    ready = {node.id: types[node.type] for node in records.nodes.values() if node.ready_at_s and node.type in types}
    return {node_id: node_type for node_id, node_type in ready.items() if node_type.busy_above}


def _advance_lease(
    records: ClusterRecords, lease: Lease, observed: ClusterObservation, now_s: float, guard: Guard
) -> None:
    move = partial(leases.advance, lease, records.nodes, observed.groups, now_s)
    job = records.jobs.get(lease.job_id)
    if job is None:
        records.leases[lease.id] = move()
        return
    after = records.leases[lease.id] = guard(job, move, lease, now_s)
    records.jobs[job.id] = on_disruption(job, lost_nodes(lease, after), now_s)


def _advance_jobs(records: ClusterRecords, observed: ClusterObservation, now_s: float, guard: Guard) -> None:
    held = {lease.job_id: lease for lease in records.leases.values()}
    for job in tuple(records.jobs.values()):
        key = DriverKey(job.id, job.restarts)
        status = DriverStatus(key, "unknown") if observed.drivers is None else observed.drivers.get(key)
        silent_s = None if observed.silent_s is None else observed.silent_s.get(job.id, 0.0)
        lease = held.get(job.id)
        move = partial(jobs.advance, job, lease, status, now_s, silent_s=silent_s)
        after, lease = guard(job, move, (job, lease), now_s)
        records.jobs[job.id] = after
        if lease is not None:
            records.leases[lease.id] = lease


def _views(
    records: ClusterRecords, observed: ClusterObservation, idle: IdleClock, config: ClusterConfig, now_s: float
) -> list[NodeView]:
    in_ray = by_node_id(observed.ray_nodes or ())
    types = {node_type.name: node_type for node_type in config.node_types}
    carried: dict[tuple[str, str], dict[str, str]] = {}
    views = []
    for node in records.nodes.values():
        if node.state is NodeState.GONE:
            continue
        seen = in_ray.get(node.id)
        node_type = types.get(node.type)
        resources = node_type.resources if node_type is not None else {}
        if node_type is not None and (node.type, node.zone) not in carried:
            carried[node.type, node.zone] = node_type.all_labels(node.zone)
        labels = carried.get((node.type, node.zone), {})
        use, idle_s = observed.use.get(node.id, {}), idle.idle_s(node.id, now_s)
        is_up = seen is not None and seen.is_alive and node.ready_at_s is not None
        views.append(
            NodeView(
                node=node,
                total=seen.total if seen is not None and is_up else resources,
                available=seen.available if seen is not None and is_up else resources,
                labels={**labels, **(seen.labels if seen is not None else {})},
                idle_s=idle_s,
                is_draining=seen is not None and seen.is_draining,
                use=use,
                busy=idle.busy_reason(node.id, node_type, use, now_s) if node_type is not None and idle_s > 0 else "",
            )
        )
    return views
