"""Working directories that jobs were submitted with, by digest, in the run folder."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raytide.core.errors import DataError, NotFoundError
from raytide.core.package import MOST_BYTES
from raytide.core.storage import full_disk_is_an_error

KEPT_S = 30 * 86_400.0
"""Since it was uploaded or used last."""


class Packages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """The file; NotFoundError when it was never uploaded, or is gone again."""
        path = self._file(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            raise NotFoundError(
                f"there is no package {digest[:12]}: it was not uploaded, or not used for {KEPT_S / 86_400:.0f} days.",
                hint="Submit the script anew: `raytide run` uploads it.",
            ) from None
        return path

    @contextmanager
    def receive(self, digest: str) -> Iterator[Part]:
        """A file to write to; it becomes the package at the end, if it is what its digest says."""
        final = self._file(digest)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._sweep()
        staged = self._folder / f".{secrets.token_hex(8)}"
        try:
            with full_disk_is_an_error(str(final)), staged.open("wb") as file:
                part = Part(file)
                yield part
            if part.digest != digest:
                raise DataError("the package that arrived is not the one announced.", hint="Send it again.")
            os.replace(staged, final)
        finally:
            staged.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise DataError(f"{digest[:80]!r} is no digest of a package.", hint="It is SHA-256, in hex.")
        return self._folder / f"{digest}.zip"

    def _sweep(self) -> None:
        oldest_s = time.time() - KEPT_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)


class Part:
    """A package while it arrives."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._size = file, hashlib.sha256(), 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > MOST_BYTES:
            raise DataError(f"a package may have {MOST_BYTES / 2**20:.0f} MiB.", hint="Leave large files out of it.")
        self._hash.update(chunk)
        self._file.write(chunk)
