"""The limit on the fleet's cost per hour. While the fleet costs more than the limit, the least valuable nodes leave.

Nodes leave in this order:

- Empty nodes.
- Nodes with work that has no lease.
- Nodes of gangs that may be preempted, the lowest priority class first. Within a class, elastic gangs
  shrink before any gang stops.

Members of gangs get `NOTICE_S` to write a checkpoint.

A node stays if it hosts a replica, or a gang that may not be preempted or has an urgent deadline. A node without a
price stays as well. If an endpoint has no fresh load report, the nodes that may host its replicas stay too. The
queue and the planner decide everything else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from raytide.autoscaler.disruption.disruption_cost import NOTICE_S
from raytide.autoscaler.disruption.termination import IDLE_DRAIN_S
from raytide.autoscaler.nodes.occupancy import NodeOccupancy, Tenants
from raytide.core.money import format_usd
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import UNMANAGED, Action, Drain, Preempt, Rejected, Shrink, Terminate, Wait
from raytide.core.objects.snapshot import NodeView, Snapshot
from raytide.scheduling.replicas import SERVING_STATES, is_fresh

TOLERANCE = 1.05
"""Hysteresis, as a multiple of the limit: spot prices fluctuate, and stopping at the exact limit would restart the same
work."""

EMPTY, UNLEASED, LEASED = range(3)

_STARTING = (NodeState.REQUESTED, NodeState.LAUNCHING)
_STAYING = (*_STARTING, NodeState.READY)

DisruptionRank = tuple[int, int, bool]
"""A node's occupancy (EMPTY...), the highest class on it, and whether a gang would have to stop."""


def enforce_cost_limit(snapshot: Snapshot) -> tuple[Action, ...]:
    """Returns the actions that enforce the limit on the fleet's cost per hour. These actions drain or terminate nodes,
    and preempt or shrink gangs. There are no actions while the cost is at most TOLERANCE times the limit. There are
    also no actions while Ray does not answer, because it is then unknown which work runs on which node.
    """
    most = snapshot.limits.most_micro_usd_h
    if most is None or not snapshot.ray_answers:
        return ()
    cost = sum(view.node.price_micro_usd_h for view in snapshot.nodes if view.node.state in _STAYING)
    if cost <= TOLERANCE * most:
        return ()
    served = [view for view in snapshot.endpoints if view.endpoint.state in SERVING_STATES]
    silent = sorted(view.endpoint.name for view in served if not is_fresh(view.load, snapshot.at_s))
    names = frozenset(view.endpoint.name for view in snapshot.endpoints)
    return _Shedding(snapshot, NodeOccupancy.from_snapshot(snapshot), most, cost, names, silent).decide()


def without(snapshot: Snapshot, shed: tuple[Action, ...]) -> Snapshot:
    """Returns the snapshot after the actions in `shed`: the nodes that these actions remove are marked as leaving.
    Nothing is placed on nodes that are leaving.
    """
    states = {a.node_id: NodeState.DRAINING for a in shed if isinstance(a, Drain)}
    states |= {a.node_id: NodeState.TERMINATING for a in shed if isinstance(a, Terminate)}
    views = (
        replace(view, node=replace(view.node, state=states[view.node.id])) if view.node.id in states else view
        for view in snapshot.nodes
    )
    return replace(snapshot, nodes=tuple(views))


@dataclass(slots=True, eq=False)
class _Shedding:
    snapshot: Snapshot
    occupancy: NodeOccupancy
    most_micro_usd_h: int
    cost_micro_usd_h: int
    """The price of the nodes that stay."""
    endpoints: frozenset[str]
    silent: list[str]
    """Endpoints without a fresh report: any node with unattributed usage may have their replicas."""
    candidates: dict[DisruptionRank, list[Tenants]] = field(default_factory=dict)
    """Nodes that may leave, by rank: the cheapest first, and of equally expensive ones the newest last."""
    ranks: dict[str, DisruptionRank] = field(default_factory=dict)
    """The rank of each candidate, by node id."""
    leaving: dict[str, Action] = field(default_factory=dict)
    yielding: dict[str, set[int]] = field(default_factory=dict)
    """The indices of the members that yield, by lease id."""

    def decide(self) -> tuple[Action, ...]:
        why = f"the fleet costs {self._usd_h}, above the hard limit of {format_usd(self.most_micro_usd_h)}/h"
        for view in self.snapshot.nodes:
            if view.node.state in _STAYING and view.node.price_micro_usd_h > 0:
                self._add(self.occupancy.tenants_of(view))
        while self.cost_micro_usd_h > self.most_micro_usd_h and self.candidates:
            self._shed_one(min(self.candidates), why)
        waits = []
        if self.cost_micro_usd_h > self.most_micro_usd_h:
            unsure = f" ({', '.join(self.silent)}: unknown where)" if self.silent else ""
            what = f"{why}; the remaining {self._usd_h} serve{unsure}, or may not be preempted"
            waits = [Wait("fleet", "budget", what, "Raise metadata.raytide.limits, or end something.")]
        return (*self._lease_actions(why), *self.leaving.values(), *waits)

    @property
    def _usd_h(self) -> str:
        return f"{format_usd(self.cost_micro_usd_h)}/h"

    def _add(self, tenants: Tenants) -> None:
        if (rank := self._rank(tenants)) is not None:
            self.ranks[tenants.view.node.id] = rank
            insort(self.candidates.setdefault(rank, []), tenants, key=_price_and_age)

    def _remove(self, tenants: Tenants) -> None:
        rank = self.ranks.pop(tenants.view.node.id)
        self.candidates[rank] = [other for other in self.candidates[rank] if other.view is not tenants.view]
        if not self.candidates[rank]:
            del self.candidates[rank]

    def _rank(self, tenants: Tenants) -> DisruptionRank | None:
        """Returns the position of a node in the order of disruption; None for a node that stays."""
        node, is_idle = tenants.view.node, _is_idle(tenants.view)
        if tenants.replicas or (node.subject in self.endpoints and not is_idle):
            return None
        accounts_for_all = bool(tenants.members) and tenants.accounts_for_all_usage
        if self.silent and not (node.state in _STARTING or is_idle or accounts_for_all):
            return None
        staying = [
            (lease, member)
            for lease, member in tenants.members
            if not member.gives_way and member.index not in self.yielding.get(lease.id, ())
        ]
        if not staying:
            is_left = accounts_for_all or (is_idle and tenants.accounts_for_all_usage)
            is_empty = node.subject != UNMANAGED if node.state in _STARTING else is_left
            return (EMPTY if is_empty else UNLEASED), 0, False
        jobs = [self.occupancy.jobs.get(lease.job_id) for lease, _ in staying]
        if not all(job is not None and job.spec.is_preemptible and not self._is_urgent(job) for job in jobs):
            return None
        highest = max(self.snapshot.classes.get(job.spec.priority, 0) for job in jobs if job is not None)
        return LEASED, highest, any(self._would_stop(lease, tenants) for lease, _ in staying)

    def _is_urgent(self, job: Job) -> bool:
        stance = self.snapshot.stances.get(job.id)
        return stance is not None and stance.is_urgent

    def _shed_one(self, rank: DisruptionRank, why: str) -> None:
        """Removes one node of this rank: the cheapest whose price covers the excess, else the most expensive."""
        nodes = self.candidates[rank]
        at = bisect_left(nodes, self.cost_micro_usd_h - self.most_micro_usd_h, key=_price)
        newest = bisect_right(nodes, nodes[at].price_micro_usd_h, key=_price) - 1 if at < len(nodes) else -1
        tenants = nodes[newest]
        self._remove(tenants)
        self._drain(tenants, rank[0], why)
        self.cost_micro_usd_h -= tenants.price_micro_usd_h
        for lease in {lease.id: lease for lease, _ in tenants.members}.values():
            whole = {member.index for member in lease.members}
            here = {member.index for held, member in tenants.members if held is lease}
            self.yielding.setdefault(lease.id, set()).update(whole if self._would_stop(lease, tenants) else here)
            for node_id in {member.node_id for member in lease.members} & self.ranks.keys():
                other = self.occupancy.tenants_of(self.occupancy.views[node_id])
                self._remove(other)
                self._add(other)

    def _drain(self, tenants: Tenants, occupancy: int, why: str) -> None:
        node, price = tenants.view.node, tenants.price_micro_usd_h
        if tenants.members:
            why = f"{why}; {tenants.description} is preempted"
        else:
            why = f"{why}; " + ("nothing runs here" if occupancy == EMPTY else "no job runs here")
        if node.state in _STARTING:
            self.leaving[node.id] = Terminate(node.id, why, -price)
            return
        kind: Literal["idle", "notice"] = "idle" if occupancy == EMPTY and not tenants.members else "notice"
        deadline_s = self.snapshot.at_s + (IDLE_DRAIN_S if kind == "idle" else NOTICE_S)
        keep = Rejected(f"keep {node.id}", "the other nodes that could leave are worth more", price)
        self.leaving[node.id] = Drain(node.id, kind, deadline_s, why, -price, (keep,))

    def _lease_actions(self, why: str) -> Iterator[Preempt | Shrink]:
        until_s = self.snapshot.at_s + NOTICE_S
        for lease_id, members in self.yielding.items():
            lease = self.occupancy.leases[lease_id]
            if len(members) == len(lease.members):
                reason = f"{why}; it continues when there is room again"
                yield Preempt(lease.job_id, lease_id, until_s, reason)
            else:
                reason = f"{why}; it continues with the rest"
                yield Shrink(lease.job_id, lease_id, tuple(sorted(members)), until_s, reason)

    def _would_stop(self, lease: Lease, tenants: Tenants) -> bool:
        """Returns True if the gang would fall below its minimum without its members on this node."""
        leaving = {m.index for held, m in tenants.members if held is lease} | self.yielding.get(lease.id, set())
        staying = sum(m.has_node and not m.gives_way and m.index not in leaving for m in lease.members)
        return staying < lease.shape.at_least


def _is_idle(view: NodeView) -> bool:
    return view.idle_s > 0 and not view.busy


def _price(tenants: Tenants) -> int:
    return tenants.price_micro_usd_h


def _price_and_age(tenants: Tenants) -> tuple[int, float, str]:
    return tenants.price_micro_usd_h, tenants.view.node.requested_at_s, tenants.view.node.id
