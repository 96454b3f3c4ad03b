"""How long a step takes of late by the clock on the wall, with all that comes between steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

HALF = 20
"""Steps after which what was before counts half."""


@dataclass(slots=True)
class StepRate:
    step_s: float | None = None
    """None until a step was seen."""
    _at_s: float | None = None

    def rest(self) -> None:
        """What lies between the last step and the next is no part of the work: members were lost, or came back."""
        self._at_s = None

    def stepped(self, steps: int, now_s: float, worked_s: float) -> None:
        """So many steps were done since the last call, in which `worked_s` passed inside of them."""
        took_s = (worked_s if self._at_s is None else max(worked_s, now_s - self._at_s)) / steps
        share = 1.0 - 0.5 ** (steps / HALF)
        self.step_s = took_s if self.step_s is None else self.step_s + share * (took_s - self.step_s)
        self._at_s = now_s
