"""Reclaims capacity for serving: a replica that does not fit preempts spare members of elastic gangs. A gang shrinks in
place, never below its minimum size, and grows back later.

A replica preempts members only in two cases: it can get no new node, or its endpoint is overloaded and a member would
leave sooner than the new node would be ready. Otherwise the replica waits for the new node.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean

from raytide.core.objects.gang import Member, MemberState
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import Rejected
from raytide.core.objects.snapshot import EndpointView, NodeView
from raytide.queue.admission import usage
from raytide.queue.admission.preemption import Preemptor
from raytide.queue.admission.priority import QueueTable, ranked
from raytide.queue.admission.state import AdmissionState
from raytide.queue.admission.victims import Simulation, Victim, select_victims
from raytide.queue.lifecycle import attained_service
from raytide.scheduling import reservations
from raytide.scheduling.node_table import members_in
from raytide.scheduling.placement import Slot
from raytide.scheduling.replicas import is_overloaded, replica_shape

LEAVE_S = 5.0
"""The seconds in which a trainer frees a member: for a checkpoint, and a new process group without it."""
MOST_REJECTED = 4

_Key = tuple[bool, int, float, int, int]


def reclaim_for_serving(preemptor: Preemptor, table: QueueTable) -> None:
    """Preempts spare gang members so that the wanted replicas of the endpoints fit. Replicas that would not fit even
    then keep waiting. Endpoints of the highest priority class go first.
    """
    state, times = preemptor.state, _StartTimes.of(preemptor.state.snapshot.nodes, preemptor.state.snapshot.at_s)
    rank = {row: place for place, row in enumerate(ranked(table).tolist())}
    for view in sorted(state.snapshot.endpoints, key=lambda view: -_priority_of(state, view)):
        reserved = state.snapshot.kept.get(view.endpoint.name, ())
        for node_id, resources in reserved:
            state.release_on(node_id, resources)
        if _place_replicas(preemptor, view, times, rank):
            continue
        for node_id, resources in reserved:
            state.reserve_on(node_id, resources)
        if reserved or view.pools is not None:  # else the room that becomes free would not be enough
            state.unplaced.append(replica_shape(view))


def _place_replicas(preemptor: Preemptor, view: EndpointView, times: _StartTimes, rank: Mapping[int, int]) -> bool:
    """Places all replicas that lack nodes, each of them whole. Returns False as soon as a replica does not fit.

    Replicas of one member use ready nodes only; those of several also use nodes that can be bought.
    """
    state, name, shape = preemptor.state, view.endpoint.name, replica_shape(view)
    is_wide = view.endpoint.spec.members > 1
    if not (lacking := _lacking(state, view, times)):
        return True
    rejected, donors = _rejected(state, view, lacking), _Donors(state, view, rank)
    while lacking:
        count = reservations.members_at_once(view, len(lacking)) if is_wide else 1
        request = state.requests.request(shape.model_copy(update={"members": count}))
        victims: list[Victim] = []
        if state.index.count(request, ready_only=not is_wide).total < count:
            simulation = Simulation(state, [request], ready_only=not is_wide)
            if not (victims := select_victims(simulation, donors.spare_members())):
                break
        place = partial(state.place, shape, count, name, max_new=None if is_wide else 0)
        if preemptor.evict(victims, name, place) is None:
            break
        for slot in lacking[:count]:
            if slot is not None:
                state.release_on(slot.node_id, shape.resources)
        del lacking[:count]
        if victims:
            state.alternatives[name] = rejected
            donors.update({victim.row for victim in victims})
    return None not in lacking


def _lacking(state: AdmissionState, view: EndpointView, times: _StartTimes) -> list[Slot | None]:
    """Returns one entry for each member that needs a slot now: the slot for which it would have to wait, or None if
    there is none.
    """
    without_slot: list[Slot | None] = [None] * reservations.missing_members(state.room, view)
    if view.endpoint.spec.members > 1:
        return without_slot
    if not is_overloaded(view, state.snapshot.at_s):
        return without_slot if view.pools is None else []  # its policy has decided what is worth buying
    slots = state.room.replicas.get(view.endpoint.name, ())
    return without_slot + [slot for slot in slots if times.ready_in_s(slot) > LEAVE_S]


@dataclass(frozen=True, slots=True)
class _StartTimes:
    at_s: float
    views: Mapping[str, NodeView]
    mean_s: Mapping[str, float]
    """The mean seconds from launch to ready, by node type."""

    @classmethod
    def of(cls, nodes: Sequence[NodeView], at_s: float) -> _StartTimes:
        seen: defaultdict[str, list[float]] = defaultdict(list)
        for node in (view.node for view in nodes):
            if node.ready_at_s:
                seen[node.type].append(node.ready_at_s - node.requested_at_s)
        views = {view.node.id: view for view in nodes}
        return cls(at_s, views, {name: fmean(times) for name, times in seen.items()})

    def ready_in_s(self, slot: Slot) -> float:
        """Returns the seconds until the slot's node is ready, by its type's mean; infinite if unknown or overdue."""
        view, mean_s = self.views.get(slot.node_id), self.mean_s.get(slot.node_type)
        if view is not None and view.node.state is NodeState.READY:
            return 0.0
        if mean_s is None:
            return math.inf
        age_s = 0.0 if view is None else self.at_s - view.node.requested_at_s
        return math.inf if age_s > 2 * mean_s else max(0.0, mean_s - age_s)


class _Donors:
    """The gangs that may shrink for an endpoint, in the order of preemption.

    Borrowers come first, then the lowest class, then the fewest GPUs that pause while the gang shrinks, then the last
    in the order of the queue.
    """

    def __init__(self, state: AdmissionState, view: EndpointView, rank: Mapping[int, int]) -> None:
        self._state, self._rank, self._labels = state, rank, view.endpoint.spec.labels
        self._need = state.room.node_table.columns(view.endpoint.spec.resources)
        self._borrowing = state.quotas.borrowing(state.quotas.names)
        self._keys: dict[int, _Key] = {}
        self._by_team: defaultdict[str, set[int]] = defaultdict(set)
        for row in state.leases if state.snapshot.limits.shrink_for_serving else ():
            if not _refusal(state, view, row):
                self._keys[row] = self._key(row)
                self._by_team[state.jobs[row].spec.team].add(row)
        self._order = sorted(self._keys.values())

    def spare_members(self) -> Iterator[Victim]:
        """Yields the possible victims: of each gang, at most the members beyond its minimum."""
        for *_, row in self._order:
            yield from self._victims(row)[: _spare_count(self._state, row)]

    def update(self, rows: set[int]) -> None:
        """Updates the order after members of the gangs in `rows` were preempted."""
        before, self._borrowing = self._borrowing, self._state.quotas.borrowing(self._state.quotas.names)
        for team in before ^ self._borrowing:
            rows |= self._by_team[team]
        for row in rows & self._keys.keys():
            del self._order[bisect_left(self._order, self._keys.pop(row))]
            if _spare_count(self._state, row):
                self._keys[row] = self._key(row)
                insort(self._order, self._keys[row])

    def _victims(self, row: int) -> list[Victim]:
        """Returns the gang's members on ready nodes that match the endpoint's labels. Nodes on which the fewest members
        have to leave for a replica come first, so that members do not leave one by one from many nodes.
        """
        state, nodes, index = self._state, self._state.room.node_table, self._state.index
        by_node: defaultdict[int, list[Victim]] = defaultdict(list)
        need = nodes.columns(state.leases[row].shape.resources)
        for member in reversed(_ready_members(state, row)):
            victim = Victim.of(state, row, (member,), need, is_minimum=False)
            for at in victim.at:
                if nodes.is_ready(at) and nodes.matches(at, self._labels):
                    by_node[at].append(victim)
        groups, rest = list[list[Victim]](), list[Victim]()
        for at, victims in by_node.items():
            free, group = index.free_at(at).copy(), list[Victim]()
            replicas = members_in(self._need, free)
            for victim in victims:
                group.append(victim)
                for column, amount in need:
                    free[column] += amount
                if members_in(self._need, free) > replicas:
                    groups.append(group)
                    replicas, group = members_in(self._need, free), []
            rest += group
        groups.sort(key=len)
        return [*chain(*groups), *rest]

    def _key(self, row: int) -> _Key:
        state, lease = self._state, self._state.leases[row]
        team, quota = state.jobs[row].spec.team, usage.quota_usage(lease.shape, [None])
        pausing = 0.0 if row in state.yielded else lease.shape.gpus * len(usage.retained_members(lease))
        return not state.quotas.borrows(team, quota), _job_priority(state, row), pausing, -self._rank[row], row


def _ready_members(state: AdmissionState, row: int) -> list[Member]:
    gone = state.yielded.get(row, ())
    return [m for m in state.leases[row].members if m.state is MemberState.READY and m.index not in gone]


def _spare_count(state: AdmissionState, row: int) -> int:
    return max(0, len(_ready_members(state, row)) - state.leases[row].shape.at_least)


def _refusal(state: AdmissionState, view: EndpointView, row: int) -> str:
    """Returns why a gang may not shrink for this endpoint; empty if it may."""
    job = state.jobs[row]
    if not attained_service.may_be_preempted(job):
        return "it cannot be preempted"
    stance = state.snapshot.stances.get(job.id)
    if stance is not None and stance.is_urgent:
        return "its deadline leaves it no time"
    if _job_priority(state, row) >= _priority_of(state, view):
        return f"its class, {job.spec.priority}, is not below that of the endpoint"
    if not _spare_count(state, row):
        return f"it has no more than the {state.leases[row].shape.at_least} members that it needs"
    return ""


def _rejected(state: AdmissionState, view: EndpointView, lacking: Sequence[Slot | None]) -> tuple[Rejected, ...]:
    """Returns the alternatives to the preemption, and why they were not taken."""
    name, found = view.endpoint.name, []
    if count := sum(slot is None for slot in lacking):
        found.append(Rejected("a node", state.room.why_not(replica_shape(view), count, f"endpoint {name}").reason))
    for slot in dict.fromkeys(slot for slot in lacking if slot is not None):
        when = "would have to be bought" if slot.is_new else "still starts"
        ready = view.load.ready if view.load is not None else 0
        why = f"it {when}, and the load is more than the ready replicas ({ready}) can carry"
        found.append(Rejected(f"{slot.node_type} in {slot.zone}" if slot.is_new else slot.node_id, why))
    for row in state.leases:
        if why := _refusal(state, view, row):
            found.append(Rejected(state.jobs[row].id, why))
    return tuple(found[:MOST_REJECTED])


def _job_priority(state: AdmissionState, row: int) -> int:
    return state.snapshot.classes.get(state.jobs[row].spec.priority, 0)


def _priority_of(state: AdmissionState, view: EndpointView) -> float:
    """Returns the value of the endpoint's class; infinity, above all classes, if it names none."""
    priority = view.endpoint.spec.priority
    return math.inf if priority is None else state.snapshot.classes.get(priority, 0)
