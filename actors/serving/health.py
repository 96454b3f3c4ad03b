"""Checks health by progress: an engine that has work must take steps. An open port alone proves nothing."""

from __future__ import annotations

from raytide.actors.engine.types import EngineStats

STALL_LIMIT_S = 60.0


class ProgressWatch:
    """Detects an engine that makes no progress although it has work. Compares the engine's counters over time.

    `limit_s` is the longest time without progress that is allowed. It must exceed the duration of the longest step
    (a long prefill).
    """

    def __init__(self, limit_s: float = STALL_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._steps = _Counter()
        self._commands = _Counter()

    def problem(self, stats: EngineStats, now_s: float) -> str | None:
        """Returns a reason to replace the replica. Returns None if the engine makes progress or has no work."""
        is_idle = stats.running + stats.waiting == 0 or stats.state != "serving"  # paused and asleep on purpose
        stalled_s = self._steps.stalled_s(stats.steps, is_idle, now_s)
        if stalled_s > self._limit_s:
            held = f"{stats.running} running and {stats.waiting} waiting requests"
            return f"the engine holds {held} but took no step for {stalled_s:.0f} s"
        # A thread that hangs in a command does not count the requests queued behind it.
        stalled_s = self._commands.stalled_s(stats.commands_done, stats.pending_commands == 0, now_s)
        if stalled_s > self._limit_s:
            return f"{stats.pending_commands} commands wait for the engine, which did none for {stalled_s:.0f} s"
        return None


class _Counter:
    """Measures the seconds since a counter last changed or had no reason to change."""

    def __init__(self) -> None:
        self._count = -1
        self._since_s = 0.0

    def stalled_s(self, count: int, is_idle: bool, now_s: float) -> float:
        if count != self._count or is_idle:
            self._count = count
            self._since_s = now_s
        return now_s - self._since_s
