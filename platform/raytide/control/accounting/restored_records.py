"""Keeps a restored controller from acting until `raytide resume`, and then reconciles its records with the provider.

A restored database names nodes that are gone, and lacks nodes that were bought since the backup. A controller that
relied on it would end every machine that has no record, and buy machines for work that no longer exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.providers.base import Machine
from raytide.control.accounting.billing_intervals import update_intervals
from raytide.core.money import to_us
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.specs.order import HOLD, Order
from raytide.core.state import Changes, Records, Store

ENDED = "it was gone when the cluster was restored"
UNKNOWN = "bought after the backup, which has no record of its work"


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The nodes for which the restored records and the provider's list of machines disagree."""

    gone: tuple[Node, ...] = ()
    """Nodes that the provider does not list. Their end is unknown; they are booked until the backup."""
    unknown: tuple[Node, ...] = ()
    """Machines without a record. They become nodes that end, so that their whole cost is booked."""

    def __str__(self) -> str:
        gone, unknown = (", ".join(node.id for node in nodes) or "none" for nodes in (self.gone, self.unknown))
        return f"nodes that are gone: {gone}; machines without a record, which end: {unknown}"


def step_hold(
    store: Store,
    records: Records,
    list_machines: Callable[[], Iterable[Machine]],
    node_types: Mapping[str, NodeType],
    now_s: float,
) -> str:
    """Returns the reason why the controller must not act in this tick, or an empty string if it may act.

    On a `resume` order, the call records the reconciliation and ends the hold in one transaction. The next tick then
    acts on these records. The hold continues while the provider does not answer.
    """
    hold = next((order for order in records.orders if order.kind == HOLD), None)
    if hold is None:
        return ""
    try:
        newest = max((_number(node.id) for node in store.nodes(limit=1)), default=0)
        found = reconcile_with_provider(records, tuple(list_machines()), node_types, newest, hold.at_s, now_s)
    except Exception as error:  # a cloud's client may raise anything
        return f"on hold: {hold.reason}; the provider does not answer: {error}"
    told = [order for order in records.orders if order.kind == "resume"]
    if not told:
        return f"on hold: {hold.reason}; {found}; `raytide resume` goes on"
    done = tuple(replace(order, done_at_s=now_s, outcome=str(found)) for order in (hold, *told))
    store.commit(_changes(store, records, found, done, now_s))
    return f"resumed by {told[0].user}: {found}"


def reconcile_with_provider(
    records: Records,
    machines: Iterable[Machine],
    node_types: Mapping[str, NodeType],
    newest: int,
    backup_at_s: float,
    now_s: float,
) -> Reconciliation:
    """Compares the records with the provider's machines, and returns the nodes whose records must change.

    `newest` is the highest node number in the records. Machines that ended after the backup need no change: the
    provider lists their end, and they are booked as usual.
    """
    listed = {machine.node_id: machine for machine in machines}
    gone = tuple(_gone(node, backup_at_s) for node in records.nodes if node.id not in listed)
    numbered = (machine for machine in listed.values() if _number(machine.node_id) > newest)
    unknown = tuple(_adopted(machine, node_types.get(machine.node_type), now_s) for machine in numbered)
    return Reconciliation(gone, unknown)


def _changes(store: Store, records: Records, found: Reconciliation, done: tuple[Order, ...], now_s: float) -> Changes:
    booking = update_intervals(
        {node.id: node for node in found.gone},
        {},
        dict(records.intervals),
        {},
        lambda node_id, end_us: store.books.entries(node_id=node_id, ending_after_us=end_us),
        to_us(now_s),
    )
    return Changes(
        at_s=now_s,
        nodes=(*found.gone, *found.unknown),
        entries=booking.entries,
        intervals=booking.intervals,
        closed=booking.closed,
        orders=done,
    )


def _gone(node: Node, backup_at_s: float) -> Node:
    ended_at_s = max(backup_at_s, node.started_at_s or backup_at_s)
    return replace(node, state=NodeState.GONE, ended_at_s=ended_at_s, reason=f"{lifecycle.ENDED_BY_PROVIDER}: {ENDED}")


def _adopted(machine: Machine, node_type: NodeType | None, now_s: float) -> Node:
    return Node(
        id=machine.node_id,
        type=machine.node_type,
        zone=machine.zone,
        market=CapacityType.ON_DEMAND if node_type is None else node_type.market,
        price_micro_usd_h=machine.price_micro_usd_h,
        state=NodeState.TERMINATING,
        requested_at_s=min(machine.started_at_s, now_s),
        started_at_s=machine.started_at_s,
        address=machine.address,
        reason=UNKNOWN,
    )


def _number(node_id: str) -> int:
    return int(node_id.removeprefix("node-"))
