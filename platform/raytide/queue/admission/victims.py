"""Chooses the victims of a preemption. First, candidates are preempted one after another, in a given order, until a
gang or a replica fits. Then each candidate whose preemption was unnecessary is removed from the victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from raytide.core.objects.gang import Member
from raytide.core.objects.node import Resources, plus
from raytide.queue.admission import usage
from raytide.queue.admission.fit_index import FitCount
from raytide.queue.admission.shape_request import ShapeRequest
from raytide.queue.admission.state import AdmissionState
from raytide.scheduling.node_table import Need


@dataclass(slots=True, eq=False)
class Victim:
    """Members of a gang that can only be preempted together: either one spare member, or all the members that make up
    the gang's minimum size.
    """

    row: int
    members: tuple[Member, ...]
    is_minimum: bool
    team: str
    quota: Resources
    need: Need
    """The resources of one member, by column of the node table."""
    at: tuple[int, ...]
    """The rows in the node table of the members that have a node."""

    @classmethod
    def of(
        cls, state: AdmissionState, row: int, members: tuple[Member, ...], need: Need, *, is_minimum: bool
    ) -> Victim:
        quota: Resources = state.member_quota(row, members[0])
        for member in members[1:]:
            quota = plus(quota, state.member_quota(row, member))
        rows = [state.room.rows.get(state.node_of(row, member)) for member in members]
        at = tuple([at for at in rows if at is not None])
        return cls(row, members, is_minimum, state.jobs[row].spec.team, quota, need, at)


@dataclass(slots=True, eq=False)
class GangVictims:
    """The members of one gang as victims for preemption. `spare` contains the members beyond the gang's minimum size,
    the least useful first. `minimum` contains one victim, which consists of all members of the minimum.
    """

    spare: tuple[Victim, ...]
    minimum: tuple[Victim, ...]
    """The rest of the gang, at most one victim; it can only be preempted after all spare members."""

    @classmethod
    def of(cls, state: AdmissionState, row: int) -> GangVictims:
        lease, gone = state.leases[row], state.yielded.get(row, ())
        members = [member for member in usage.retained_members(lease) if member.index not in gone]
        spare, minimum = members[lease.shape.at_least :][::-1], tuple(members[: lease.shape.at_least])
        need = state.room.node_table.columns(lease.shape.resources)
        return cls(
            tuple([Victim.of(state, row, (member,), need, is_minimum=False) for member in spare]),
            (Victim.of(state, row, minimum, need, is_minimum=True),) if minimum else (),
        )


class Simulation:
    """The capacity and quota as they would be if some victims were preempted.

    The simulation works on a copy of the capacity. The quotas, however, are changed in place as soon as the capacity
    is enough. `close` restores the quotas.
    """

    def __init__(
        self,
        state: AdmissionState,
        requests: Iterable[ShapeRequest],
        has_quota: Callable[[ShapeRequest], bool] = lambda request: True,
        *,
        ready_only: bool = False,
    ) -> None:
        self._quotas, self._index, self._has_quota = state.quotas, state.index, has_quota
        self._requests = [_Request(each, self._index.count(each, ready_only=ready_only)) for each in requests]
        self._free: dict[int, list[float]] = {}
        self._preempted: dict[Victim, None] = {}
        self._quota_released: dict[Victim, None] = {}
        self._changed: list[Victim] = []
        """The victims whose quota may be out of date."""

    def fits(self) -> bool:
        """Returns True if at least one of the requests fits into both capacity and quota."""
        for request in self._requests:
            if request.total >= request.request.at_least:
                self._update_quotas()
                if self._has_quota(request.request):
                    return True
        return False

    def preempt(self, victim: Victim) -> bool:
        """Simulates the preemption of the victim. Returns True if the capacity is then enough. Quota is not checked."""
        self._preempted[victim] = None
        return self._change(victim, 1.0)

    def retain(self, victim: Victim) -> bool:
        """Undoes `preempt` of the victim. Returns True if the capacity is still enough without this preemption."""
        del self._preempted[victim]
        return self._change(victim, -1.0)

    def close(self) -> None:
        for victim in self._quota_released:
            self._quotas.reserve(victim.team, victim.quota)

    def _update_quotas(self) -> None:
        for victim in self._changed:
            if victim in self._preempted and victim not in self._quota_released:
                self._quotas.release(victim.team, victim.quota)
                self._quota_released[victim] = None
            elif victim in self._quota_released and victim not in self._preempted:
                self._quotas.reserve(victim.team, victim.quota)
                del self._quota_released[victim]
        self._changed.clear()

    def _change(self, victim: Victim, sign: float) -> bool:
        self._changed.append(victim)
        for at in victim.at:
            if (free := self._free.get(at)) is None:
                free = self._free[at] = self._index.free_at(at).copy()
            for column, amount in victim.need:
                free[column] += sign * amount
            for request in self._requests:
                if (before := request.by_row.get(at)) is None:
                    before = request.count.by_row.get(at, 0)
                request.by_row[at] = now = self._index.members_at(request.count, at, free)
                request.total += now - before
        return any(request.total >= request.request.at_least for request in self._requests)


@dataclass(slots=True, eq=False)
class _Request:
    request: ShapeRequest
    count: FitCount
    total: int
    by_row: dict[int, int]
    """The rows in which the simulation differs from `count`."""

    def __init__(self, request: ShapeRequest, count: FitCount) -> None:
        self.request, self.count, self.total, self.by_row = request, count, count.total, {}


def select_victims(simulation: Simulation, candidates: Iterable[Victim]) -> list[Victim]:
    """Returns the candidates that must be preempted so that one of the requests fits. Candidates that are not needed
    for this are left out.

    Candidates are considered in the given order. The result is empty if preempting all candidates would not be
    enough, or if a request already fits.
    """
    victims = iter(candidates)
    if (first := next(victims, None)) is None:
        return []
    preempted = list[Victim]()
    for victim in chain((first,), victims) if not simulation.fits() else ():
        preempted.append(victim)
        if simulation.preempt(victim) and simulation.fits():
            needed = _needed(simulation, preempted)
            simulation.close()
            return needed[::-1]
    simulation.close()
    return []


def gang_victims_in_order(gangs: Iterable[GangVictims]) -> Iterator[Victim]:
    """Yields the spare members of all gangs. Then yields, for each gang, the members that make up its minimum size."""
    seen = []
    for gang in gangs:
        seen.append(gang)
        yield from gang.spare
    for gang in seen:
        yield from gang.minimum


def _needed(simulation: Simulation, preempted: list[Victim]) -> list[Victim]:
    """Returns the victims that are necessary. A gang whose minimum is preempted loses its spare members too."""
    if len(preempted) == 1:
        return preempted
    minimums = _prune(simulation, [victim for victim in preempted if victim.is_minimum], preempted[-1])
    whole = {victim.row for victim in minimums}
    spare = [victim for victim in preempted if not victim.is_minimum]
    bound = [victim for victim in spare if victim.row in whole]
    free = [victim for victim in spare if victim.row not in whole]
    return [*minimums, *bound[::-1], *_prune(simulation, free, preempted[-1])]


def _prune(simulation: Simulation, victims: Sequence[Victim], last: Victim) -> list[Victim]:
    """Retains each victim that is not needed, last first, and returns the needed ones. `last` is always needed, because
    only its preemption made a request fit.
    """
    needed = []
    for victim in reversed(victims):
        if victim is not last:
            if simulation.retain(victim) and simulation.fits():
                continue
            simulation.preempt(victim)
        needed.append(victim)
    return needed
