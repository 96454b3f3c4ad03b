"""The clocks. Decisions take the time from a Snapshot. A loop is given a Clock, which is a VirtualClock in tests."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Returns seconds since the epoch."""

    def wall_ahead_s(self) -> float:
        """Returns by how many seconds the wall clock is ahead of `now_s`.

        Other processes take their timestamps from the wall clock, so these timestamps are ahead of `now_s` by the
        same difference.
        """

    def sleep(self, seconds: float) -> None: ...


SLEW = 0.25
"""The relative speed at which a SteadyClock catches up with the wall clock."""
STEP_S = 1.0
"""The least difference to the wall clock that counts as a step; smaller ones are adopted at once."""
MOST_S = 86_400.0


class SteadyClock:
    """Wall time without steps. It never goes back, and durations are right even if the machine's clock is set.

    When the wall clock steps (by NTP, a suspend or an operator), this clock catches up gradually. For example, after a
    step of one hour it runs a quarter faster, or slower, for four hours. Meanwhile, `wall_ahead_s` is the difference
    between the two clocks. Thread-safe.
    """

    def __init__(self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic):
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._lock = threading.Lock()
        self._now_s, self._at_s = wall_s(), monotonic_s()

    def go_on_from(self, at_s: float) -> None:
        """Advances the clock to `at_s`, the latest time on the clock of an earlier process. A time more than a day
        ahead is ignored, because the clock of that process must have been wrong."""
        with self._lock:
            if self._now_s < at_s <= self._now_s + MOST_S:
                self._now_s = at_s

    def read(self) -> tuple[float, float]:
        """Returns this clock's time, and the seconds by which the wall clock is ahead of this clock."""
        with self._lock:
            wall_s, at_s = self._wall_s(), self._monotonic_s()
            passed_s = max(0.0, at_s - self._at_s)
            ahead_s = wall_s - (self._now_s + passed_s)
            most_s = SLEW * passed_s
            if -STEP_S < ahead_s < STEP_S:
                taken_s = max(ahead_s, -passed_s)
            else:
                taken_s = max(-most_s, min(most_s, ahead_s))
            self._now_s, self._at_s = self._now_s + passed_s + taken_s, at_s
            return self._now_s, wall_s - self._now_s


@functools.cache
def _steady() -> SteadyClock:
    """Returns the one clock of the process, so that all its parts agree on the time."""
    return SteadyClock()


class SystemClock:
    """The clock of this process: a SteadyClock that the whole process shares."""

    def go_on_from(self, at_s: float) -> None:
        _steady().go_on_from(at_s)

    def now_s(self) -> float:
        return _steady().read()[0]

    def wall_ahead_s(self) -> float:
        ahead_s = _steady().read()[1]
        return ahead_s if abs(ahead_s) >= STEP_S else 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A clock for tests. Only `sleep` and `advance` move its time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def wall_ahead_s(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    advance = sleep


def utc(at_s: float) -> str:
    """Formats a time as `14:03:07 UTC`, for texts that state the reason of a decision. Unlike a duration, a time reads
    the same in every tick."""
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%H:%M:%S UTC")


def ago(seconds: float | None) -> str:
    """Formats a duration as `7s`, `3m07s` or `2h05m`. None becomes `-`."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


Due = datetime | timedelta
"""A deadline: a point in time, or the time left from submission."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = timedelta(days=36525)
_FAR_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_HOW = "use 2026-11-22T08:00:00+01:00, or a time from now: 8h, 1d12h, 5400 (seconds)"


def parse_deadline(value: object) -> Due:
    """Converts a deadline to a datetime, or to a timedelta from now. The value is a datetime with a time zone, a
    timedelta, a number of seconds, or a text such as `1d12h`. Raises ValueError for other values."""
    try:
        due = _deadline_of(value.strip()) if isinstance(value, str) else value
        if isinstance(due, int | float) and not isinstance(due, bool):
            due = timedelta(seconds=due)
        if isinstance(due, datetime) and due.tzinfo is not None:
            due = due.astimezone(UTC)
    except (OverflowError, ValueError):  # NaN, the year 0
        raise ValueError(f"{value!r} is not a time; {_HOW}") from None
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise ValueError(f"{due.isoformat()} has no time zone; {_HOW}")
        return due
    if not isinstance(due, timedelta):
        raise ValueError(f"{value!r} is not a time; {_HOW}")
    if abs(due) > _LONGEST:
        raise ValueError(f"{value!r} is more than a hundred years; {_HOW}")
    return due


def deadline_text(due: Due) -> str:
    """Returns the deadline as a text that `parse_deadline` converts back to the same deadline."""
    if isinstance(due, datetime):
        return due.isoformat()
    return f"{due.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"  # never with an exponent


def moment(at_s: float) -> str:
    """Formats a time as `Nov 22 19:40 UTC`, for texts that state the reason of a decision. Seconds are left out,
    because a text with seconds would change in each tick. Accepts any number.
    """
    return datetime.fromtimestamp(min(max(0.0, at_s), _FAR_S), tz=UTC).strftime("%b %d %H:%M UTC")


def _deadline_of(value: str) -> object:
    if spans := _SPAN.findall(value):
        if "".join(number + unit for number, unit in spans) == value:
            return timedelta(seconds=sum(float(number) * _UNITS_S[unit] for number, unit in spans))
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return value
