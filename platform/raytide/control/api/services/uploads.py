"""The working directories that users upload as packages. Each package is a file in the run folder, named by its
digest."""

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
"""The time that a package is kept after its last use. Packages of unfinished jobs are always kept."""
TOTAL_BYTES = 10 * 2**30
"""The limit of all packages together; the least recently used ones are removed first."""
TEAM_BYTES = 3 * 2**30
"""The limit of the packages that one team uploaded. Above it, the team's own packages are removed first."""

LEAST_BYTES = 2**19
"""The least bytes that each package counts for in the limits, because file systems limit the number of files."""


class Packages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sweep(self) -> None:
        """Removes partial uploads of an earlier API process. Call it before the first upload."""
        for path in self._folder.glob(".*"):
            path.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Returns the path of the package with this digest, and counts this as a use of the package. Raises
        NotFoundError if the package was never uploaded or has been removed."""
        path = self._file(digest)
        try:
            os.utime(path)
        except FileNotFoundError:
            raise NotFoundError(
                f"package {digest[:12]} does not exist: it was not uploaded, or unused for {KEPT_S / 86_400:.0f} days.",
                hint="Submit the script again: `raytide run` uploads it.",
            ) from None
        return path

    def make_room(self, in_use: Set[str], team: str = "", size: int = MOST_BYTES) -> None:
        """Makes room for a team's new package of `size` bytes. Never removes a package that an unfinished job uses.
        Removes all other packages that were not used for KEPT_S seconds. If that is not enough, also removes the least
        recently used of the remaining packages.

        Raises ConflictError if the packages that the team's jobs use leave no room. Raises StorageError if the
        packages of all teams, or the disk, leave no room.
        """
        files = [(path.stem in in_use, used_s, taken, path) for path, used_s, taken in self._files()]
        files.sort(reverse=True)
        own = [each for each in files if self._team(each[3]) == team] if team else []
        if self._drop(own, TEAM_BYTES - size, -math.inf) < 0:
            raise ConflictError(
                f"packages of unfinished jobs of team {team} fill its limit of {TEAM_BYTES / 2**30:.0f} GiB.",
                hint="Stop jobs that are not needed, or upload less.",
            )
        left = self._drop([each for each in files if each[3].exists()], TOTAL_BYTES - MOST_BYTES, time.time() - KEPT_S)
        if self._folder.exists() and shutil.disk_usage(self._folder).free < size:
            raise StorageError("no space left for a package.", hint="Free space where the run folder is.")
        if left < 0:
            raise StorageError(
                f"packages of unfinished jobs fill the limit of {TOTAL_BYTES / 2**30:.0f} GiB.",
                hint="Stop jobs that are not needed, or upload less.",
            )

    def _drop(self, files: list[tuple[bool, float, int, Path]], left: int, oldest_s: float) -> int:
        """Removes unused packages that were last used before `oldest_s` or exceed the limit of `left` bytes. Returns
        the bytes that stay free below the limit: a negative number if packages in use exceed it."""
        for stays, used_s, size, path in files:
            left -= size
            if not stays and (used_s < oldest_s or left < 0):
                path.unlink(missing_ok=True)
                path.with_suffix(_TEAM).unlink(missing_ok=True)
                left += size
        return left

    @contextmanager
    def receive(self, digest: str, team: str = "") -> Iterator[PackageWriter]:
        """Yields a writer for a package. Removes the written content unless the block calls `PackageWriter.finish`.

        If the package is new, `team` becomes its owner.
        """
        final = self._file(digest)
        staged = self._folder / f".{secrets.token_hex(8)}"
        try:
            with full_disk_is_an_error(str(final)):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                with staged.open("wb") as file:
                    yield PackageWriter(file, staged, final, team)
        finally:
            staged.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise DataError(f"{digest[:80]!r} is not a package digest.", hint="Use a SHA-256 in hex.")
        return self._folder / f"{digest}.zip"

    def _team(self, path: Path) -> str:
        """Returns the package's owner; empty for packages from older releases."""
        try:
            return path.with_suffix(_TEAM).read_text()
        except (OSError, ValueError):
            return ""

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Yields all packages, including partial uploads, with the time of their last use and their size."""
        for path in self._folder.glob("*"):
            with suppress(FileNotFoundError):
                if path.suffix == _TEAM:
                    continue
                stat = path.stat()
                yield path, stat.st_mtime, max(stat.st_size, LEAST_BYTES)


class PackageWriter:
    """Writes a package during its upload, and computes the digest of its content."""

    def __init__(self, file: IO[bytes], staged: Path, final: Path, team: str) -> None:
        self._file, self._staged, self._final, self._team = file, staged, final, team
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > MOST_BYTES:
            raise DataError(f"a package may have at most {MOST_BYTES / 2**20:.0f} MiB.", hint="Leave large files out.")
        self._hash.update(chunk)
        self._file.write(chunk)

    def finish(self) -> None:
        """Publishes the written content as the package. Raises DataError if the content's hash is not the package's
        digest, or if the content is not a zip file. Call this in a thread, because it waits for the disk.
        """
        self._file.flush()
        os.fsync(self._file.fileno())  # accepted jobs keep their package after a power loss
        if self._hash.hexdigest() != self._final.stem:
            raise DataError("the uploaded package does not match its digest.", hint="Send it again.")
        if not zipfile.is_zipfile(self._staged):
            raise DataError("the uploaded package is not a zip file.", hint="`raytide run` packs and uploads.")
        if self._team and not self._final.exists():
            self._final.with_suffix(_TEAM).write_text(self._team)
        os.replace(self._staged, self._final)
