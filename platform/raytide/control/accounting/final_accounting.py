"""Ends the records of a cluster: its nodes become GONE, their costs are booked, and unfinished jobs FAILED."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.providers.base import Machine
from raytide.control.accounting.billing_intervals import update_intervals
from raytide.control.accounting.cost_report import cost_report
from raytide.control.views import CostReport
from raytide.core.errors import ConflictError
from raytide.core.money import to_us
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import JobState
from raytide.core.objects.node import Node, NodeState
from raytide.core.state import Changes, Store
from raytide.ledger.reconcile import Difference, reconcile
from raytide.queue.lifecycle import leases

_WHY = "the cluster was ended"


@dataclass(frozen=True, slots=True)
class Closed:
    """The final records of a cluster."""

    nodes: tuple[Node, ...]
    """All nodes that the cluster ever had, newest first."""
    cost: CostReport
    differences: tuple[Difference, ...]
    """Nodes whose entries differ from the provider's bill; empty unless there is a bug."""


@contextmanager
def sole_lead(store: Store, holder: str) -> Iterator[None]:
    """Keeps other controllers from leading inside the block. Raises ConflictError if one leads."""
    if other := store.lead(holder):
        raise ConflictError(
            f"the records were not changed: {other} leads on the same state.",
            hint="The processes here were ended. Give each cluster a state_url of its own.",
        )
    try:
        yield
    finally:
        store.resign()


def close_books(store: Store, machines: tuple[Machine, ...], now_s: float) -> Closed:
    """Ends the records of a cluster whose processes are gone, and returns the final accounts. It may be repeated."""
    records = store.load()
    by_id = {machine.node_id: machine for machine in machines}
    nodes = {
        node.id: _gone(lifecycle.from_provider(node, by_id.get(node.id), None, now_s), now_s) for node in records.nodes
    }
    booking = update_intervals(
        nodes,
        by_id,
        dict(records.intervals),
        {},
        lambda node_id, end_us: store.books.entries(node_id=node_id, ending_after_us=end_us),
        to_us(now_s),
    )
    store.commit(
        Changes(
            at_s=now_s,
            jobs=tuple(
                replace(
                    job,
                    state=JobState.STOPPED if job.stop_requested else JobState.FAILED,
                    ended_at_s=now_s,
                    reason=_WHY,
                )
                for job in records.jobs
            ),
            leases=tuple(leases.release(lease, _WHY) for lease in records.leases),
            nodes=tuple(nodes.values()),
            endpoints=tuple(
                replace(endpoint, state=EndpointState.DELETED, target_replicas=0, ended_at_s=now_s, reason=_WHY)
                for endpoint in records.endpoints
            ),
            entries=booking.entries,
            intervals=booking.intervals,
            closed=booking.closed,
        )
    )
    return Closed(
        nodes=store.nodes(),
        cost=cost_report(store.books, machines, to_us(now_s)),
        differences=reconcile(machines, store.books.entries()),
    )


def _gone(node: Node, now_s: float) -> Node:
    """Returns the node as GONE; one that was never bought cost nothing."""
    if node.state is NodeState.GONE:
        return node
    return replace(node, state=NodeState.GONE, ended_at_s=now_s, reason=_WHY)
