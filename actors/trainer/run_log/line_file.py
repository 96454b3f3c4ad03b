"""An append-only file of JSON lines. A full disk delays lines and never stops training."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raytide.core.io.private_paths import safe_opener

MOST_KEPT = 100_000
"""Lines kept while the disk is full; the oldest are dropped first. A step's line has half a KiB."""


class LineFile:
    """An append-only file of JSON lines with one writer.

    For one writer. Lines that cannot be written are kept and written with the next line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Reason why the last line is not in the file yet."""
        self.dropped = 0
        self._pending: deque[str] = deque()

    def add(self, line: Mapping[str, object]) -> None:
        self._pending.append(json.dumps(_to_json(line)) + "\n")
        if len(self._pending) > MOST_KEPT:
            self._pending.popleft()
            self.dropped += 1
        self.flush()

    def flush(self) -> bool:
        """Write pending lines. Returns whether all are in the file."""
        if not self._pending:
            return True
        try:
            self._append("".join(self._pending).encode())
        except OSError as error:
            self.problem = f"cannot write {self.path}: {os.strerror(error.errno or 0)}"
            return False
        self._pending.clear()
        self.problem = ""
        return True

    def _append(self, body: bytes) -> None:
        """Append all of `body` or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = safe_opener(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            before, left = os.fstat(handle).st_size, memoryview(body)
            try:
                while left:
                    left = left[os.write(handle, left) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)


def _to_json(value: object) -> object:
    """Replace floats that JSON cannot represent (NaN, infinity) by None."""
    if isinstance(value, Mapping):
        return {key: _to_json(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
