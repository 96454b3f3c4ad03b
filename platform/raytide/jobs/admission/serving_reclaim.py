"""The shock absorber: replicas for which there is no room take seats that elastic gangs can do without. Pure.

A gang that is asked shrinks in place, never below its minimum, and grows back when there is room again. Who can wait
for a node waits: seats are taken for replicas for which none can be had, and for those whose node would be ready later
than the seats are left, while more is asked than the replicas that answer carry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from raytide.core.objects.gang import Member, MemberState
from raytide.core.objects.node import NodeState, Resources, labels_match, round_up_gpu_share
from raytide.core.objects.plan import Rejected
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.jobs.admission import usage
from raytide.jobs.admission.priority import QueueTable, ranked
from raytide.jobs.admission.state import AdmissionState
from raytide.jobs.lifecycle import attained_service
from raytide.scheduling import reservations
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.placement import Slot
from raytide.scheduling.replicas import is_overloaded, replica_shape

LEAVE_S = 5.0
"""What a trainer takes to leave a seat: a checkpoint, and a new group without it."""
MOST_REJECTED = 4

Given = list[tuple[int, Member]]
"""Seats, each with the row of its job."""
Cost = tuple[bool, int, float, int, int, int, str]


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What is looked up of it for each replica."""

    at_s: float
    views: Mapping[str, NodeView]
    took_s: Mapping[str, float]
    """From the launch to ready, by type, on average."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Fleet:
        took_s: defaultdict[str, list[float]] = defaultdict(list)
        for node in (view.node for view in snapshot.nodes):
            if node.ready_at_s:
                took_s[node.type].append(node.ready_at_s - node.requested_at_s)
        views = {view.node.id: view for view in snapshot.nodes}
        return cls(snapshot.at_s, views, {name: fmean(times) for name, times in took_s.items()})

    def ready_in_s(self, seat: Slot) -> float:
        """When a node that starts, or would be bought, is there, by what others of its type took; unknown is late."""
        view, took_s = self.views.get(seat.node_id), self.took_s.get(seat.node_type)
        if view is not None and view.node.state is NodeState.READY:
            return 0.0
        if took_s is None:
            return math.inf
        age_s = 0.0 if view is None else self.at_s - view.node.requested_at_s
        return math.inf if age_s > 2 * took_s else max(0.0, took_s - age_s)

    def is_ready_with(self, node_id: str, labels: Mapping[str, str]) -> bool:
        view = self.views.get(node_id)
        return view is not None and view.node.state is NodeState.READY and labels_match(labels, view.labels)


def reclaim_for_serving(floor: AdmissionState, claims: QueueTable) -> None:
    """Let seats go until every published replica that needs one has room, the highest class first."""
    rank = {row: at for at, row in enumerate(ranked(claims).tolist())}
    fleet, taken = _Fleet.of(floor.snapshot), dict[str, None]()
    for view in sorted(floor.snapshot.endpoints, key=lambda view: -_class_of(floor, view)):
        kept = floor.snapshot.kept.get(view.endpoint.name, ())
        reservations.release(floor.room, kept)
        if view.endpoint.spec.members > 1:
            is_seated = _seat_whole(floor, fleet, view, rank)
        else:
            is_seated = _seat(floor, fleet, view, rank, taken)
        if is_seated:
            continue
        reservations.reserve(floor.room, kept)
        if kept or view.pools is not None:  # else no room that falls free would be enough
            floor.unseated.append(replica_shape(view))


def _seat(
    floor: AdmissionState, fleet: _Fleet, view: EndpointView, rank: Mapping[int, int], taken: dict[str, None]
) -> bool:
    """Seats for replicas one by one. False when some find none. `taken`: nodes on which others took seats."""
    if not (lacking := _without_room(floor, fleet, view)):
        return True
    instead = _instead(floor, view, lacking)
    offers, left = _Donations.of(floor, fleet, view, rank), dict(taken)
    while lacking and (node_id := _take_next(floor, fleet, view, offers, left)):
        taken[node_id], waited_for = None, lacking.pop(0)
        if waited_for is not None:
            floor.room.release(waited_for.node_id, replica_shape(view).resources)
        floor.alternatives[view.endpoint.name] = instead
    return None not in lacking


def _seat_whole(floor: AdmissionState, fleet: _Fleet, view: EndpointView, rank: Mapping[int, int]) -> bool:
    """Seats for replicas of several members, for all that one needs or for none. False when one finds none."""
    name, shape, lacking = view.endpoint.name, replica_shape(view), reservations.missing_members(floor.room, view)
    while lacking > 0:
        count = reservations.members_at_once(view, lacking)
        if (given := _given_together(floor, fleet, view, rank, count)) is None:
            return False
        if given:
            floor.alternatives[name] = _instead(floor, view, [None] * count)
        for row, member in given:
            floor.release(row, [member], name)
        floor.room.place(shape, count, subject=name)
        lacking -= count
    return True


def _given_together(
    floor: AdmissionState, fleet: _Fleet, view: EndpointView, rank: Mapping[int, int], count: int
) -> Given | None:
    """Seats that leave room for so many members beside what is free and can be bought; None when there are not
    enough."""
    trial = _what_if(floor)
    placed = trial.room.place(replica_shape(view), count, at_least=0, subject=view.endpoint.name)
    assert not isinstance(placed, Unschedulable)
    offers, left = _Donations.of(trial, fleet, view, rank), dict[str, None]()
    for _ in range(count - len(placed)):
        if not _take_next(trial, fleet, view, offers, left):
            return None
    return [
        (row, member)
        for row, gone in trial.away.items()
        for member in floor.leases[row].members
        if member.index in gone and member.index not in floor.away.get(row, ())
    ]


def _what_if(floor: AdmissionState) -> AdmissionState:
    """A copy on which seats may be taken for a trial."""
    away = {row: dict(gone) for row, gone in floor.away.items()}
    return replace(
        floor, room=floor.room.copy(), quotas=floor.quotas.copy(), away=away, _full={}, _units={}, _space=None
    )


def _take_next(
    floor: AdmissionState, fleet: _Fleet, view: EndpointView, offers: _Donations, left: dict[str, None]
) -> str | None:
    """The node on which one seat more costs least, which is taken. `left`: nodes that may have room over."""
    if (found := _left_over(floor, fleet, view, left) or offers.cheapest()) is None:
        return None
    node_id, given = found
    left[node_id] = None
    for row, member in given:
        floor.release(row, [member], view.endpoint.name)
    floor.room.reserve(node_id, view.endpoint.spec.resources)
    offers.look_again(node_id, given)
    return node_id


def _without_room(floor: AdmissionState, fleet: _Fleet, view: EndpointView) -> list[Slot | None]:
    """One for each replica that needs a seat now: where it would have to wait for a node, None when nowhere."""
    found = floor.room.replicas.get(view.endpoint.name, ())
    nowhere: list[Slot | None] = [None] * reservations.missing_members(floor.room, view)
    if not is_overloaded(view, floor.snapshot.at_s):
        return nowhere if view.pools is None else []  # with pools it was decided what is worth buying
    return nowhere + [seat for seat in found if fleet.ready_in_s(seat) > LEAVE_S]


def _left_over(
    floor: AdmissionState, fleet: _Fleet, view: EndpointView, left: dict[str, None]
) -> tuple[str, Given] | None:
    """A node on which seats that were taken leave room for a replica more, and no seats; those without are dropped."""
    room, spec = floor.room, view.endpoint.spec
    need = round_up_gpu_share(spec.resources)
    while left:
        node_id = next(iter(left))
        if fleet.is_ready_with(node_id, spec.labels) and room.node_table.has_free(room.rows[node_id], need):
            return node_id, []
        del left[node_id]
    return None


@dataclass(slots=True, eq=False)
class _Donor:
    """A gang that may be asked."""

    nodes: frozenset[str]
    spare: int
    worth: tuple[bool, int]
    gpus: float
    """Those that stand still while it shrinks; none when it does so anyhow."""


@dataclass(slots=True, eq=False)
class _Donations:
    """What each node would give up for one replica of an endpoint, looked at again only where something changed."""

    floor: AdmissionState
    need: Resources
    rank: Mapping[int, int]
    givers: dict[int, _Donor]
    teams: Mapping[str, Sequence[int]]
    there: Mapping[str, Given]
    """By node that a replica could use: the seats of those gangs."""
    best: dict[str, tuple[Cost, Given]]
    stale: set[str]

    @classmethod
    def of(cls, floor: AdmissionState, fleet: _Fleet, view: EndpointView, rank: Mapping[int, int]) -> _Donations:
        spec, may_shrink = view.endpoint.spec, floor.snapshot.limits.shrink_for_serving
        there, teams = defaultdict[str, Given](list), defaultdict[str, list[int]](list)
        givers = {}
        for row in (row for row in floor.leases if may_shrink and not _refusal(floor, view, row)):
            members = _ready(floor, row)
            for member in members:
                there[member.node_id].append((row, member))
            gpus = 0.0 if row in floor.away else _gpus(floor, row)
            nodes = frozenset(member.node_id for member in members)
            givers[row] = _Donor(nodes, _spare(floor, row), _worth(floor, row), gpus)
            teams[floor.jobs[row].spec.team].append(row)
        able = {n: on for n, on in there.items() if n in floor.room.rows and fleet.is_ready_with(n, spec.labels)}
        return cls(floor, round_up_gpu_share(spec.resources), rank, givers, teams, able, {}, {*able})

    def cheapest(self) -> tuple[str, Given] | None:
        """The node on which least is given up for one replica, and the seats: of borrowers, of the lowest class, with
        the fewest GPUs that stand still meanwhile, of those who come last."""
        for node_id in self.stale & self.there.keys():
            self.best.pop(node_id, None)
            if given := self._given(node_id):
                self.best[node_id] = self._cost(node_id, given), given
        self.stale.clear()
        found = min(self.best.items(), key=lambda item: item[1][0], default=None)
        return None if found is None else (found[0], found[1][1])

    def look_again(self, node_id: str, given: Given) -> None:
        """A replica took room there, and these seats gave way."""
        self.stale.add(node_id)
        for row in {row for row, _ in given}:
            giver = self.givers[row]
            giver.spare, giver.gpus = _spare(self.floor, row), 0.0
            self.stale |= giver.nodes
        for team in {team for row, _ in given for team in self.floor.quotas.ancestors(self.floor.jobs[row].spec.team)}:
            for row in self.teams.get(team, ()):
                if self.givers[row].worth != (worth := _worth(self.floor, row)):
                    self.givers[row].worth = worth
                    self.stale |= self.givers[row].nodes

    def _given(self, node_id: str) -> Given:
        away, givers = self.floor.away, self.givers
        on = [
            (row, member)
            for row, member in self.there[node_id]
            if givers[row].spare and member.index not in away.get(row, ())
        ]
        on.sort(key=lambda seat: (*givers[seat[0]].worth, -self.rank[seat[0]], -seat[1].index))
        return _enough(self.floor, node_id, on, {row: givers[row].spare for row, _ in on}, self.need)

    def _cost(self, node_id: str, given: Given) -> Cost:
        rows = {row for row, _ in given}
        worth, still = max(self.givers[row].worth for row in rows), sum(self.givers[row].gpus for row in rows)
        return (*worth, still, len(given), -max(self.rank[row] for row in rows), len(node_id), node_id)


def _enough(floor: AdmissionState, node_id: str, on_node: Given, spare: Mapping[int, int], need: Resources) -> Given:
    """As few of these seats as make room for one replica there, the first of them; none when all would not do."""
    room, at = floor.room, floor.room.rows[node_id]
    left = {row: spare[row] for row, _ in on_node}
    taken: Given = []
    for row, member in on_node:
        if room.node_table.has_free(at, need):
            break
        if left[row]:
            left[row] -= 1
            taken.append((row, member))
            room.release(node_id, floor.leases[row].shape.resources)
    chosen: Given = []
    does = room.node_table.has_free(at, need)
    for row, member in reversed(taken):
        room.reserve(node_id, floor.leases[row].shape.resources)
        if does and not room.node_table.has_free(at, need):
            room.release(node_id, floor.leases[row].shape.resources)
            chosen.append((row, member))
    for row, _ in chosen:
        room.reserve(node_id, floor.leases[row].shape.resources)
    return chosen


def _refusal(floor: AdmissionState, view: EndpointView, row: int) -> str:
    """Why no seat of a gang is taken for this endpoint; empty when one may be."""
    job = floor.jobs[row]
    if not attained_service.may_be_preempted(job):
        return "it cannot be preempted"
    stance = floor.snapshot.stances.get(job.id)
    if stance is not None and stance.is_urgent:
        return "its deadline leaves it no time"
    if _priority(floor, row) >= _class_of(floor, view):
        return f"its class, {job.spec.priority}, is not below that of the endpoint"
    if not _spare(floor, row):
        return f"it has no more than the {floor.leases[row].shape.at_least} members that it needs"
    return ""


def _instead(floor: AdmissionState, view: EndpointView, lacking: Sequence[Slot | None]) -> tuple[Rejected, ...]:
    """What else could have given the replicas room."""
    name, found = view.endpoint.name, []
    if nowhere := sum(seat is None for seat in lacking):
        found.append(Rejected("a node", floor.room.why_not(replica_shape(view), nowhere, f"endpoint {name}").reason))
    for seat in dict.fromkeys(seat for seat in lacking if seat is not None):
        when = "would have to be bought" if seat.is_new else "still starts"
        ready = view.load.ready if view.load is not None else 0
        why = f"it {when}, and more is asked now than the ready replicas ({ready}) carry"
        found.append(Rejected(f"{seat.node_type} in {seat.zone}" if seat.is_new else seat.node_id, why))
    for row in floor.leases:
        if why := _refusal(floor, view, row):
            found.append(Rejected(floor.jobs[row].id, why))
    return tuple(found[:MOST_REJECTED])


def _ready(floor: AdmissionState, row: int) -> list[Member]:
    """Seats that it uses and that stay."""
    gone = floor.away.get(row, ())
    members = floor.leases[row].members
    return [m for m in members if m.state is MemberState.READY and m.index not in gone]


def _spare(floor: AdmissionState, row: int) -> int:
    """How many of them it can do without."""
    return max(0, len(_ready(floor, row)) - floor.leases[row].shape.at_least)


def _worth(floor: AdmissionState, row: int) -> tuple[bool, int]:
    """What is given up last is largest: no borrower, a high class."""
    job, shape = floor.jobs[row], floor.leases[row].shape
    return not floor.quotas.borrows(job.spec.team, usage.quota_usage(shape, [None])), _priority(floor, row)


def _gpus(floor: AdmissionState, row: int) -> float:
    lease = floor.leases[row]
    return lease.shape.gpus * len(usage.retained_members(lease))


def _priority(floor: AdmissionState, row: int) -> int:
    return floor.snapshot.classes.get(floor.jobs[row].spec.priority, 0)


def _class_of(floor: AdmissionState, view: EndpointView) -> float:
    """Above all others unless the endpoint names its class."""
    priority = view.endpoint.spec.priority
    return math.inf if priority is None else floor.snapshot.classes.get(priority, 0)
