"""Health by progress: an engine with work in it must take steps. A port that answers proves nothing."""

from __future__ import annotations

from raytide.actors.engine.core import EngineStats

__all__ = ["ProgressWatch"]


class ProgressWatch:
    """Told the engine's counters from time to time; says for how long it has had work without taking a step."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._steps = -1
        self._since_s = 0.0

    def stalled_s(self, stats: EngineStats, now_s: float) -> float:
        idle = stats.running + stats.waiting == 0 or stats.state != "serving"  # paused and asleep on purpose
        if stats.steps != self._steps or idle:
            self._steps = stats.steps
            self._since_s = now_s
        return now_s - self._since_s

    def problem(self, stats: EngineStats, now_s: float) -> str | None:
        """Why the replica should be replaced, or None. The limit must exceed the longest step (a long prefill)."""
        stalled_s = self.stalled_s(stats, now_s)
        if stalled_s <= self._limit_s:
            return None
        held = f"{stats.running} running and {stats.waiting} waiting requests"
        return f"the engine holds {held} but took no step for {stalled_s:.0f} s"
