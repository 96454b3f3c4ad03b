"""A file of requests that a gateway process has finished but not reported yet. The file outlives the process.

A request is written to the file before its response ends. If the gateway is then killed, the next gateway that starts
on this machine reports the request. A request may thus be reported twice, but the control API bills it once.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from raytide.core.objects.api_key import RequestUsage

MOST_BYTES = 4 << 20
"""The size in bytes from which the file is rewritten without the reported rows."""
_log = logging.getLogger(__name__)


class UsageJournal:
    """The journal file of one gateway process. The process locks the file as long as it runs."""

    def __init__(self, folder: Path, gateway: str) -> None:
        self._path = folder / f"usage-{gateway}.jsonl"
        self._file = _opened(self._path)
        self._size = 0
        self._has_failed = False

    def add(self, request: RequestUsage) -> None:
        """Appends the usage of a request to the file. If the disk is full, the usage stays only in memory, and the
        request does not fail.
        """
        line = request.model_dump_json().encode() + b"\n"
        try:
            self._size += os.write(self._file, line)
        except OSError as error:
            if not self._has_failed:
                _log.error("finished requests cannot be written to %s: %s", self._path, error)
            self._has_failed = True

    def keep(self, requests: Collection[RequestUsage]) -> None:
        """Removes all requests except `requests` from the file.

        If `requests` is empty, the file is emptied at once. Otherwise the file is rewritten only when it has become
        large.
        """
        try:
            if not requests:
                os.ftruncate(self._file, 0)
                self._size = 0
            elif self._size > MOST_BYTES:
                self._write_anew(requests)
        except OSError as error:
            _log.error("reported requests stay in %s: %s", self._path, error)

    def take_over(self) -> Iterator[RequestUsage]:
        """Yields the unreported requests of gateways that have ended. Adds them to this journal, and then deletes the
        ended gateways' journals.
        """
        for path in sorted(self._path.parent.glob("usage-*.jsonl")):
            if path == self._path:
                continue
            with ExitStack() as stack:
                try:
                    file = stack.enter_context(path.open("rb"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (FileNotFoundError, BlockingIOError):
                    continue  # another gateway has taken it over, or its process lives
                for line in file:
                    try:
                        request = RequestUsage.model_validate_json(line)
                    except ValidationError:  # it was being written
                        _log.warning("%s has a row that cannot be read", path)
                        continue
                    self.add(request)
                    yield request
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file. Deletes it if all of its requests were reported."""
        if not os.fstat(self._file).st_size:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _write_anew(self, requests: Collection[RequestUsage]) -> None:
        new_path = self._path.with_suffix(".new")
        new = _opened(new_path)
        old, self._file, self._size = self._file, new, 0
        for request in requests:
            if request.key:
                self.add(request)
        os.replace(new_path, self._path)
        os.close(old)


def _opened(path: Path) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
