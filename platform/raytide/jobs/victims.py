"""Who gives way to a job that finds no room: borrowers first, seats that can be spared before whole gangs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from raytide.core.fleet import Resources
from raytide.core.gang import Member, Shape
from raytide.core.job import Job
from raytide.core.room import Placements, Room
from raytide.jobs import seats, service
from raytide.jobs.asks import Ask, Key
from raytide.jobs.quota import Quotas

if TYPE_CHECKING:
    from raytide.jobs.floor import Floor


@dataclass(frozen=True, slots=True)
class Unit:
    """Seats of a gang that can only be taken together: one that it can spare, or all that it cannot."""

    row: int
    members: tuple[Member, ...]
    is_rest: bool


def enough(floor: Floor, row: int, lower: list[int]) -> list[Unit]:
    """The seats that make room for the row: as few as will do. Empty when not even all of them would.

    `lower` are the rows below it in the order, the lowest first.
    """
    if not (asked := asked_of(floor, row, lower)):
        return []
    units = _units(floor, asked)
    trial, freed = _Trial.of(floor, row), list[Unit]()
    while not (fits := trial.fits()) and (more := list(islice(units, max(1, len(freed))))):
        trial.free(more)
        freed += more
    chosen = _needed(trial, freed) if fits else []
    trial.hold(chosen if fits else freed)
    return chosen[::-1]


def _needed(trial: _Trial, asked: list[Unit]) -> list[Unit]:
    """Of units that all give way, those that have to. What a gang could spare is of no use to it without the rest."""
    rests = _least(trial, [unit for unit in asked if unit.is_rest])
    whole = {unit.row for unit in rests}
    spare = [unit for unit in asked if not unit.is_rest]
    bound = [unit for unit in spare if unit.row in whole]
    return [*rests, *bound[::-1], *_least(trial, [unit for unit in spare if unit.row not in whole])]


def _least(trial: _Trial, units: list[Unit]) -> list[Unit]:
    """From the last on, each that is not needed holds on to its seats. Asked of halves, since most are not needed; what
    is left is what asking one by one would leave."""
    trial.hold(units)
    if trial.fits():
        return []
    trial.free(units)
    if len(units) == 1:
        return units
    half = len(units) // 2
    return [*_least(trial, units[half:]), *_least(trial, units[:half])]


def asked_of(floor: Floor, row: int, lower: list[int]) -> list[int]:
    """Who is asked, in turn: whose team borrows, then the others below the row.

    Who takes his own back asks everybody who borrows it, wherever he is.
    """
    job, team_of = floor.jobs[row], floor.givers()
    borrowing = floor.borrowing(floor.asks.first(job).least)
    able = floor.may_ask(job)
    if able is not None:
        lower = [other for other in lower if team_of[other] in able]
    if floor.is_own(job):
        below = set(lower)
        first = [other for other, team in team_of.items() if team in borrowing and team != job.spec.team]
        first.sort(key=lambda other: (other not in below, -floor.leases[other].created_at_s, -other))
    else:
        first = [other for other in lower if team_of[other] in borrowing]
    return list(dict.fromkeys([*first, *lower]))


@dataclass(slots=True, eq=False)
class Emptied:
    """The room and the quota there would be if everybody gave way who may: who finds none there need not push."""

    room: Room
    quotas: Quotas
    _most: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, floor: Floor) -> Emptied:
        room, quotas = floor.room.copy(), floor.quotas.copy()
        for row in floor.givers():
            lease, team = floor.leases[row], floor.jobs[row].spec.team
            for member in seats.kept(lease):
                if member.index not in floor.away.get(row, ()):
                    room.give(floor.node_of(row, member), lease.shape.resources)
                    quotas.give(team, floor.quota_of(row, member))
        return cls(room, quotas)

    def take(self, job: Job, shape: Shape, need: Resources, placed: Placements) -> None:
        self.quotas.take(job.spec.team, need, gives_way=service.gives_way(job))
        for seat in placed:
            self.room.take(seat.node_id, shape.resources)
        self._most.clear()

    def has_room(self, floor: Floor, row: int) -> bool:
        job = floor.jobs[row]
        return any(
            self._members(ask) >= ask.at_least
            and self.quotas.lacking(job.spec.team, ask.least, gives_way=service.gives_way(job)) is None
            for ask in floor.shapes(row)
        )

    def _members(self, ask: Ask) -> int:
        if ask.key not in self._most:
            self._most[ask.key] = self.room.most(ask.shape)
        return self._most[ask.key]


def _units(floor: Floor, rows: Sequence[int]) -> Iterator[Unit]:
    """Seats that can be spared one by one, then what is left of each gang whole."""
    for row in rows:
        yield from (Unit(row, (member,), is_rest=False) for member in floor.spare(row))
    for row in rows:
        without = {member.index for member in floor.spare(row)} | set(floor.away.get(row, ()))
        if rest := tuple(m for m in seats.kept(floor.leases[row]) if m.index not in without):
            yield Unit(row, rest, is_rest=True)


def _seats(units: Iterable[Unit]) -> Iterator[tuple[int, Member]]:
    return ((unit.row, member) for unit in units for member in unit.members)


@dataclass(slots=True, eq=False)
class _Trial:
    """What if these seats gave way? The room is a copy; the quotas are the floor's own, and left as they were found."""

    floor: Floor
    row: int
    room: Room
    places: list[_Places]

    @classmethod
    def of(cls, floor: Floor, row: int) -> _Trial:
        room = floor.room.copy()
        return cls(floor, row, room, [_Places.of(room, ask) for ask in floor.shapes(row)])

    def fits(self) -> bool:
        job, floor = self.floor.jobs[self.row], self.floor
        return any(
            places.total >= places.ask.at_least and floor.is_within_limits(job, places.ask) for places in self.places
        )

    def free(self, units: Iterable[Unit]) -> None:
        touched = set[str]()
        for other, member in _seats(units):
            team, shape, quota = self._of(other, member)
            touched.add(node_id := self.floor.node_of(other, member))
            self.room.give(node_id, shape.resources)
            self.floor.quotas.give(team, quota)
        self._look_again(touched)

    def hold(self, units: Iterable[Unit]) -> None:
        touched = set[str]()
        for other, member in _seats(units):
            team, shape, quota = self._of(other, member)
            touched.add(node_id := self.floor.node_of(other, member))
            self.room.take(node_id, shape.resources)
            self.floor.quotas.take(team, quota)
        self._look_again(touched)

    def _look_again(self, touched: Iterable[str]) -> None:
        for at in (self.room.rows[node_id] for node_id in touched if node_id in self.room.rows):
            for places in self.places:
                places.look_again(self.room, at)

    def _of(self, other: int, member: Member) -> tuple[str, Shape, Resources]:
        return self.floor.jobs[other].spec.team, self.floor.leases[other].shape, self.floor.quota_of(other, member)


@dataclass(slots=True, eq=False)
class _Places:
    """How many members of a shape there is room for, on each node and with what may be bought: `Room.most`, kept up to
    date node by node."""

    ask: Ask
    on: dict[int, int]
    total: int

    @classmethod
    def of(cls, room: Room, ask: Ask) -> _Places:
        shape = ask.shape
        rows, many = room.grid.holding(shape.resources, shape.labels)
        return cls(ask, dict(zip(rows.tolist(), many.tolist(), strict=True)), room.most(shape))

    def look_again(self, room: Room, at: int) -> None:
        now = room.grid.holding_at(at, self.ask.shape.resources, self.ask.shape.labels)
        self.total += now - self.on.get(at, 0)
        self.on[at] = now
