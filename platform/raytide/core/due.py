"""When something must be done: a moment, or a time from now until it is submitted."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

Due = datetime | timedelta

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_HOW = "say 2026-11-22T08:00:00+01:00, or a time from now: 8h, 1d12h, 5400 (seconds)"


def parse(said: object) -> Due:
    """A moment with its time zone, or a time from now as a timedelta, seconds, or `1d12h`. ValueError for others."""
    if isinstance(said, str):
        said = _of_text(said.strip())
    if isinstance(said, datetime):
        if said.tzinfo is None:
            raise ValueError(f"{said.isoformat()} has no time zone; {_HOW}")
        return said.astimezone(UTC)
    if isinstance(said, int | float) and not isinstance(said, bool):
        said = timedelta(seconds=said)
    if not isinstance(said, timedelta):
        raise ValueError(f"{said!r} is no time; {_HOW}")
    return said


def text(due: Due) -> str:
    """What `parse` reads as the same."""
    return due.isoformat() if isinstance(due, datetime) else f"{due.total_seconds():g}s"


def moment(at_s: float) -> str:
    """`Nov 22 19:40 UTC`, for reasons that say the same for a long time."""
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%b %d %H:%M UTC")


def _of_text(said: str) -> object:
    if spans := _SPAN.findall(said):
        if "".join(number + unit for number, unit in spans) == said:
            return timedelta(seconds=sum(float(number) * _UNITS_S[unit] for number, unit in spans))
        return said
    try:
        return float(said)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(said)
    except ValueError:
        return said
