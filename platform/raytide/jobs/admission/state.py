"""The live queue's floor: what fits by nodes, by quota and by budget, and what was given away in this pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.objects.gang import Lease, Member, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import NodeType, Resources
from raytide.core.objects.plan import Rejected
from raytide.core.objects.snapshot import Snapshot
from raytide.jobs.admission import usage as seats
from raytide.jobs.admission.cycle import Victims
from raytide.jobs.admission.fit_index import FitIndex
from raytide.jobs.admission.givers import PreemptionCandidates
from raytide.jobs.admission.means import AffordableShapes
from raytide.jobs.admission.preemption import PreemptibleCapacity, Units, Victim, select_victims
from raytide.jobs.admission.priority import Ints
from raytide.jobs.admission.shape_request import ShapeRequest, ShapeRequests
from raytide.jobs.budget import Budgets
from raytide.jobs.lifecycle import attained_service
from raytide.jobs.quota import Quotas
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.market_constraint import constrain
from raytide.scheduling.state import Placements, SchedulingState

MOST_PUSHES = 100
"""For so many jobs others give way in one decision at most; the next one, a tick later, goes on. Each asks for
checkpoints, and nothing else is decided meanwhile."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a job was given."""

    shape: Shape
    seats: Placements
    reserved_micro_usd: int


@dataclass(slots=True, eq=False)
class AdmissionState:
    """Rows are places in `jobs`; those that hold something have a lease."""

    snapshot: Snapshot
    jobs: Sequence[Job]
    leases: dict[int, Lease]
    room: SchedulingState
    quotas: Quotas
    budgets: Budgets
    asks: ShapeRequests
    types: Mapping[str, NodeType]
    """Of each node."""
    is_preemptible: Sequence[bool]
    """By row: whether it may be preempted."""
    promised: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By row and index of a seat that waits for a node: the one that it would find, which may have to be bought."""
    taken: dict[int, Taken] = field(default_factory=dict)
    refused: dict[int, Unschedulable] = field(default_factory=dict)
    away: dict[int, dict[int, str]] = field(default_factory=dict)
    """By row: its seats that give way, each with the job or the endpoint for whom."""
    unseated: list[Shape] = field(default_factory=list)
    """Of replicas that have no room, and for which nobody gives way."""
    alternatives: dict[str, tuple[Rejected, ...]] = field(default_factory=dict)
    """By endpoint for whom seats give way: what else was thought of."""
    quota_owners: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    """By resource, then by team: the rows that wait for it of their own quota. No other team borrows it for members
    that it can do without."""
    head: int | None = None
    """The first in the order for whom there is no room: what cannot be stopped again may not take its place."""
    preemptors: int = 0
    """For how many jobs others give way."""
    _future: SchedulingState | None = None
    """The room that there will be beside the head."""
    _emptied: PreemptibleCapacity | None = None
    _full: dict[int, Unschedulable] = field(default_factory=dict)
    _stuck: set[tuple[object, ...]] = field(default_factory=set)
    _givers: PreemptionCandidates | None = None
    _means: dict[int, AffordableShapes] = field(default_factory=dict)
    _space: FitIndex | None = None
    _units: dict[int, Units] = field(default_factory=dict)
    _quotas: dict[tuple[int, str], Resources] = field(default_factory=dict)

    def first(self, waiting: Ints) -> int | None:
        """Everybody is tried, and told why not, until too many have been asked to give way."""
        if self.preemptors < MOST_PUSHES:
            return 0 if len(waiting) else None
        reason = f"{self.preemptors} jobs that go before it make others give way in this decision."
        self.refused |= dict.fromkeys(
            waiting.tolist(), Unschedulable("behind", reason, "Nothing to do: it is looked at in the next.")
        )
        return None

    def admit(self, row: int) -> bool:
        found = self._find(row)
        if isinstance(found, Unschedulable):
            self.refused[row] = found
            return False
        self._take(row, *found)
        return True

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
        constraint = self.refused[row].constraint
        if constraint not in ("capacity", "stock", "quota", "budget") or not (asks := self.means(row).paid):
            return ()
        if (gone := self._push(row, victims, asks)) is not None:
            return gone
        if self.head is None and constraint in ("capacity", "stock"):
            self.head, self._future = row, self._room_of_head(self.jobs[row])
        return ()

    def waits_for_own(self, row: int) -> None:
        for name in {name for ask in self.means(row).asks for name in self.quotas.limited & ask.least.keys()}:
            self.quota_owners.setdefault(name, {}).setdefault(self.jobs[row].spec.team, set()).add(row)

    def release(self, row: int, members: Iterable[Member], by: str) -> None:
        """These seats of a holder are free for others from now on."""
        lease, job = self.leases[row], self.jobs[row]
        for member in members:
            self._give(self.node_of(row, member), lease.shape.resources)
            self.quotas.release(job.spec.team, self.quota_of(row, member))
            self.away.setdefault(row, {})[member.index] = by
        self._full.clear()
        self._units.pop(row, None)

    def units(self, row: int) -> Units:
        """What a holder can be asked for beyond what gives way."""
        if (found := self._units.get(row)) is None:
            found = self._units[row] = Units.of(self, row)
        return found

    def node_of(self, row: int, member: Member) -> str:
        """Where the seat's room is: on its node, or where it would find one; "" when there is none for it."""
        return member.node_id or self.promised.get((row, member.index), "")

    def quota_of(self, row: int, member: Member) -> Resources:
        """What the seat counts."""
        node_type = self.types.get(member.node_id)
        key = (row, "" if node_type is None else node_type.name)
        if (found := self._quotas.get(key)) is None:
            found = self._quotas[key] = seats.quota_usage(self.leases[row].shape, [node_type])
        return found

    def micro_usd_h(self, lease: Lease) -> float:
        """What the seats that it keeps cost."""
        on = [self.types[member.node_id] for member in seats.retained_members(lease) if member.node_id in self.types]
        return seats.price_per_hour(lease.shape, on)

    @property
    def givers(self) -> PreemptionCandidates:
        """The holders that may be asked for seats, and still have some."""
        if self._givers is None:
            self._givers = PreemptionCandidates.of(self.jobs, self.leases)
        return self._givers

    @property
    def emptied(self) -> PreemptibleCapacity:
        """What there would be if everybody gave way who may."""
        if self._emptied is None:
            self._emptied = PreemptibleCapacity.of(self)
        return self._emptied

    @property
    def space(self) -> FitIndex:
        """The room, counted."""
        if self._space is None:
            self._space = FitIndex(self.room)
        return self._space

    def is_own(self, job: Job) -> bool:
        """Whether the least that it asks for is its team's own quota, which others may hold."""
        return self.quotas.may_reclaim(job.spec.team, self.asks.first(job).least)

    def may_ask(self, job: Job) -> frozenset[str] | None:
        """The teams of whom it may ask seats; None for all. Who would borrow asks nobody of another team that keeps
        within its own: it would only be taken back."""
        need = self.asks.first(job).least
        if self.quotas.limited.isdisjoint(need) or self.quotas.may_reclaim(job.spec.team, need):
            return None
        return self.quotas.borrowing(need) | {job.spec.team}

    def room_to_grow(self, row: int, most: int) -> int:
        """Take room for as many more members of a holder as quota, nodes and budgets allow."""
        job = self.jobs[row]
        shape = next(iter(constrain([self.leases[row].shape], self.snapshot.stances.get(job.id))), None)
        if shape is None or self.lacks(row, (ask := self.asks.ask(shape)).one) is not None:
            return 0
        count, paces = min(most, self._allowed(row, ask)), self.snapshot.paces.get(job.id)
        placed = self.room.place(shape, count, at_least=0, subject="it", paces=paces)
        assert not isinstance(placed, Unschedulable)
        on = seats.placed_types(placed, self.snapshot.node_types)
        held = self.micro_usd_h(self.leases[row])
        prices = {count: seats.price_per_hour(shape, on[:count]) for count in range(len(placed), 0, -1)}
        count = next((count for count, price in prices.items() if self.budgets.may_grow(job, held, price)), 0)
        if count and self.budgets.refuses(job, prices[count]) is not None:
            count = 0
        self._leave(shape, placed[count:])
        self.quotas.reserve(
            job.spec.team, seats.quota_usage(shape, on[:count]), is_preemptible=self.is_preemptible[row]
        )
        return count

    def means(self, row: int) -> AffordableShapes:
        """What it may ask for, by its budgets."""
        found = self._means.get(row)
        if found is None or found.version != self.budgets.version:
            found = self._means[row] = AffordableShapes.of(self.jobs[row], self.asks, self.budgets)
        return found

    # Whether a job fits.

    def _find(self, row: int) -> tuple[Shape, Placements] | Unschedulable:
        shortfalls = []
        means = self.means(row)
        if not means.asks:
            reason = self.snapshot.stances[self.jobs[row].id].reason
            return Unschedulable("deadline", f"it {reason}.", "Nothing to do: it starts in time.")
        for ask, unpaid in zip(means.asks, means.unpaid, strict=True):
            found = ask.never or unpaid or self._fit(row, ask)
            if not isinstance(found, Unschedulable):
                return ask.shape, found
            shortfalls.append(found)
        return next((short for short in shortfalls if short.constraint != "impossible"), shortfalls[0])

    def _fit(self, row: int, ask: ShapeRequest) -> Placements | Unschedulable:
        job, shape = self.jobs[row], ask.shape
        if (short := self._short_of(row, ask.least)) is not None:
            return short
        if (full := self._full.get(ask.key)) is not None:
            return full
        count, paces = max(ask.at_least, self._allowed(row, ask)), self.snapshot.paces.get(job.id)
        placed = self.room.place(shape, count, at_least=ask.at_least, subject="it", paces=paces)
        if isinstance(placed, Unschedulable):
            self._full[ask.key] = placed
            return placed
        for seat in placed:
            self.space.changed(seat.node_id)
        # Which accelerators they are, and what they cost, may show only now.
        on = seats.placed_types(placed, self.snapshot.node_types)
        kept = self._short_of(row, seats.quota_usage(shape, on)) or self._afforded(job, shape, placed)
        if not isinstance(kept, Unschedulable):
            kept = self._beside_head(row, shape, kept)
        self._leave(shape, placed if isinstance(kept, Unschedulable) else placed[len(kept) :])
        return kept

    def _leave(self, shape: Shape, placed: Placements) -> None:
        for seat in placed:
            self._give(seat.node_id, shape.resources)

    def _give(self, node_id: str, resources: Resources) -> None:
        self.room.release(node_id, resources)
        self.space.changed(node_id)

    def _afforded(self, job: Job, shape: Shape, placed: Placements) -> Placements | Unschedulable:
        """All that was placed when its budgets allow an hour of it, else the least that will do."""

        def refused(some: Placements) -> Unschedulable | None:
            on = seats.placed_types(some, self.snapshot.node_types)
            return self.budgets.refuses(job, seats.price_per_hour(shape, on))

        if refused(placed) is None:
            return placed
        least = placed[: shape.at_least]
        return refused(least) or least

    def _short_of(self, row: int, need: Resources) -> Unschedulable | None:
        """Quota, in words."""
        if (name := self.lacks(row, need)) is None:
            return None
        job = self.jobs[row]
        team, soft = job.spec.team, self.means(row).soft
        free, own, used = (
            self.quotas.available(team, name),
            self.quotas.subtree_quota(team, name),
            self.quotas.held(team, name),
        )
        reason = f"team {team} has {used:g} of its {own:g} {name} in use and it needs {need[name]:g}"
        if need[name] > free:
            reason += f"; {max(0.0, free):g} more may be had, what others leave included"
            return Unschedulable("quota", f"{reason}.", f"It starts when {name} is free; or raise the quota of {team}.")
        if soft:
            reason += f"; {soft} is beyond its soft budget, and borrows nothing"
            return Unschedulable("budget", f"{reason}.", f"Wait for its own quota, or raise the budget of {soft}.")
        reason += "; what cannot be preempted may not borrow"
        return Unschedulable("quota", f"{reason}.", "Submit it as preemptible, or wait for the team's own quota.")

    def lacks(self, row: int, need: Resources) -> str | None:
        """The resource of which quota allows it less. Who is beyond a soft budget borrows nothing, nor does a job that
        cannot be preempted."""
        team, soft = self.jobs[row].spec.team, self.means(row).soft
        return self.quotas.lacking(team, need, is_preemptible=self.is_preemptible[row], may_borrow=not soft)

    def _allowed(self, row: int, ask: ShapeRequest) -> int:
        """How many members quota allows."""
        quotas, team, most = self.quotas, self.jobs[row].spec.team, float(ask.shape.members)
        for name, amount in ask.one.items():
            if name not in quotas.limited or amount <= 0:
                continue
            more = quotas.available(team, name)
            if any(rows for other, rows in self.quota_owners.get(name, {}).items() if other != team):
                more = min(more, quotas.nominal_left(team, name))
            if not self.is_preemptible[row]:
                more = min(more, quotas.nonpreemptible_left(team, name))
            most = min(most, more / amount)
        return max(0, int(most + 1e-6))

    def _beside_head(self, row: int, shape: Shape, placed: Placements) -> Placements | Unschedulable:
        """What cannot be stopped again takes only what leaves the head of the queue its room.

        So the head starts at the latest when what was there before it, and cannot be stopped, has ended.
        """
        if self.head is None or self._future is None or self.is_preemptible[row]:
            return placed
        beside = self._future.place(shape, len(placed), at_least=shape.at_least, subject="it")
        if not isinstance(beside, Unschedulable):
            return placed[: len(beside)]
        head = self.jobs[self.head].id
        return Unschedulable(
            "behind",
            f"it cannot be preempted, and would take room that {head} waits for, which is before it in the queue.",
            f"It starts after {head}. Submitted as preemptible it may start before.",
        )

    def _room_of_head(self, head: Job) -> SchedulingState:
        """The room once all has ended that was there before the head, and all that gives way has, and the head sits."""
        future = self.room.copy()
        for taken in self.taken.values():
            for seat in taken.seats:
                future.release(seat.node_id, taken.shape.resources)
        since_s = max(head.submitted_at_s, head.preempted_at_s or 0.0)
        able, gives = self.may_ask(head), self.givers.gives
        for row, lease in self.leases.items():
            goes = gives[row] and (able is None or self.jobs[row].spec.team in able)
            if goes or lease.created_at_s <= since_s:
                for member in seats.retained_members(lease):
                    if member.index not in self.away.get(row, ()):
                        future.release(self.node_of(row, member), lease.shape.resources)
        for shape in head.spec.gang.shapes:
            if not isinstance(future.place(shape, shape.at_least, subject="it"), Unschedulable):
                break
        return future

    def _take(self, row: int, shape: Shape, placed: Placements) -> None:
        job, on = self.jobs[row], seats.placed_types(placed, self.snapshot.node_types)
        need = seats.quota_usage(shape, on)
        self.quotas.reserve(job.spec.team, need, is_preemptible=self.is_preemptible[row])
        if self._emptied is not None:
            self._emptied.take(job.spec.team, shape, need, placed, is_preemptible=self.is_preemptible[row])
        self.taken[row] = Taken(shape, placed, self.budgets.reserve(job, seats.price_per_hour(shape, on)))
        self.refused.pop(row, None)
        for waiting in self.quota_owners.values():
            waiting.get(job.spec.team, set()).discard(row)

    # Who gives way.

    def _push(self, row: int, victims: Victims, asks: Sequence[ShapeRequest]) -> Sequence[int] | None:
        """Take room that lower ones give way for; those that do so whole. None when that is not to be had."""
        job = self.jobs[row]
        is_preemptible = self.is_preemptible[row]
        is_behind = self.head is not None and not is_preemptible
        if is_behind or attained_service.in_cooldown(job, self.snapshot.at_s):
            return None
        is_own = self.is_own(job)
        key = (job.spec.team, is_preemptible, is_own, bool(self.means(row).soft), *[ask.key for ask in asks])
        if key in self._stuck:
            return None
        has_room = self.emptied.has_room(job.spec.team, asks, is_preemptible=is_preemptible)
        chosen = select_victims(self, row, asks, victims(), is_own=is_own) if has_room else []
        gone = self._evict(row, chosen) if chosen else None
        if gone is None and not (chosen and self.refused[row].constraint == "budget"):  # which others may have
            self._stuck.add(key)
        return gone

    def _evict(self, row: int, chosen: Sequence[Victim]) -> list[int] | None:
        before = {unit.row: (dict(self.away.get(unit.row, {})), self.units(unit.row)) for unit in chosen}
        for unit in chosen:
            self.release(unit.row, unit.members, self.jobs[row].id)
        for other, (_, units) in before.items():
            self._units[other] = units.without(chosen)
        if self.admit(row):
            self.preemptors += 1
            gone = [other for other in before if not self._units[other].rest]
            self.givers.leave(gone)
            return gone
        # There is room and still no seats: its members belong together, or their accelerators count against a quota.
        for unit in chosen:
            lease = self.leases[unit.row]
            for member in unit.members:
                self.room.reserve(node_id := self.node_of(unit.row, member), lease.shape.resources)
                self.space.changed(node_id)
                self.quotas.reserve(self.jobs[unit.row].spec.team, self.quota_of(unit.row, member))
            self.away[unit.row], self._units[unit.row] = before[unit.row]
        self.away = {other: gone for other, gone in self.away.items() if gone}
        return None
