"""The log of a job in parts: what its drivers wrote, one attempt after another. It is never held whole.

A place in it is `attempt:byte`; "" is its beginning.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Protocol

from raytide.control.views import LogPart
from raytide.core.errors import UsageError
from raytide.core.job import Job
from raytide.jobs.job import DriverKey

PART_BYTES = 2**20
TAIL_BYTES = 2**25
"""How far before the end of a log its last lines are looked for: one without line ends may be of any length."""
_BLOCK_BYTES = 2**18
_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})")
_PREFACE = re.compile(rb"\A(.* -- Runtime env is setting up\.\n)?(Running entrypoint for job .*\n)?")
"""What Ray writes before a driver does."""


class Printed(Protocol):
    def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
        """Up to so many bytes of what an attempt wrote, from `start` on, and how many it wrote so far."""


def part(printed: Printed, job: Job, after: str) -> LogPart:
    """What comes after that place."""
    attempt, start = _parsed(after)
    data, size = printed.log(DriverKey(job.id, attempt), start, PART_BYTES)
    while (before := 0 if start else _preface(data)) == len(data) and attempt < job.restarts:
        attempt, start = attempt + 1, 0
        data, size = printed.log(DriverKey(job.id, attempt), start, PART_BYTES)
    if before == len(data):  # nothing, or Ray's first line, whose second comes
        return LogPart("", f"{attempt}:{start}", has_more=False)
    has_more = start + len(data) < size
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_over = job.is_final or attempt < job.restarts
    text = decoder.decode(data[before:], final=is_over and not has_more)
    end = start + len(data) - len(decoder.getstate()[0])  # a character of which only a part is there comes next time
    return LogPart(text, f"{attempt}:{end}", has_more=has_more or attempt < job.restarts)


def tail(printed: Printed, job: Job, lines: int) -> str:
    """The place at which its last lines begin, or where it is looked for no further."""
    left = TAIL_BYTES
    for attempt in range(job.restarts, -1, -1):
        key = DriverKey(job.id, attempt)
        head, size = printed.log(key, 0, _BLOCK_BYTES)
        preface = _preface(head)
        if not lines:
            return f"{attempt}:{size if size > preface else 0}"
        first = max(preface, size - left)
        for start in _line_starts(printed, key, first, size):
            lines -= 1
            if not lines:
                return f"{attempt}:{start}"
        left -= size
        if left <= 0:
            return f"{attempt}:{first}"
    return ""


def _line_starts(printed: Printed, key: DriverKey, first: int, size: int) -> Iterator[int]:
    """Of the last line, of the one before it, and so on until `first`."""
    end = size
    while end > first:
        start = max(first, end - _BLOCK_BYTES)
        data = printed.log(key, start, end - start)[0]
        at = len(data) - (end == size and data.endswith(b"\n"))
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            yield start + at + 1
        if start == first:
            yield first
        end = start


def _parsed(after: str) -> tuple[int, int]:
    found = _PLACE.fullmatch(after or "0:0")
    if found is None:
        raise UsageError(f"{after!r} is no place in a log.", hint="Give what the last answer said as `after`.")
    return int(found[1]), int(found[2])


def _preface(data: bytes) -> int:
    found = _PREFACE.match(data)
    return found.end() if found else 0
