"""Which breaks count against a run. Pure.

Losing members is the weather: it never counts. A break without a step further than ever before does, since its cause
may be the run's own; so does a worker that dies while it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raytide.core.errors import TrainError

MAX_FAILURES = 5

Incarnation = tuple[int, int]
"""A member's index and incarnation."""


@dataclass(slots=True)
class RestartPolicy:
    name: str
    furthest_step: int = 0
    """The furthest step of the run so far."""
    _last_break_step: int = -1
    """`best` at the last break; another break with the same is fruitless."""
    _failures: list[tuple[str, frozenset[Incarnation]]] = field(default_factory=list)
    _lost: set[Incarnation] = field(default_factory=set)

    def record_step(self, step: int) -> None:
        if step > self.furthest_step:
            self.furthest_step = step
            self._failures.clear()

    def record_lost(self, fillings: Iterable[Incarnation]) -> None:
        """These members are gone. The platform may say so some time after their ranks died."""
        self._lost.update(fillings)

    def record_break(self, why: str, dead: Iterable[Incarnation]) -> None:
        """A generation broke, and the ranks of `dead` did not survive it."""
        if self.furthest_step == self._last_break_step:
            self.record_failure(why, dead)
        self._last_break_step = self.furthest_step

    def record_failure(self, why: str, dead: Iterable[Incarnation]) -> None:
        self._failures.append((why, frozenset(dead)))

    def raise_if_exhausted(self) -> None:
        """TrainError once too many breaks in a row are the run's own."""
        counted = [why for why, dead in self._failures if not dead & self._lost]
        if len(counted) > MAX_FAILURES:
            raise TrainError(
                f"{self.name} failed {len(counted)} times in a row at step {self.furthest_step}; last: {counted[-1]}.",
                hint="Fix the cause and submit again: the run resumes from its last checkpoint.",
            )
