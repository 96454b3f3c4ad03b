"""Decides which failures count against a run.

Failures caused by lost members never count. A generation that fails without progress counts, because the run itself may
be the cause. A worker that dies while it starts counts for the same reason. Workers that die together, such as those of
one node, count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raytide.actors.trainer.elastic.rank_assignment import Key
from raytide.core.errors import TrainError
from raytide.core.objects.gang import Member

MAX_FAILURES = 5

Incarnation = tuple[int, int]
"""A member's index and incarnation."""


@dataclass(slots=True)
class RestartPolicy:
    name: str
    furthest_step: int = 0
    """Furthest step of the run so far."""
    _last_break_step: int = -1
    """`furthest_step` at the last failure; another failure at the same step made no progress."""
    _failures: list[tuple[str, frozenset[Incarnation]]] = field(default_factory=list)
    _failed_starts: dict[Key, tuple[int, str]] = field(default_factory=dict)
    """For each worker, how often it failed to start since the last progress, and the last reason."""
    _incarnations: dict[int, int] = field(default_factory=dict)
    """The incarnation of each member of the lease, by the member's index."""

    def record_step(self, step: int) -> None:
        if step > self.furthest_step:
            self.furthest_step = step
            self._failures.clear()
            self._failed_starts.clear()

    def record_members(self, members: Iterable[Member]) -> None:
        """Records the lease's current members. The lease may report a lost member before or after the member's ranks
        have died.
        """
        self._incarnations = {member.index: member.incarnation for member in members}

    def record_break(self, why: str, dead: Iterable[Incarnation]) -> None:
        """Records that a generation failed. `dead` are the members whose processes died. The failure counts only if the
        run made no progress since the last failure.
        """
        if self.furthest_step == self._last_break_step:
            self.record_failure(why, dead)
        self._last_break_step = self.furthest_step

    def record_failure(self, why: str, dead: Iterable[Incarnation]) -> None:
        self._failures.append((why, frozenset(dead)))

    def record_failed_start(self, worker: Key, why: str) -> None:
        """Records that a worker died before it was ready. Failures of different workers are not added up, because one
        cause may end all workers of a node, or of the gang, at once.
        """
        times, _ = self._failed_starts.get(worker, (0, ""))
        self._failed_starts[worker] = times + 1, why

    def raise_if_exhausted(self) -> None:
        """Raises TrainError after too many failures in a row. Failures that were caused by lost members do not
        count.
        """
        counted = [why for why, dead in self._failures if not any(map(self._is_lost, dead))]
        starts = [failed for worker, failed in self._failed_starts.items() if not self._is_lost(worker[:2])]
        times, why = max(starts, default=(0, ""))
        counted += [why] * times
        if len(counted) > MAX_FAILURES:
            raise TrainError(
                f"{self.name} failed {len(counted)} times in a row at step {self.furthest_step}; last: {counted[-1]}.",
                hint="Fix the cause and submit again: the run resumes from its last checkpoint.",
            )

    def _is_lost(self, dead: Incarnation) -> bool:
        index, incarnation = dead
        return self._incarnations.get(index, incarnation) > incarnation
