"""From the first sign that a generation ends to the next step: how long, by phase, and what it cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from raytide.actors.trainer.types import StepResult, WorkerStatus

HALF = 20
"""Steps after which what was before counts half."""
LAPS = ("join", "build", "load", "first_step")


@dataclass(slots=True)
class Recovery:
    """Times are monotonic seconds. Several generations may be needed: the first sign and the last attempt count."""

    began_s: float
    leave_s: float
    """Of the slowest survivor, out of the time until all had ended."""
    ended_s: float
    """When every rank of the old generation was accounted for."""
    step: int
    """The last one that was done before."""
    assigned_s: float = 0.0

    def finished_event(self, now_s: float, first: StepResult, status: WorkerStatus) -> dict[str, float | int | str]:
        """The event that tells of it, once `first` was done."""
        laps = {f"{name}_s": round(status.phase_times.get(name, 0.0), 3) for name in LAPS}
        return {
            "seconds": round(now_s - self.began_s, 3),
            "world": first.world,
            "step": first.step,
            "steps_lost": self.steps_lost(first),
            "source": status.source,
            "detect_s": round(max(0.0, self.ended_s - self.began_s - self.leave_s), 3),
            "leave_s": round(self.leave_s, 3),
            "wait_s": round(self.assigned_s - self.ended_s, 3),
            **laps,
        }

    def steps_lost(self, first: StepResult) -> int:
        return max(0, self.step - (first.step - 1))


@dataclass(slots=True)
class StepRate:
    step_s: float | None = None
    """None until a step was seen."""
    _at_s: float | None = None

    def pause(self) -> None:
        """What lies between the last step and the next is no part of the work: members were lost, or came back."""
        self._at_s = None

    def record_steps(self, steps: int, now_s: float, worked_s: float) -> None:
        """So many steps were done since the last call, in which `worked_s` passed inside of them."""
        took_s = (worked_s if self._at_s is None else max(worked_s, now_s - self._at_s)) / steps
        share = 1.0 - 0.5 ** (steps / HALF)
        self.step_s = took_s if self.step_s is None else self.step_s + share * (took_s - self.step_s)
        self._at_s = now_s
