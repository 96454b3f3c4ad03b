"""Which breaks count against a run. Pure.

Losing members is the weather: it never counts. A break without a step further than ever before does, since its cause
may be the run's own; so does a worker that dies while it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raytide.core.errors import TrainError

MAX_FRUITLESS = 5

Filling = tuple[int, int]
"""A member's index and incarnation."""


@dataclass(slots=True)
class RestartPolicy:
    name: str
    best: int = 0
    """The furthest step of the run so far."""
    _charged_at: int = -1
    """`best` at the last break; another break with the same is fruitless."""
    _charges: list[tuple[str, frozenset[Filling]]] = field(default_factory=list)
    _lost: set[Filling] = field(default_factory=set)

    def reached(self, step: int) -> None:
        if step > self.best:
            self.best = step
            self._charges.clear()

    def lost(self, fillings: Iterable[Filling]) -> None:
        """These members are gone. The platform may say so some time after their ranks died."""
        self._lost.update(fillings)

    def broke(self, why: str, dead: Iterable[Filling]) -> None:
        """A generation broke, and the ranks of `dead` did not survive it."""
        if self.best == self._charged_at:
            self.record_failure(why, dead)
        self._charged_at = self.best

    def record_failure(self, why: str, dead: Iterable[Filling]) -> None:
        self._charges.append((why, frozenset(dead)))

    def check(self) -> None:
        """TrainError once too many breaks in a row are the run's own."""
        counted = [why for why, dead in self._charges if not dead & self._lost]
        if len(counted) > MAX_FRUITLESS:
            raise TrainError(
                f"{self.name} broke {len(counted)} times in a row at step {self.best}; the last time: {counted[-1]}.",
                hint="Mend that; the run goes on from its last checkpoint.",
            )
