"""Who gives way to a job that finds no room: borrowers first, seats that can be spared before whole gangs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from raytide.core.fleet import Resources
from raytide.core.gang import Member, Shape
from raytide.core.job import Job
from raytide.core.room import Placements, Room
from raytide.jobs import seats, service
from raytide.jobs.quota import Quotas

if TYPE_CHECKING:
    from raytide.jobs.floor import Floor

Key = tuple[object, ...]
Unit = list[tuple[int, Member]]
"""Seats that can only be taken together, each with the row of its job."""


def enough(floor: Floor, row: int, lower: list[int]) -> Unit:
    """The seats that make room for the row: as few as will do. Empty when not even all of them would.

    `lower` are the rows below it in the order, the lowest first.
    """
    first = dict.fromkeys(borrowers(floor, row, lower))
    units = _units(floor, [*first, *(other for other in lower if other not in first)])
    trial, asked = _Trial(floor, row, floor.room.copy()), list[Unit]()
    while not (fits := trial.fits()) and (more := list(islice(units, max(1, len(asked))))):
        for unit in more:
            trial.free(unit)
        asked += more
    chosen: list[Unit] = []
    for unit in reversed(asked) if fits else ():
        trial.hold(unit)
        if not trial.fits():
            trial.free(unit)
            chosen.append(unit)
    for unit in chosen if fits else asked:
        trial.hold(unit)
    return [seat for unit in reversed(chosen) for seat in unit]


def borrowers(floor: Floor, row: int, lower: list[int]) -> list[int]:
    """Those below the row whose team borrows; and anybody who borrows what is the row's own team's, wherever he is."""
    job, quotas = floor.jobs[row], floor.quotas
    shape = job.spec.gang.shapes[0]
    need = seats.quota_of(shape, [None] * shape.at_least)
    if not quotas.may_take_back(job.spec.team, need):
        return [other for other in lower if quotas.borrows(floor.jobs[other].spec.team, need)]
    found = [
        other
        for other in floor.leases
        if service.gives_way(floor.jobs[other])
        and floor.jobs[other].spec.team != job.spec.team
        and quotas.borrows(floor.jobs[other].spec.team, need)
    ]
    below = set(lower)
    return sorted(found, key=lambda other: (other not in below, -floor.leases[other].created_at_s, -other))


@dataclass(slots=True, eq=False)
class Emptied:
    """The room and the quota there would be if everybody gave way who may: who finds none there need not push."""

    room: Room
    quotas: Quotas
    _most: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, floor: Floor) -> Emptied:
        room, quotas = floor.room.copy(), floor.quotas.copy()
        for row, lease in floor.leases.items():
            if service.gives_way(job := floor.jobs[row]):
                for member in seats.kept(lease):
                    if member.index not in floor.away.get(row, ()):
                        room.give(member.node_id, lease.shape.resources)
                        quotas.give(job.spec.team, seats.quota_of(lease.shape, [floor.types.get(member.node_id)]))
        return cls(room, quotas)

    def take(self, job: Job, shape: Shape, need: Resources, placed: Placements) -> None:
        self.quotas.take(job.spec.team, need, gives_way=service.gives_way(job))
        for seat in placed:
            self.room.take(seat.node_id, shape.resources)
        self._most.clear()

    def has_room(self, floor: Floor, row: int) -> bool:
        job = floor.jobs[row]
        return any(
            self._members(shape) >= shape.at_least
            and self.quotas.lacking(
                job.spec.team, seats.quota_of(shape, [None] * shape.at_least), gives_way=service.gives_way(job)
            )
            is None
            for shape in floor.shapes(row)
        )

    def _members(self, shape: Shape) -> int:
        if (key := key_of(shape)) not in self._most:
            self._most[key] = self.room.most(shape)
        return self._most[key]


def key_of(shape: Shape) -> Key:
    """Equal for shapes that fit or do not fit alike."""
    return (shape.at_least, shape.together, *sorted(shape.resources.items()), *sorted(shape.labels.items()))


def _units(floor: Floor, rows: Sequence[int]) -> Iterator[Unit]:
    """Seats that can be spared one by one, then what is left of each gang whole."""
    for row in rows:
        yield from ([(row, member)] for member in floor.spare(row))
    for row in rows:
        without = {member.index for member in floor.spare(row)} | set(floor.away.get(row, ()))
        if rest := [(row, m) for m in seats.kept(floor.leases[row]) if m.index not in without]:
            yield rest


@dataclass(slots=True, eq=False)
class _Trial:
    """What if these seats gave way? The room is a copy; the quotas are the floor's own, and left as they were found."""

    floor: Floor
    row: int
    room: Room

    def fits(self) -> bool:
        job, floor = self.floor.jobs[self.row], self.floor
        return any(
            self.room.most(shape) >= shape.at_least and floor.beyond_limits(job, shape) is None
            for shape in floor.shapes(self.row)
        )

    def free(self, unit: Unit) -> None:
        for other, member in unit:
            team, shape, quota = self._of(other, member)
            self.room.give(member.node_id, shape.resources)
            self.floor.quotas.give(team, quota)

    def hold(self, unit: Unit) -> None:
        for other, member in unit:
            team, shape, quota = self._of(other, member)
            self.room.take(member.node_id, shape.resources)
            self.floor.quotas.take(team, quota)

    def _of(self, other: int, member: Member) -> tuple[str, Shape, Resources]:
        shape = self.floor.leases[other].shape
        quota = seats.quota_of(shape, [self.floor.types.get(member.node_id)])
        return self.floor.jobs[other].spec.team, shape, quota
