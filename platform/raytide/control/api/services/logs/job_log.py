"""Serves a job's log in parts, without ever holding all of the log in memory. The log is the output of the job's
drivers, one attempt after another.

A position in the log is `ATTEMPT:BYTE`. The byte is counted from the first byte that the attempt ever wrote, even if
the oldest bytes were dropped (see `log_rotation`). An empty position means the beginning.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from raytide.control.supervision.log_rotation import HEADER_BYTES, dropped_before
from raytide.control.views import LogPart
from raytide.core.errors import UsageError
from raytide.core.objects.job import Job
from raytide.queue.lifecycle.jobs import DriverKey

PART_BYTES = 2**20
TAIL_BYTES = 2**25
"""The bytes before the end of a log in which its last lines are searched, because lines may have any length."""
MOST_ATTEMPTS = 100
"""The most further attempts that one request reads. A job may have thousands, and each takes several requests to Ray.
"""
_BLOCK_BYTES = 2**18
_PLACE = re.compile(r"(\d{1,9}):(\d{1,18})")
_DROPPED = "[{} bytes were dropped here: only the last megabytes of a log are kept]\n"
_PREFACE = re.compile(rb"\A(.* -- Runtime env is setting up\.\n)?(Running entrypoint for job .*\n)?")
"""The lines that Ray writes before the driver's output."""


class Printed(Protocol):
    def log(self, key: DriverKey, start: int, most: int) -> tuple[bytes, int]:
        """Returns up to `most` bytes of an attempt's output from `start` on, and the output's total size."""


class _Piece(NamedTuple):
    start: int
    """The position of `data`, which is later than requested if older output was dropped."""
    data: bytes
    size: int
    """The total size of the output, including dropped bytes."""


def part(printed: Printed, job: Job, after: str) -> LogPart:
    """Returns at most a megabyte of the log, beginning at the position `after`."""
    attempt, wanted = _parsed(after)
    last = min(job.restarts, attempt + MOST_ATTEMPTS)
    piece = _piece(printed, DriverKey(job.id, attempt), wanted, PART_BYTES)
    while (before := 0 if piece.start else _preface(piece.data)) == len(piece.data) and attempt < last:
        attempt, wanted = attempt + 1, 0
        piece = _piece(printed, DriverKey(job.id, attempt), wanted, PART_BYTES)
    start, data, size = piece
    if before == len(data):  # empty, or only the first of Ray's lines
        return LogPart("", f"{attempt}:{start}", has_more=attempt < job.restarts)
    has_more = start + len(data) < size
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_over = job.is_final or attempt < job.restarts
    text = decoder.decode(data[before:], final=is_over and not has_more)
    if start > wanted:
        text = _DROPPED.format(start - wanted) + text
    end = start + len(data) - len(decoder.getstate()[0])  # an incomplete character is left for the next part
    return LogPart(text, f"{attempt}:{end}", has_more=has_more or attempt < job.restarts)


def tail(printed: Printed, job: Job, lines: int) -> str:
    """Returns the position at which the last `lines` lines begin. Only the last 32 MiB and the last MOST_ATTEMPTS
    attempts are searched. If the lines begin earlier, returns the beginning of the searched part."""
    left = TAIL_BYTES
    oldest = max(0, job.restarts - MOST_ATTEMPTS)
    for attempt in range(job.restarts, oldest - 1, -1):
        key = DriverKey(job.id, attempt)
        begin, head, size = _piece(printed, key, 0, _BLOCK_BYTES)
        preface = begin or _preface(head)
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
    return f"{oldest}:0" if oldest else ""


def _line_starts(printed: Printed, key: DriverKey, first: int, size: int) -> Iterator[int]:
    """Yields the starts of lines from the last one back to `first`."""
    end = size
    while end > first:
        start = max(first, end - _BLOCK_BYTES)
        data = _piece(printed, key, start, end - start).data
        at = len(data) - (end == size and data.endswith(b"\n"))
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            yield start + at + 1
        if start == first:
            yield first
        end = start


def _piece(printed: Printed, key: DriverKey, start: int, most: int) -> _Piece:
    """Reads up to `most` bytes from `start`, or from the first byte that was not dropped."""
    head, there = printed.log(key, 0, most if start == 0 else HEADER_BYTES)
    dropped = dropped_before(head if len(head) >= HEADER_BYTES else printed.log(key, 0, HEADER_BYTES)[0])
    if dropped is None:
        if start == 0:
            return _Piece(0, head, there)
        if 0 < there < start:  # it was cut, and its writer died before writing the header
            return _Piece(start, b"", start)
        return _Piece(start, *printed.log(key, start, most))
    size = dropped + there - HEADER_BYTES
    start = min(max(start, dropped), size)
    return _Piece(start, printed.log(key, start - dropped + HEADER_BYTES, most)[0], size)


def _parsed(after: str) -> tuple[int, int]:
    found = _PLACE.fullmatch(after or "0:0")
    if found is None:
        raise UsageError(f"{after!r} is not a position in a log.", hint="Use the `after` of the last response.")
    return int(found[1]), int(found[2])


def _preface(data: bytes) -> int:
    found = _PREFACE.match(data)
    return found.end() if found else 0
