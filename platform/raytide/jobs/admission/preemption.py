"""Who gives way to a job that finds no room: borrowers first, seats that can be spared before whole gangs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from raytide.core.objects.gang import Member, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import Resources, plus
from raytide.jobs.admission import usage
from raytide.jobs.admission.fit_index import FitCount, FitIndex
from raytide.jobs.admission.priority import Ints
from raytide.jobs.admission.shape_request import ShapeRequest
from raytide.jobs.quota import Quotas
from raytide.scheduling.node_table import Need
from raytide.scheduling.state import Placements

if TYPE_CHECKING:
    from raytide.jobs.admission.state import AdmissionState


@dataclass(slots=True, eq=False)
class Victim:
    """Seats of a gang that can only be taken together: one that it can spare, or all that it cannot."""

    row: int
    members: tuple[Member, ...]
    is_rest: bool
    team: str
    quota: Resources
    """What they count."""
    need: Need
    """What each of them holds of a node."""
    at: tuple[int, ...]
    """The rows of the grid where they are; without those that wait for a node."""

    @classmethod
    def of(cls, floor: AdmissionState, row: int, members: tuple[Member, ...], need: Need, *, is_rest: bool) -> Victim:
        quota: Resources = floor.quota_of(row, members[0])
        for member in members[1:]:
            quota = plus(quota, floor.quota_of(row, member))
        rows = [floor.room.rows.get(floor.node_of(row, member)) for member in members]
        at = tuple([at for at in rows if at is not None])
        return cls(row, members, is_rest, floor.jobs[row].spec.team, quota, need, at)


@dataclass(slots=True, eq=False)
class Units:
    """What a gang can be asked for: seats that it can spare, the last first, then what is left of it whole."""

    spare: tuple[Victim, ...]
    rest: tuple[Victim, ...]

    @classmethod
    def of(cls, floor: AdmissionState, row: int) -> Units:
        lease, gone = floor.leases[row], floor.away.get(row, ())
        kept = [member for member in usage.retained_members(lease) if member.index not in gone]
        spare, rest = kept[lease.shape.at_least :][::-1], tuple(kept[: lease.shape.at_least])
        need = floor.room.node_table.columns(lease.shape.resources)
        return cls(
            tuple([Victim.of(floor, row, (member,), need, is_rest=False) for member in spare]),
            (Victim.of(floor, row, rest, need, is_rest=True),) if rest else (),
        )

    def without(self, gone: Collection[Victim]) -> Units:
        """Once these give way. Who is asked for the rest has let go of all that it can spare."""
        return Units(
            tuple(unit for unit in self.spare if unit not in gone),
            tuple(unit for unit in self.rest if unit not in gone),
        )


def select_victims(
    floor: AdmissionState, row: int, asks: Sequence[ShapeRequest], lower: Ints, *, is_own: bool
) -> list[Victim]:
    """The seats that make room for one of what the row asks: as few as will do. Empty when not even all of them would.

    `lower` are the rows below it in the order, the lowest first. `is_own`: it takes its team's own quota back.
    """
    units = _units(floor, _asked(floor, floor.jobs[row], lower, is_own=is_own))
    if (first := next(units, None)) is None:
        return []
    trial, freed = Simulation(floor, row, asks), list[Victim]()
    for unit in chain((first,), units) if not trial.fits() else ():
        freed.append(unit)
        if trial.free(unit) and trial.fits():
            chosen = _needed(trial, freed)
            trial.end()
            return chosen[::-1]
    trial.end()
    return []


def _needed(trial: Simulation, freed: list[Victim]) -> list[Victim]:
    """Of units that all give way, those that have to. What a gang could spare is of no use to it without the rest."""
    if len(freed) == 1:
        return freed
    rests = _least(trial, [unit for unit in freed if unit.is_rest], freed[-1])
    whole = {unit.row for unit in rests}
    spare = [unit for unit in freed if not unit.is_rest]
    bound = [unit for unit in spare if unit.row in whole]
    return [*rests, *bound[::-1], *_least(trial, [unit for unit in spare if unit.row not in whole], freed[-1])]


def _least(trial: Simulation, units: Sequence[Victim], last: Victim) -> list[Victim]:
    """From the last on, each that is not needed holds on to its seats. Without the `last` of all there was no room."""
    needed = []
    for unit in reversed(units):
        if unit is not last:
            if trial.hold(unit) and trial.fits():
                continue
            trial.free(unit)
        needed.append(unit)
    return needed


def _asked(floor: AdmissionState, job: Job, lower: Ints, *, is_own: bool) -> Iterator[int]:
    """Who is asked, in turn: see `Floor.may_ask`."""
    need = floor.asks.first(job).least
    borrowing = floor.quotas.borrowing(need)
    if is_own:
        return floor.givers.asked_for_own(lower, borrowing, job.spec.team)
    everybody = floor.quotas.limited.isdisjoint(need)
    return floor.givers.asked(lower, borrowing, job.spec.team, everybody=everybody)


def _units(floor: AdmissionState, rows: Iterable[int]) -> Iterator[Victim]:
    """Seats that can be spared one by one, then what is left of each gang whole."""
    seen = []
    for row in rows:
        seen.append(units := floor.units(row))
        yield from units.spare
    for units in seen:
        yield from units.rest


@dataclass(slots=True, eq=False)
class PreemptibleCapacity:
    """The space and the quota there would be if everybody gave way who may: who finds none there need not push."""

    space: FitIndex
    quotas: Quotas

    @classmethod
    def of(cls, floor: AdmissionState) -> PreemptibleCapacity:
        room, quotas = floor.space.room.copy(), floor.quotas.copy()
        for row in floor.givers.latest.tolist():
            for unit in (*floor.units(row).spare, *floor.units(row).rest):
                for at in unit.at:
                    room.node_table.release_columns(at, unit.need)
                quotas.release(unit.team, unit.quota)
        return cls(FitIndex(room), quotas)

    def take(self, team: str, shape: Shape, need: Resources, placed: Placements, *, is_preemptible: bool) -> None:
        self.quotas.reserve(team, need, is_preemptible=is_preemptible)
        for seat in placed:
            self.space.room.reserve(seat.node_id, shape.resources)
            self.space.changed(seat.node_id)

    def has_room(self, team: str, asks: Iterable[ShapeRequest], *, is_preemptible: bool) -> bool:
        return any(
            self.space.most(ask) >= ask.at_least
            and self.quotas.lacking(team, ask.least, is_preemptible=is_preemptible) is None
            for ask in asks
        )


class Simulation:
    """What if these seats gave way? The space is only looked at; the quotas are changed once there is room, and left as
    they were found."""

    def __init__(self, floor: AdmissionState, row: int, asks: Iterable[ShapeRequest]) -> None:
        self.floor, self.row, self.space = floor, row, floor.space
        self.what_ifs = [_WhatIf(ask, self.space.tally(ask)) for ask in asks]
        self.free_on: dict[int, list[float]] = {}
        self.freed: dict[Victim, None] = {}
        self.given: dict[Victim, None] = {}
        """Those whose quota was given back."""
        self.unsettled: list[Victim] = []
        """Freed or held since then."""

    def fits(self) -> bool:
        for what_if in self.what_ifs:
            if what_if.total >= what_if.least:
                self._settle()
                if self.floor.lacks(self.row, what_if.ask.least) is None:
                    return True
        return False

    def free(self, unit: Victim) -> bool:
        """Whether there is room then, quotas aside."""
        self.freed[unit] = None
        self.unsettled.append(unit)
        return self._change(unit, 1.0)

    def hold(self, unit: Victim) -> bool:
        """Whether there still is."""
        del self.freed[unit]
        self.unsettled.append(unit)
        return self._change(unit, -1.0)

    def end(self) -> None:
        for unit in self.given:
            self.floor.quotas.reserve(unit.team, unit.quota)

    def _settle(self) -> None:
        for unit in self.unsettled:
            if unit in self.freed and unit not in self.given:
                self.floor.quotas.release(unit.team, unit.quota)
                self.given[unit] = None
            elif unit in self.given and unit not in self.freed:
                self.floor.quotas.reserve(unit.team, unit.quota)
                del self.given[unit]
        self.unsettled.clear()

    def _change(self, unit: Victim, sign: float) -> bool:
        space, free_on = self.space, self.free_on
        for at in unit.at:
            if (free := free_on.get(at)) is None:
                free = free_on[at] = space.free_at(at).copy()
            for column, amount in unit.need:
                free[column] += sign * amount
            for what_if in self.what_ifs:
                if (before := what_if.on.get(at)) is None:
                    before = what_if.tally.on.get(at, 0)
                what_if.on[at] = now = space.holding(what_if.tally, at, free)
                what_if.total += now - before
        return any(what_if.total >= what_if.least for what_if in self.what_ifs)


@dataclass(slots=True, eq=False)
class _WhatIf:
    """How many members there would be room for."""

    ask: ShapeRequest
    least: int
    tally: FitCount
    total: int
    on: dict[int, int]
    """Where it differs from the tally, by row of the grid."""

    def __init__(self, ask: ShapeRequest, tally: FitCount) -> None:
        self.ask, self.least, self.tally, self.total, self.on = ask, ask.at_least, tally, tally.total, {}
