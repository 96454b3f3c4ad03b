"""Stores the files of all teams. File contents are in a folder, and everything else is in a database. Limits apply to
each file, each team and the whole cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel

from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.core.errors import StorageError
from raytide.core.io.atomic_file import sweep, sync
from raytide.core.io.storage import full_disk_is_an_error
from raytide.gateway.files.database import FileDatabase

UPLOAD_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_KEEP_BATCH_S = 30 * 86_400
"""The seconds for which the input of a batch is kept, as at OpenAI, unless the upload sets another time."""
_SHOWN = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
"""The columns of a file that clients see."""
_CONTENT = re.compile(r"file-[0-9a-f]{32}")
_ORPHAN_S = 3600.0


@dataclass(frozen=True, slots=True)
class FileLimits:
    file_bytes: int = 512 << 20
    team_bytes: int = 8 << 30
    total_bytes: int = 32 << 30
    free_bytes: int = 1 << 30
    """The bytes that uploads and batches leave free on the disk, which may also hold the cluster's state."""
    team_files: int = 10_000


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileObjectList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeletion(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class PartialFile:
    """A file whose content is still being written.

    The file's name contains the id of the writing process. If that process dies, another process recognises the file by
    its name and removes it.
    """

    def __init__(self, folder: Path, limits: FileLimits) -> None:
        self.id = f"file-{secrets.token_hex(16)}"
        self.path = folder / f".{self.id}.{os.getpid()}.{secrets.token_hex(4)}.part"
        self.size = 0
        self._folder, self._limits = folder, limits
        with full_disk_is_an_error("the file"):
            self._file: BinaryIO = open(self.path, "xb", buffering=0, opener=_for_owner)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Appends data to the file.

        Raises ApiError if the file becomes too large, and StorageError if the disk is full or nearly full.
        """
        self.size += len(data)
        if self.size > self._limits.file_bytes:
            raise invalid(
                f"The file is larger than {self._limits.file_bytes} bytes.",
                param="file",
                code="file_too_large",
                status=413,
            )
        with full_disk_is_an_error("the file"):
            self.check_free(len(data))
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]

    def check_free(self, size: int) -> None:
        """Raises StorageError if `size` more bytes would fill the disk or nearly fill it."""
        if shutil.disk_usage(self._folder).free - size < self._limits.free_bytes:
            raise StorageError("the head has no more room for files.", hint="Delete files, or ask the operator.")

    def sync(self) -> None:
        with full_disk_is_an_error("the file"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Removes it unless it was added to the store."""
        self._file.close()
        with suppress(FileNotFoundError):
            self.path.unlink()


class FileStore:
    """The files of all teams. Methods block on the disk and may run in any thread of any gateway process."""

    def __init__(
        self, database: FileDatabase, limits: FileLimits | None = None, now_s: Callable[[], float] = time.time
    ) -> None:
        self.database, self.folder = database, database.folder
        self.limits, self._now_s = limits or FileLimits(), now_s

    @contextmanager
    def partial(self) -> Iterator[PartialFile]:
        """Opens a context in which a new file is written. Removes the file at the end of the context unless `add`
        published it.
        """
        part = PartialFile(self.folder, self.limits)
        try:
            yield part
        finally:
            part.close()

    def add(
        self, part: PartialFile, team: str, *, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> FileObject:
        """Publishes a completely written file. Raises ApiError if the file exceeds a limit of the team or of the
        cluster.
        """
        part.sync()
        with self.database.write() as connection:
            self.check_room(connection, team, part.size)
            return self.insert(
                connection, part, team, filename=filename, purpose=purpose, expires_after_s=expires_after_s
            )

    def insert(
        self,
        connection: sqlite3.Connection,
        part: PartialFile,
        team: str,
        *,
        filename: str,
        purpose: str,
        expires_after_s: int | None,
    ) -> FileObject:
        """Publishes a written and synced file within the caller's transaction. Clients see the file once the
        transaction commits. The limits of the team and of the cluster are not checked.
        """
        now = int(self._now_s())
        if expires_after_s is None and purpose == "batch":
            expires_after_s = _KEEP_BATCH_S
        expires_at = None if expires_after_s is None else now + expires_after_s
        connection.execute(
            "INSERT INTO files (id, team, purpose, filename, bytes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (part.id, team, purpose, filename, part.size, now, expires_at),
        )
        with full_disk_is_an_error("the file"):
            os.replace(part.path, self.content_path(part.id))
            sync(self.folder)
        return FileObject(
            id=part.id, bytes=part.size, created_at=now, expires_at=expires_at, filename=filename, purpose=purpose
        )

    def check_room(self, connection: sqlite3.Connection, team: str, size: int) -> None:
        """Raises ApiError if one more file, of `size` bytes, would exceed a limit of the team or of the cluster."""
        query = "SELECT coalesce(sum(bytes), 0), count(*) FROM files"
        own, count = connection.execute(f"{query} WHERE team = ?", (team,)).fetchone()
        total = connection.execute(query).fetchone()[0]
        if own + size > self.limits.team_bytes or count >= self.limits.team_files:
            raise _no_room("Your team's files take all the room that they may: delete some.")
        if total + size > self.limits.total_bytes:
            raise _no_room("The files of this cluster take all the room that they may.")

    def get(self, team: str, file_id: str) -> FileObject:
        """Returns a file of the team. Raises an ApiError (404) if the team has no such file."""
        with self.database.read() as connection:
            row = connection.execute(
                "SELECT * FROM files WHERE id = ? AND team = ? AND coalesce(expires_at, ?) >= ?",
                (file_id, team, now := int(self._now_s()), now),
            ).fetchone()
        if row is None:
            raise _unknown(file_id)
        return _file(row)

    def page(
        self, team: str, *, after: str | None, limit: int, is_ascending: bool, purpose: str | None
    ) -> FileObjectList:
        """Returns a page of the team's files, in the order in which they were added or in the reverse order."""
        now = int(self._now_s())
        order, beyond = ("ASC", ">") if is_ascending else ("DESC", "<")
        where, values = "team = ? AND coalesce(expires_at, ?) >= ?", [team, now, now]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        with self.database.read() as connection:
            if after is not None:
                found = connection.execute("SELECT seq FROM files WHERE id = ? AND team = ?", (after, team)).fetchone()
                if found is None:
                    raise invalid(f"There is no file {after!r} after which to list.", param="after", status=404)
                where, values = f"{where} AND seq {beyond} ?", [*values, found["seq"]]
            rows = connection.execute(
                f"SELECT * FROM files WHERE {where} ORDER BY seq {order} LIMIT ?",  # nosec B608
                (*values, limit + 1),
            ).fetchall()
        data = [_file(row) for row in rows[:limit]]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return FileObjectList(data=data, first_id=first, last_id=last, has_more=len(rows) > limit)

    def content(self, team: str, file_id: str) -> tuple[FileObject, Path]:
        """Returns a file of the team and the path of the file's content."""
        return self.get(team, file_id), self.content_path(file_id)

    def delete(self, team: str, file_id: str) -> FileDeletion:
        """Deletes a file. Raises an ApiError: 404 if the team has no such file, and 400 if an unfinished batch still
        reads the file.
        """
        with self.database.write() as connection:
            row = connection.execute("SELECT holds FROM files WHERE id = ? AND team = ?", (file_id, team)).fetchone()
            if row is None:
                raise _unknown(file_id)
            if row["holds"]:
                raise invalid(
                    f"{file_id} is the input of a batch that has not ended.", param="file_id", code="file_in_use"
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.content_path(file_id).unlink(missing_ok=True)
        return FileDeletion(id=file_id)

    def sweep(self) -> None:
        """Removes expired files that no unfinished batch reads, and incomplete files that killed processes left behind.
        Also removes contents that are older than an hour and that the database does not list. If a damaged database was
        set aside, these contents stay, because that database may list them.
        """
        sweep([self.folder])
        with self.database.write() as connection:
            expired = connection.execute(
                "DELETE FROM files WHERE expires_at < ? AND holds = 0 RETURNING id", (int(self._now_s()),)
            ).fetchall()
        for row in expired:
            self.content_path(row["id"]).unlink(missing_ok=True)
        old = [path for path in self.folder.iterdir() if _CONTENT.fullmatch(path.name) and _is_old(path)]
        with self.database.read() as connection:
            known = {row["id"] for row in connection.execute("SELECT id FROM files")}
        if self.database.set_aside():
            return  # it may know them
        for path in old:
            if path.name not in known:
                path.unlink(missing_ok=True)

    def content_path(self, file_id: str) -> Path:
        """Returns the path at which the content of a file is stored, whichever team owns the file."""
        assert _CONTENT.fullmatch(file_id), file_id
        return self.folder / file_id


def _file(row: sqlite3.Row) -> FileObject:
    return FileObject(**{name: row[name] for name in _SHOWN})


def _unknown(file_id: str) -> ApiError:
    return invalid(f"No such File object: {file_id}.", param="id", status=404)


def _no_room(message: str) -> ApiError:
    return invalid(message, param="file", code="storage_limit_exceeded")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _is_old(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _ORPHAN_S
    return False
