"""Deadlines: a point in time, or a time from submission."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

Due = datetime | timedelta

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = timedelta(days=36525)
_FAR_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_HOW = "use 2026-11-22T08:00:00+01:00, or a time from now: 8h, 1d12h, 5400 (seconds)"


def parse(value: object) -> Due:
    """Parses a datetime with a time zone, or a time from now: a timedelta, seconds, or `1d12h`. Raises ValueError."""
    try:
        due = _of_text(value.strip()) if isinstance(value, str) else value
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


def text(due: Due) -> str:
    """Returns a text that `parse` reads as the same deadline."""
    return due.isoformat() if isinstance(due, datetime) else f"{due.total_seconds():g}s"


def moment(at_s: float) -> str:
    """Returns a text such as `Nov 22 19:40 UTC`, coarse so that reasons do not change each tick. Accepts any number."""
    return datetime.fromtimestamp(min(max(0.0, at_s), _FAR_S), tz=UTC).strftime("%b %d %H:%M UTC")


def _of_text(value: str) -> object:
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
