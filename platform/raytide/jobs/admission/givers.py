"""Who may be asked for seats, and in which turn: borrowers before others, who comes last in the order first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.jobs.admission.priority import Bools, Ints
from raytide.jobs.lifecycle import attained_service


@dataclass(slots=True, eq=False)
class PreemptionCandidates:
    """Rows are places among all jobs."""

    gives: Bools
    """They hold seats and may be asked for them."""
    team: Ints
    """By its number."""
    numbers: Mapping[str, int]
    """Of the teams."""
    latest: Ints
    """Those that give, who was admitted last first."""
    _looked_up: tuple[frozenset[str], Bools] | None = None
    """Teams, and by row whether it is of one of them."""

    @classmethod
    def of(cls, jobs: Sequence[Job], leases: Mapping[int, Lease]) -> PreemptionCandidates:
        rows = [row for row in leases if attained_service.may_be_preempted(jobs[row])]
        names = {name: number for number, name in enumerate(dict.fromkeys(job.spec.team for job in jobs))}
        gives = np.zeros(len(jobs), dtype=bool)
        gives[rows] = True
        latest = sorted(rows, key=lambda row: (-leases[row].created_at_s, -row))
        team = np.array([names[job.spec.team] for job in jobs], dtype=np.int64)
        return cls(gives, team, names, np.array(latest, dtype=np.int64))

    def leave(self, rows: Iterable[int]) -> None:
        """They gave all that they had."""
        self.gives[list(rows)] = False

    def asked(self, lower: Ints, borrowing: frozenset[str], team: str, *, everybody: bool) -> Iterator[int]:
        """Of those below: whose team borrows, then the others; unless everybody may be asked, only of its own team."""
        borrows = self._is_of(borrowing)[lower]
        yield from lower[borrows].tolist()
        others = lower[~borrows]
        yield from (others if everybody else others[self.team[others] == self.numbers[team]]).tolist()

    def asked_for_own(self, lower: Ints, borrowing: frozenset[str], team: str) -> Iterator[int]:
        """Who takes his own back asks everybody who borrows it, wherever he is, then all below him."""
        below = np.zeros(len(self.gives), dtype=bool)
        below[lower] = True
        others = self.gives & self._is_of(borrowing) & (self.team != self.numbers[team])
        first = self.latest[others[self.latest]]
        yield from first[below[first]].tolist()
        yield from first[~below[first]].tolist()
        yield from lower[~others[lower]].tolist()

    def _is_of(self, teams: frozenset[str]) -> Bools:
        """By row: whether it is of one of these, which are mostly those of the time before."""
        if self._looked_up is None or (self._looked_up[0] is not teams and self._looked_up[0] != teams):
            among = np.zeros(len(self.numbers) + 1, dtype=bool)
            among[[self.numbers.get(team, -1) for team in teams]] = True
            among[-1] = False
            self._looked_up = teams, among[self.team]
        return self._looked_up[1]
