"""Ends the records of a cluster. Its nodes become GONE and their costs are booked. Unfinished jobs become FAILED or
STOPPED.

The cost report compares the costs up to now with the provider's bill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.providers.base import Machine
from raytide.control.accounting.billing_intervals import update_intervals
from raytide.control.views import CostLine, CostReport
from raytide.core.errors import ConflictError
from raytide.core.money import to_us
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import JobState
from raytide.core.objects.node import Node, NodeState
from raytide.core.state import Changes, Store
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.ledger.reconcile import Difference, bill, reconcile
from raytide.ledger.report import accrued
from raytide.queue.lifecycle import leases

_WHY = "the cluster was ended"


def cost_report(books: LedgerQueries, machines: Iterable[Machine], now_us: int, team: str | None = None) -> CostReport:
    """Returns all costs up to now. For ended machines, also returns the sum in the ledger and the sum in the provider's
    bill.

    With `team`, returns only the team's costs and no bill, because a machine may serve several teams.
    """
    lines = [line for line in books.lines() if team in (None, line.team)]
    booked = Counter({(str(line.kind), line.subject, line.team): line.amount_micro_usd for line in lines})
    pending = [entry for entry in accrued(books.intervals(), now_us) if team in (None, entry.team)]
    by_node = {} if team else books.booked("node")
    total = Counter(booked)
    for entry in pending:
        total[(str(entry.kind), entry.subject, entry.team)] += entry.amount_micro_usd
    ended = [machine for machine in machines if machine.ended_at_s is not None and not team]
    return CostReport(
        lines=tuple(CostLine(*key, amount_micro_usd=amount) for key, amount in sorted(total.items())),
        booked_micro_usd=sum(booked.values()),
        accrued_micro_usd=sum(entry.amount_micro_usd for entry in pending),
        billed_micro_usd=sum(bill(machine) for machine in ended),
        booked_ended_micro_usd=sum(by_node.get(machine.node_id, 0) for machine in ended),
    )


@dataclass(frozen=True, slots=True)
class Closed:
    """The final accounts of a cluster. `close_books` computes them when it ends the cluster's records."""

    nodes: tuple[Node, ...]
    """All nodes that the cluster ever had, newest first."""
    cost: CostReport
    differences: tuple[Difference, ...]
    """Nodes whose entries differ from the provider's bill; empty unless there is a bug."""


@contextmanager
def sole_lead(store: Store, holder: str) -> Iterator[None]:
    """A context manager that keeps other controllers from leading. Raises ConflictError if one leads already."""
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
    """Ends the records of a cluster whose processes are gone, and returns the final accounts. A second call changes
    nothing.
    """
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
    """Returns the node as GONE, ended now unless it was GONE already."""
    if node.state is NodeState.GONE:
        return node
    return replace(node, state=NodeState.GONE, ended_at_s=now_s, reason=_WHY)
