"""Working directories that jobs were submitted with, by digest, in the run folder."""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from raytide.core.errors import ConflictError, DataError, NotFoundError, StorageError
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.io.working_dir import MOST_BYTES

_TEAM = ".team"
KEPT_S = 30 * 86_400.0
"""Since it was uploaded or used last; longer while a job that is not over has it."""
TOTAL_BYTES = 10 * 2**30
"""Of all packages; those used longest ago go first."""
TEAM_BYTES = 3 * 2**30
"""Of the packages that one team uploaded first; its own go first."""

LEAST_BYTES = 2**19
"""What each package counts at least: a file system takes only so many files, however small."""


class Packages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sweep(self) -> None:
        """Remove what an API that was killed left half arrived; for the next one, before it takes any."""
        for path in self._folder.glob(".*"):
            path.unlink(missing_ok=True)

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

    def make_room(self, in_use: Set[str], team: str = "", size: int = MOST_BYTES) -> None:
        """For one more of this size, of this team. Those of these digests stay; ConflictError when the team's leave no
        room for it, StorageError when all of them do or the disk has none."""
        files = [(path.stem in in_use, used_s, taken, path) for path, used_s, taken in self._files()]
        files.sort(reverse=True)
        own = [each for each in files if self._team(each[3]) == team] if team else []
        if self._drop(own, TEAM_BYTES - size, -math.inf) < 0:
            raise ConflictError(
                f"packages of team {team} whose jobs are not over fill its {TEAM_BYTES / 2**30:.0f} GiB.",
                hint="Stop jobs that are not needed, or upload less.",
            )
        left = self._drop([each for each in files if each[3].exists()], TOTAL_BYTES - MOST_BYTES, time.time() - KEPT_S)
        if self._folder.exists() and shutil.disk_usage(self._folder).free < size:
            raise StorageError("no space left for a package.", hint="Free space where the run folder is.")
        if left < 0:
            raise StorageError(
                f"packages of jobs that are not over fill the {TOTAL_BYTES / 2**30:.0f} GiB that there are for them.",
                hint="Stop jobs that are not needed, or upload less.",
            )

    def _drop(self, files: list[tuple[bool, float, int, Path]], left: int, oldest_s: float) -> int:
        """Removes those that nobody uses and that are older, or above what is left; the bytes that are left then."""
        for stays, used_s, size, path in files:
            left -= size
            if not stays and (used_s < oldest_s or left < 0):
                path.unlink(missing_ok=True)
                path.with_suffix(_TEAM).unlink(missing_ok=True)
                left += size
        return left

    @contextmanager
    def receive(self, digest: str, team: str = "") -> Iterator[PackageWriter]:
        """A file to write to; it becomes the package at the end, if it is what its digest says. `team`: whose it is,
        unless it is there already."""
        final = self._file(digest)
        staged = self._folder / f".{secrets.token_hex(8)}"
        try:
            with full_disk_is_an_error(str(final)):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                with staged.open("wb") as file:
                    part = PackageWriter(file)
                    yield part
                    file.flush()
                    os.fsync(file.fileno())  # a job that is accepted next has its package, whoever loses power
            if part.digest != digest:
                raise DataError("the package that arrived is not the one announced.", hint="Send it again.")
            if not zipfile.is_zipfile(staged):
                raise DataError("the package that arrived is no zip file.", hint="`raytide run` packs and uploads.")
            with full_disk_is_an_error(str(final)):
                if team and not final.exists():
                    final.with_suffix(_TEAM).write_text(team)
                os.replace(staged, final)
        finally:
            staged.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise DataError(f"{digest[:80]!r} is no digest of a package.", hint="It is SHA-256, in hex.")
        return self._folder / f"{digest}.zip"

    def _team(self, path: Path) -> str:
        """Whose a package is; empty of one that an older release received."""
        try:
            return path.with_suffix(_TEAM).read_text()
        except (OSError, ValueError):
            return ""

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """With when each was used last, and how large it is; what arrives or was left half arrived is one too."""
        for path in self._folder.glob("*"):
            with suppress(FileNotFoundError):
                if path.suffix == _TEAM:
                    continue
                stat = path.stat()
                yield path, stat.st_mtime, max(stat.st_size, LEAST_BYTES)


class PackageWriter:
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
