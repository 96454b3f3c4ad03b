"""Executes the actions that the records require: launches, drains, terminations, placement groups and drivers.

It is level-triggered: everything is derived from the records and the observation, so the next tick repeats actions that
a crash or a failed call left undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from raytide.actors.gang.placement_groups import difference
from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.nodes.lifecycle import overdue
from raytide.control.reconcile.observation import ClusterObservation, Sources
from raytide.control.reconcile.records import ClusterRecords
from raytide.core.errors import ProviderError
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeState, NodeType
from raytide.core.objects.plan import Assign, Drain, Plan, Wait, describe
from raytide.core.specs.order import Order
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus, wanted_drivers
from raytide.queue.lifecycle.leases import wanted_groups

log = logger(__name__)

MOST_GROUPS, MOST_DRIVERS = 512, 32
"""The most placement groups and drivers that one tick starts, because each is a call to Ray that the tick waits for."""

MOST_ENDED, MOST_FORGOTTEN = 1000, 8
"""The most drivers of ended jobs that Ray remembers, and the most of them that one tick makes it forget. Each tick
lists all that Ray remembers, and Ray reads each of them one by one.
"""

_RESTART_S = 120.0
"""The seconds for which the restart of a replica is retried."""


@dataclass(slots=True)
class ApplyResult:
    nodes: dict[str, Node] = field(default_factory=dict)
    """Nodes whose record changed during execution."""
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    """The provider's messages by pool, for pools that refused a node and are not tried again in this tick."""
    orders: list[Order] = field(default_factory=list)
    """Orders that were carried out."""
    errors: list[str] = field(default_factory=list)


def apply(
    records: ClusterRecords,
    plan: Plan,
    observed: ClusterObservation,
    sources: Sources,
    node_types: Mapping[str, NodeType],
    now_s: float,
    check_lead: Callable[[], None] = lambda: None,
) -> ApplyResult:
    """Executes all due actions. A failed call is reported and does not stop the other calls. The next tick retries the
    failed call.

    `check_lead` is called before each call, because this process may have been paused for long. Once another controller
    leads, `check_lead` raises an error, and the execution ends.
    """
    result = ApplyResult()

    def attempt(what: str, act: Callable[[], object]) -> None:
        check_lead()
        try:
            act()
        except Exception as error:  # outside systems may raise anything
            log.warning("action failed", extra={"what": what, "error": str(error)})
            result.errors.append(f"{what}: {error}")

    if observed.machines is not None:
        due = overdue(records.nodes.values(), observed.machines)
        for node in due.launch:
            is_new = node.requested_at_s >= now_s  # an earlier request may wait at the provider, as in Slurm's queue
            if is_new and (refusal := result.refusals.get((node.type, node.zone))):
                result.nodes[node.id] = lifecycle.refused(node, refusal, now_s)  # do not try this pool again
                continue
            attempt(f"launch {node.id}", partial(_launch, node, sources, node_types, result, now_s))
        for node_id in due.terminate:
            attempt(f"terminate {node_id}", partial(sources.provider.terminate, node_id))
    for action in plan.actions:
        if isinstance(action, Drain):
            attempt(f"drain {action.node_id}", partial(_drain, records, action, sources, result))
    if observed.groups is not None:
        create, remove = difference(wanted_groups(records.leases.values()), observed.groups)
        if remove:
            attempt("remove placement groups", partial(sources.groups.remove, remove))
        if create:
            attempt("create placement groups", partial(sources.groups.create, create[:MOST_GROUPS]))
    if observed.drivers is not None:
        wanted = wanted_drivers(records.jobs.values())
        for key in sorted(wanted - observed.drivers.keys(), key=str)[:MOST_DRIVERS]:
            attempt(f"start the driver of {key.job_id}", partial(sources.drivers.start, key))
        for key, status in observed.drivers.items():
            if status.state == "running" and key not in wanted:
                attempt(f"stop the driver of {key.job_id}", partial(sources.drivers.stop, key))
        for key in _forgettable(records, observed.drivers)[:MOST_FORGOTTEN]:
            attempt(f"forget the driver of {key.job_id}", partial(sources.drivers.forget, key))
    for order in records.orders:
        if order.kind == "restart_replica":
            attempt(f"restart replica {order.replica}", partial(_restart, order, sources, result, now_s))
    if observed.ray_nodes is not None:
        attempt("report to Ray", partial(sources.gcs.report, tuple(records.nodes.values())))
    return result


def _forgettable(records: ClusterRecords, drivers: Mapping[DriverKey, DriverStatus]) -> list[DriverKey]:
    """Returns the ended drivers of jobs whose end is stored, oldest first, without the newest MOST_ENDED."""
    ended = [key for key, status in drivers.items() if status.state != "running" and key.job_id not in records.jobs]
    return sorted(ended, key=lambda key: (key.number, key.attempt))[: max(0, len(ended) - MOST_ENDED)]


def _launch(
    node: Node, sources: Sources, node_types: Mapping[str, NodeType], result: ApplyResult, now_s: float
) -> None:
    node_type = node_types.get(node.type)
    if node_type is None:
        result.nodes[node.id] = lifecycle.refused(
            node, f"node type {node.type} was removed from the configuration", now_s
        )
        return
    try:
        sources.provider.launch(node, node_type)
    except ProviderError as error:
        result.nodes[node.id] = lifecycle.refused(node, str(error), now_s)
        result.refusals[(node.type, node.zone)] = str(error)


def _restart(order: Order, sources: Sources, result: ApplyResult, now_s: float) -> None:
    """Restarts the replica that an order names, and records the outcome. Raises an error if Ray fails, so that the next
    tick retries; after a while the order counts as failed."""
    try:
        was_there = sources.serve.restart_replica(order.subject, order.replica)
        outcome = "it was killed, and Serve starts another" if was_there else "there is no such replica"
    except Exception as error:
        if now_s - order.at_s < _RESTART_S:
            raise
        outcome = f"failed: {error}"
    result.orders.append(replace(order, done_at_s=now_s, outcome=outcome))


def _drain(records: ClusterRecords, action: Drain, sources: Sources, result: ApplyResult) -> None:
    node = records.nodes[action.node_id]
    if not node.ray_node_id or node.state not in (NodeState.READY, NodeState.DRAINING):
        return
    accepted = sources.gcs.drain(node.ray_node_id, action.kind, action.deadline_s, action.reason)
    if accepted and action.kind == "idle":
        result.nodes[node.id] = lifecycle.drained(node, action)


def log_plan(plan: Plan) -> None:
    """Logs a plan, one line for each action. Waits are not logged. All assignments of a lease share one line."""
    assigned: dict[str, list[int]] = {}
    for action in plan.actions:
        if isinstance(action, Assign):
            assigned.setdefault(action.lease_id, []).append(action.member)
        elif not isinstance(action, Wait):
            log.info("decided", extra=describe(action))
    for lease_id, members in assigned.items():
        log.info("decided", extra={"action": "assign", "lease_id": lease_id, "members": members})
