"""The one source of time. Decisions read it from a Snapshot; loops get a Clock, tests a VirtualClock."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since the epoch."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    advance = sleep


def utc(at_s: float) -> str:
    """`14:03:07 UTC`, for reasons: a point in time reads the same in every tick, a count of seconds does not."""
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%H:%M:%S UTC")


def ago(seconds: float | None) -> str:
    """`7s`, `3m`, `2h05m`."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
