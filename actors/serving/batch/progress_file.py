"""The record of what a batch has computed. It has one line for each row that has ended. Lines are appended in groups,
with one fsync for each group.

If the process is killed, the file has only whole lines, except perhaps the last. The next reader cuts off an incomplete
last line. A row in this file never runs again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raytide.core.errors import DataError


@dataclass(slots=True)
class RowUsage:
    """Token counts, summed over rows."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: RowUsage) -> None:
        for name, tokens in asdict(other).items():
            setattr(self, name, getattr(self, name) + tokens)


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row. `line` is the row's line for the output file if `is_ok` is true, otherwise for the error
    file.
    """

    place: int
    is_ok: bool
    line: Mapping[str, Any]
    usage: RowUsage = field(default_factory=RowUsage)


class ProgressFile:
    """The results of one batch so far. Only one process at a time may open the file, so the caller must hold a lock."""

    def __init__(self, path: Path, header: Mapping[str, object], *, free_bytes: int = 0) -> None:
        """Opens or creates the file. Raises DataError if it has another header, and so belongs to another batch.

        A disk on which a write would leave less than `free_bytes` free counts as full.
        """
        self.completed = self.failed = self.size = 0
        self._free_bytes = free_bytes
        self.usage = RowUsage()
        self._offsets: dict[int, int] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.size = self._read(header, path)
            os.ftruncate(self._fd, self.size)
            if not self.size:
                self._append(json.dumps({"header": header}).encode() + b"\n")
        except BaseException:
            os.close(self._fd)
            raise

    def __contains__(self, place: int) -> bool:
        return place in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, results: Sequence[RowResult]) -> None:
        """Appends the results and returns once they are on disk. If the call raises OSError, the file is unchanged."""
        lines = [to_line(asdict(result)) for result in results]
        offset = self.size
        self._append(b"".join(lines))
        for result, line in zip(results, lines, strict=True):
            self._count(result, offset)
            offset += len(line)

    def result(self, place: int) -> RowResult:
        """Returns the recorded result of a row."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(self._offsets[place])
            return _parsed(file.readline())

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, text: bytes) -> None:
        if self._free_bytes:
            disk = os.fstatvfs(self._fd)
            if disk.f_bavail * disk.f_frsize - len(text) < self._free_bytes:
                raise OSError(errno.ENOSPC, "no more room for the results of batches")
        try:
            left, offset = memoryview(text), self.size
            while left:
                written = os.pwrite(self._fd, left, offset)
                left, offset = left[written:], offset + written
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(text)

    def _read(self, header: Mapping[str, object], path: Path) -> int:
        """Counts the recorded results and returns the size in bytes of the file's whole lines."""
        size = 0
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    if not size:
                        found = json.loads(line)["header"]
                    else:
                        self._count(_parsed(line), size)
                except (ValueError, KeyError, TypeError):
                    break  # what a power loss has left of a group that was not synced
                if not size and found != header:
                    raise DataError(
                        f"{path} is the progress of another batch.", hint="Name another output, or remove that file."
                    )
                size += len(line)
        return size

    def _count(self, result: RowResult, offset: int) -> None:
        if result.place in self._offsets:
            return
        self._offsets[result.place] = offset
        self.completed += result.is_ok
        self.failed += not result.is_ok
        self.usage.add(result.usage)


def to_line(value: Mapping[str, Any]) -> bytes:
    """Returns a value as one line of JSON in UTF-8. Lone surrogates stay escaped, because UTF-8 cannot encode them."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _parsed(line: bytes) -> RowResult:
    found = json.loads(line)
    return RowResult(found["place"], found["is_ok"], found["line"], RowUsage(**found["usage"]))
