"""Preemption: which gangs may be preempted, in which order, and how the chosen members are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.queue.admission import usage
from raytide.queue.admission.cycle import Victims
from raytide.queue.admission.fit_index import FitIndex
from raytide.queue.admission.priority import Bools, Ints
from raytide.queue.admission.shape_request import ShapeRequest
from raytide.queue.admission.state import AdmissionState
from raytide.queue.admission.victims import GangVictims, Simulation, Victim, gang_victims_in_order, select_victims
from raytide.queue.lifecycle import attained_service
from raytide.queue.quota import Quotas
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.state import SchedulingState

MOST_PREEMPTORS = 100
"""The most jobs that preempt others in one cycle; the next tick continues. This bounds the checkpoints written at once,
and the time of a cycle.
"""


@dataclass(slots=True, eq=False)
class PreemptionCandidates:
    """The rows (jobs) that hold a lease and may be preempted. All arrays except `latest` are indexed by row."""

    is_candidate: Bools
    team: Ints
    team_numbers: Mapping[str, int]
    latest: Ints
    """The candidates, last admitted first."""
    _last_lookup: tuple[frozenset[str], Bools] | None = None
    """The teams of the last `_belongs_to`, and for each row whether its team is one of them."""

    @classmethod
    def of(cls, jobs: Sequence[Job], leases: Mapping[int, Lease]) -> PreemptionCandidates:
        rows = [row for row in leases if attained_service.may_be_preempted(jobs[row])]
        names = {name: number for number, name in enumerate(dict.fromkeys(job.spec.team for job in jobs))}
        is_candidate = np.zeros(len(jobs), dtype=bool)
        is_candidate[rows] = True
        latest = sorted(rows, key=lambda row: (-leases[row].created_at_s, -row))
        team = np.array([names[job.spec.team] for job in jobs], dtype=np.int64)
        return cls(is_candidate, team, names, np.array(latest, dtype=np.int64))

    def remove(self, rows: Iterable[int]) -> None:
        self.is_candidate[list(rows)] = False

    def for_borrower(self, lower: Ints, borrowing: frozenset[str], team: str, *, any_team: bool) -> Iterator[int]:
        """Yields the rows that a job of team `team` may preempt. The job borrows quota. `lower` contains the candidate
        rows that come after the job in the scheduling order.

        Rows of teams in `borrowing` come first. If `any_team` is true, the rows of all remaining teams follow.
        Otherwise, only rows of the job's own team follow.
        """
        borrows = self._belongs_to(borrowing)[lower]
        yield from lower[borrows].tolist()
        others = lower[~borrows]
        yield from (others if any_team else others[self.team[others] == self.team_numbers[team]]).tolist()

    def for_owner(self, lower: Ints, borrowing: frozenset[str], team: str) -> Iterator[int]:
        """Yields the rows that a job of `team` may preempt to reclaim the nominal quota of `team`. `lower` contains the
        candidates that come after the job in the scheduling order.

        `borrowing` are the teams that have borrowed quota. Candidates of these teams, except `team` itself, come
        first, even if they are not in `lower`. The other rows of `lower` follow.
        """
        is_lower = np.zeros(len(self.is_candidate), dtype=bool)
        is_lower[lower] = True
        borrowers = self.is_candidate & self._belongs_to(borrowing) & (self.team != self.team_numbers[team])
        first = self.latest[borrowers[self.latest]]
        yield from first[is_lower[first]].tolist()
        yield from first[~is_lower[first]].tolist()
        yield from lower[~borrowers[lower]].tolist()

    def _belongs_to(self, teams: frozenset[str]) -> Bools:
        """Returns, for each row, whether its team is one of these. The last result is cached, because most calls repeat
        the teams.
        """
        if self._last_lookup is None or (self._last_lookup[0] is not teams and self._last_lookup[0] != teams):
            among = np.zeros(len(self.team_numbers) + 1, dtype=bool)
            among[[self.team_numbers.get(team, -1) for team in teams]] = True
            among[-1] = False
            self._last_lookup = teams, among[self.team]
        return self._last_lookup[1]


@dataclass(slots=True, eq=False)
class PreemptibleCapacity:
    """The capacity and quota that would be free if every candidate were preempted.

    If a job would not fit even then, no search for victims is needed. This is the usual case.
    """

    index: FitIndex
    quotas: Quotas

    def add(self, victim: Victim) -> None:
        for at in victim.at:
            self.index.room.node_table.release_columns(at, victim.need)
        self.quotas.release(victim.team, victim.quota)

    def reserve(self, state: AdmissionState, row: int) -> None:
        """Subtracts the capacity and quota of a row that was just admitted."""
        admission, team = state.admitted[row], state.jobs[row].spec.team
        types = usage.placed_types(admission.placed, state.snapshot.node_types)
        quota = usage.quota_usage(admission.shape, types)
        self.quotas.reserve(team, quota, is_preemptible=state.is_preemptible[row])
        for slot in admission.placed:
            self.index.room.reserve(slot.node_id, admission.shape.resources)
            self.index.mark_changed(slot.node_id)

    def fits(self, team: str, requests: Iterable[ShapeRequest], *, is_preemptible: bool) -> bool:
        return any(
            self.index.count(request).total >= request.at_least
            and self.quotas.lacking(team, request.least, is_preemptible=is_preemptible) is None
            for request in requests
        )


@dataclass(slots=True, eq=False)
class Preemptor:
    """The `Capacity` of the live queue. It admits a job if the job fits into the free capacity. Otherwise it may
    preempt other jobs for this job.
    """

    state: AdmissionState
    candidates: PreemptionCandidates
    count: int = 0
    """The number of jobs for which others were preempted."""
    _capacity: PreemptibleCapacity | None = None
    _hopeless: set[tuple[object, ...]] = field(default_factory=set)
    """The kinds of requests for which no victims were found."""
    _gangs: dict[int, GangVictims] = field(default_factory=dict)

    @classmethod
    def of(cls, state: AdmissionState) -> Preemptor:
        return cls(state, PreemptionCandidates.of(state.jobs, state.leases))

    def first(self, waiting: Ints) -> int | None:
        """Returns the index of the next row to try, which is always 0. Returns None if no row is left.

        If too many jobs have preempted others, all rows in `waiting` are refused, and the refusal states this reason.
        """
        if self.count < MOST_PREEMPTORS:
            return 0 if len(waiting) else None
        reason = f"{self.count} jobs before it preempt others in this decision."
        refusal = Unschedulable("behind", reason, "No action needed: it is reconsidered on the next tick.")
        self.state.refused |= dict.fromkeys(waiting.tolist(), refusal)
        return None

    def admit(self, row: int) -> bool:
        if not self.state.admit(row):
            return False
        if self._capacity is not None:
            self._capacity.reserve(self.state, row)
        return True

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
        state, constraint = self.state, self.state.refused[row].constraint
        requests = state.affordable_shapes(row).affordable
        if constraint not in ("capacity", "stock", "quota", "budget") or not requests:
            return ()
        if (gone := self._preempt_for(row, victims, requests)) is not None:
            return gone
        if state.head is None and constraint in ("capacity", "stock"):
            state.head, state.room_after_head = row, self._room_after(state.jobs[row])
        return ()

    def victims_of(self, row: int) -> GangVictims:
        """Returns the gang's members that have not been preempted yet."""
        if (found := self._gangs.get(row)) is None:
            found = self._gangs[row] = GangVictims.of(self.state, row)
        return found

    def evict(self, victims: Sequence[Victim], by: str, place: Callable[[], bool]) -> list[int] | None:
        """Preempts the victims in favour of `by`, and then calls `place`. Returns the rows that were preempted as a
        whole.

        If `place` fails, the preemption is undone and None is returned. It may fail because all members must be in one
        topology domain, or because their accelerators would exceed a quota.
        """
        for victim in victims:
            self.state.release(victim.row, victim.members, by)
        if not place():
            for victim in victims:
                self.state.undo_release(victim.row, victim.members)
            return None
        rows = list(dict.fromkeys(victim.row for victim in victims))
        for row in rows:
            self._gangs.pop(row, None)
        gone = [row for row in rows if not self.victims_of(row).minimum]
        self.candidates.remove(gone)
        return gone

    def _preempt_for(self, row: int, victims: Victims, requests: Sequence[ShapeRequest]) -> list[int] | None:
        """Admits the row in the place of lower rows. Returns the rows that are preempted whole; None if it cannot be
        admitted.
        """
        state, job, is_preemptible = self.state, self.state.jobs[row], self.state.is_preemptible[row]
        is_behind_head = state.head is not None and not is_preemptible
        if is_behind_head or attained_service.in_cooldown(job, state.snapshot.at_s):
            return None
        is_owner, over_limit = state.may_reclaim(job), bool(state.affordable_shapes(row).over_soft_limit)
        key = (job.spec.team, is_preemptible, is_owner, over_limit, *[request.key for request in requests])
        if key in self._hopeless:
            return None
        chosen: list[Victim] = []
        if self.capacity.fits(job.spec.team, requests, is_preemptible=is_preemptible):
            simulation = Simulation(state, requests, lambda each: state.lacking_quota(row, each.least) is None)
            rows = self._rows_in_order(job, victims(), is_owner=is_owner)
            chosen = select_victims(simulation, gang_victims_in_order(map(self.victims_of, rows)))
        gone = self.evict(chosen, job.id, partial(self.admit, row)) if chosen else None
        if gone is not None:
            self.count += 1
        elif not (chosen and state.refused[row].constraint == "budget"):  # another job may be able to pay
            self._hopeless.add(key)
        return gone

    def _rows_in_order(self, job: Job, lower: Ints, *, is_owner: bool) -> Iterator[int]:
        """Yields the candidates in the order of preemption: see `AdmissionState.preemptible_teams`."""
        need = self.state.requests.first(job).least
        borrowing = self.state.quotas.borrowing(need)
        if is_owner:
            return self.candidates.for_owner(lower, borrowing, job.spec.team)
        any_team = self.state.quotas.limited.isdisjoint(need)
        return self.candidates.for_borrower(lower, borrowing, job.spec.team, any_team=any_team)

    @property
    def capacity(self) -> PreemptibleCapacity:
        if self._capacity is None:
            self._capacity = PreemptibleCapacity(FitIndex(self.state.room.copy()), self.state.quotas.copy())
            for row in self.candidates.latest.tolist():
                for victim in (*self.victims_of(row).spare, *self.victims_of(row).minimum):
                    self._capacity.add(victim)
        return self._capacity

    def _room_after(self, head: Job) -> SchedulingState:
        """Returns the capacity that is left once everything for which the head of the queue waits has ended or yielded,
        and the head has started.
        """
        state, room = self.state, self.state.room.copy()
        for admission in state.admitted.values():
            for slot in admission.placed:
                room.release(slot.node_id, admission.shape.resources)
        waits_since_s = max(head.submitted_at_s, head.preempted_at_s or 0.0)
        teams = state.preemptible_teams(head)
        for row, lease in state.leases.items():
            may_preempt = self.candidates.is_candidate[row] and (teams is None or state.jobs[row].spec.team in teams)
            if may_preempt or lease.created_at_s <= waits_since_s:
                for member in usage.retained_members(lease):
                    if member.index not in state.yielded.get(row, ()):
                        room.release(state.node_of(row, member), lease.shape.resources)
        for shape in head.spec.gang.shapes:
            if not isinstance(room.place(shape, shape.at_least, subject="it"), Unschedulable):
                break
        return room
