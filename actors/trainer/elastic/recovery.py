"""Measures a run's recoveries, step rate and scaling efficiency.

A recovery follows a failure or a planned change of the gang. It begins with the first sign that the current generation
ends. It ends with the next completed step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.actors.trainer.types import StepResult, WorkerStatus

HALF_LIFE = 20
"""Half-life of the average, in steps."""
LAPS = ("join", "build", "load", "first_step")


@dataclass(slots=True)
class Recovery:
    """One recovery. Its times are in monotonic seconds.

    A recovery may need several generations of ranks. It begins with the first sign that the old generation ends. Its
    phases are those of the last attempt.
    """

    began_s: float
    leave_s: float
    """Time that the slowest survivor took to leave, part of the time until `ended_s`."""
    ended_s: float
    """The time at which every rank of the old generation had ended."""
    step: int
    """The last step that was done before the recovery."""
    assigned_s: float = 0.0

    def finished_event(self, now_s: float, first: StepResult, status: WorkerStatus) -> dict[str, float | int | str]:
        """Returns the event that describes the recovery. `first` is the first step that was completed after the
        recovery.
        """
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
    """Recent wall-clock time of a step, including what happens between steps; None before the first."""
    _at_s: float | None = None

    def pause(self) -> None:
        """Makes the measured rate ignore the time until the next step. Call this method when the gang forms again."""
        self._at_s = None

    def record_steps(self, steps: int, now_s: float, worked_s: float) -> None:
        """Records `steps` steps, done since the last call. `worked_s` is the total duration of these steps in
        seconds.
        """
        took_s = (worked_s if self._at_s is None else max(worked_s, now_s - self._at_s)) / steps
        share = 1.0 - 0.5 ** (steps / HALF_LIFE)
        self.step_s = took_s if self.step_s is None else self.step_s + share * (took_s - self.step_s)
        self._at_s = now_s


@dataclass(slots=True)
class ScalingEfficiency:
    """Compares the throughput per rank between the gang sizes that this driver has run."""

    _tokens_per_s: dict[int, float] = field(default_factory=dict)
    """Recent throughput of a gang by its number of ranks."""

    def record(self, world: int, tokens_per_s: float, steps: int) -> None:
        before, share = self._tokens_per_s.get(world, tokens_per_s), 1.0 - 0.5 ** (steps / HALF_LIFE)
        self._tokens_per_s[world] = before + share * (tokens_per_s - before)

    def of(self, world: int) -> float | None:
        """Returns the throughput per rank in a gang of `world` ranks, divided by the throughput per rank in the
        smallest gang. Returns None if no smaller gang was measured.
        """
        smallest = min(self._tokens_per_s, default=world)
        if smallest >= world or not self._tokens_per_s[smallest]:
            return None
        return self._tokens_per_s[world] / world / (self._tokens_per_s[smallest] / smallest)
