"""What goes while the fleet costs more an hour than it may: the least valuable nodes, until it costs that again.

First nodes on which nobody is, then those with work that nobody leased, then gangs that may be preempted, the lowest
class first: an elastic one shrinks before any of its class stops. All have `NOTICE_S` for a checkpoint. Replicas and
gangs that may not be preempted stay, as do nodes that cost nothing. The queue and the planner decide on what is left.
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
"""So many times what it may cost is let be: prices of spot that runs swing, and what they stop would start again."""

EMPTY, UNLEASED, LEASED = range(3)

_COMING = (NodeState.REQUESTED, NodeState.LAUNCHING)
_STAYS = (*_COMING, NodeState.READY)

DisruptionRank = tuple[int, int, bool]
"""Of a node: what is there, the highest class of it, and whether a gang would have to stop."""


def enforce_cost_limit(snapshot: Snapshot) -> tuple[Action, ...]:
    """Nothing while Ray is silent: nobody knows what runs where."""
    most = snapshot.limits.most_micro_usd_h
    if most is None or not snapshot.ray_answers:
        return ()
    cost = sum(view.node.price_micro_usd_h for view in snapshot.nodes if view.node.state in _STAYS)
    if cost <= TOLERANCE * most:
        return ()
    served = [view for view in snapshot.endpoints if view.endpoint.state in SERVING_STATES]
    silent = sorted(view.endpoint.name for view in served if not is_fresh(view.load, snapshot.at_s))
    names = frozenset(view.endpoint.name for view in snapshot.endpoints)
    return _Shedding(snapshot, NodeOccupancy.from_snapshot(snapshot), most, cost, names, silent).decide()


def without(snapshot: Snapshot, shed: tuple[Action, ...]) -> Snapshot:
    """The snapshot once these nodes leave, so that nobody is seated there."""
    to = {a.node_id: NodeState.DRAINING for a in shed if isinstance(a, Drain)}
    to |= {a.node_id: NodeState.TERMINATING for a in shed if isinstance(a, Terminate)}
    views = (
        replace(view, node=replace(view.node, state=to[view.node.id])) if view.node.id in to else view
        for view in snapshot.nodes
    )
    return replace(snapshot, nodes=tuple(views))


@dataclass(slots=True, eq=False)
class _Shedding:
    snapshot: Snapshot
    roster: NodeOccupancy
    most_micro_usd_h: int
    cost_micro_usd_h: int
    """Of the nodes that stay."""
    names: frozenset[str]
    """Of endpoints."""
    silent: list[str]
    """Endpoints of which nobody knows where all their replicas are: any node with strange work may serve them."""
    staying: dict[DisruptionRank, list[Tenants]] = field(default_factory=dict)
    """Who may go, the cheapest first, of one price the newest last."""
    worth: dict[str, DisruptionRank] = field(default_factory=dict)
    gone: dict[str, Action] = field(default_factory=dict)
    away: dict[str, set[int]] = field(default_factory=dict)
    """Members that give way, by lease."""

    def decide(self) -> tuple[Action, ...]:
        why = f"the fleet costs {self._usd_h}, above the hard limit of {format_usd(self.most_micro_usd_h)}/h"
        for view in self.snapshot.nodes:
            if view.node.state in _STAYS and view.node.price_micro_usd_h > 0:
                self._sort_in(self.roster.tenants_of(view))
        while self.cost_micro_usd_h > self.most_micro_usd_h and self.staying:
            self._take(min(self.staying), why)
        waits = []
        if self.cost_micro_usd_h > self.most_micro_usd_h:
            unsure = f" ({', '.join(self.silent)}: unknown where)" if self.silent else ""
            what = f"{why}; the {self._usd_h} that are left serve{unsure}, or may not be preempted"
            waits = [Wait("fleet", "budget", what, "Raise metadata.raytide.limits, or end something.")]
        return (*self._leases(why), *self.gone.values(), *waits)

    @property
    def _usd_h(self) -> str:
        return f"{format_usd(self.cost_micro_usd_h)}/h"

    def _sort_in(self, old: Tenants) -> None:
        if (worth := self._worth(old)) is not None:
            self.worth[old.view.node.id] = worth
            insort(self.staying.setdefault(worth, []), old, key=_price_and_age)

    def _is_urgent(self, job: Job) -> bool:
        stance = self.snapshot.stances.get(job.id)
        return stance is not None and stance.is_urgent

    def _take_out(self, old: Tenants) -> None:
        worth = self.worth.pop(old.view.node.id)
        self.staying[worth] = [other for other in self.staying[worth] if other.view is not old.view]
        if not self.staying[worth]:
            del self.staying[worth]

    def _worth(self, old: Tenants) -> DisruptionRank | None:
        """None: it stays."""
        node = old.view.node
        if old.replicas or (node.subject in self.names and not _is_idle(old.view)):
            return None
        is_known = node.state in _COMING or _is_idle(old.view) or (bool(old.members) and old.accounts_for_all_usage)
        if self.silent and not is_known:
            return None
        seats = [
            (lease, m) for lease, m in old.members if not m.is_yielding and m.index not in self.away.get(lease.id, ())
        ]
        if not seats:
            is_left = (_is_idle(old.view) or old.members) and old.accounts_for_all_usage
            is_empty = node.subject != UNMANAGED if node.state in _COMING else is_left
            return (EMPTY if is_empty else UNLEASED), 0, False
        jobs = [self.roster.jobs.get(lease.job_id) for lease, _ in seats]
        if not all(job is not None and job.spec.is_preemptible and not self._is_urgent(job) for job in jobs):
            return None
        highest = max(self.snapshot.classes.get(job.spec.priority, 0) for job in jobs if job is not None)
        return LEASED, highest, any(self._stops(lease, old) for lease, _ in seats)

    def _take(self, worth: DisruptionRank, why: str) -> None:
        """Of the nodes of this worth the cheapest that is enough, else the dearest."""
        able = self.staying[worth]
        at = bisect_left(able, self.cost_micro_usd_h - self.most_micro_usd_h, key=_price)
        old = able[bisect_right(able, able[at].price_micro_usd_h, key=_price) - 1] if at < len(able) else able[-1]
        self._take_out(old)
        self._drain(old, worth[0], why)
        self.cost_micro_usd_h -= old.price_micro_usd_h
        for lease in {lease.id: lease for lease, _ in old.members}.values():
            everybody = {member.index for member in lease.members}
            here = {member.index for held, member in old.members if held is lease}
            self.away.setdefault(lease.id, set()).update(everybody if self._stops(lease, old) else here)
            for node_id in {member.node_id for member in lease.members} & self.worth.keys():
                other = self.roster.tenants_of(self.roster.views[node_id])
                self._take_out(other)
                self._sort_in(other)

    def _drain(self, old: Tenants, what: int, why: str) -> None:
        node, price = old.view.node, old.price_micro_usd_h
        said = (
            f"{old.description} gives way"
            if old.members
            else "nothing runs here"
            if what == EMPTY
            else "no job runs here"
        )
        keep = Rejected(f"keep {node.id}", "whatever else could go is worth more", price)
        if node.state in _COMING:
            self.gone[node.id] = Terminate(node.id, f"{why}; {said}", -price)
            return
        kind: Literal["idle", "notice"] = "idle" if what == EMPTY and not old.members else "notice"
        deadline_s = self.snapshot.at_s + (IDLE_DRAIN_S if kind == "idle" else NOTICE_S)
        self.gone[node.id] = Drain(node.id, kind, deadline_s, f"{why}; {said}", -price, (keep,))

    def _leases(self, why: str) -> Iterator[Preempt | Shrink]:
        until_s = self.snapshot.at_s + NOTICE_S
        for lease_id, gone in self.away.items():
            lease = self.roster.leases[lease_id]
            if len(gone) == len(lease.members):
                yield Preempt(lease.job_id, lease_id, until_s, f"{why}; it goes on when there is room again")
            else:
                yield Shrink(lease.job_id, lease_id, tuple(sorted(gone)), until_s, f"{why}; it goes on with the rest")

    def _stops(self, lease: Lease, old: Tenants) -> bool:
        """Whether it would fall below its minimum without its members there."""
        going = {member.index for held, member in old.members if held is lease} | self.away.get(lease.id, set())
        stay = sum(m.has_node and not m.is_yielding and m.index not in going for m in lease.members)
        return stay < lease.shape.at_least


def _is_idle(view: NodeView) -> bool:
    return view.idle_s > 0 and not view.busy


def _price(old: Tenants) -> int:
    return old.price_micro_usd_h


def _price_and_age(old: Tenants) -> tuple[int, float, str]:
    return old.price_micro_usd_h, old.view.node.requested_at_s, old.view.node.id
