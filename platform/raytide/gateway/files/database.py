"""A SQLite database that several processes share. By default it is the database of uploaded files and batches."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from raytide.core.errors import OverloadedError, StorageError
from raytide.core.logs import logger

log = logger(__name__)

_BUSY_S = 10.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    team TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    holds INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS files_of_team ON files (team, seq);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    team TEXT NOT NULL,
    account TEXT NOT NULL,
    is_final INTEGER NOT NULL DEFAULT 0,
    record TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_team ON batches (team, seq);
CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (seq) WHERE is_final = 0;
"""
"""`holds` counts the unfinished batches that read a file; `record` is the batch as clients see it."""


class FileDatabase:
    """A SQLite database in a folder that only this user can access. Each call opens the database file anew, so any
    thread may call it.

    By default the database uses a rollback journal, because even readers of a write-ahead log need space on the disk.
    With `has_log` it uses a write-ahead log. That is faster, but a power failure may lose the last transactions.

    When SQLite finds the file damaged, the file is renamed and an empty database is created. The call that finds the
    damage fails. Later calls use the empty database.
    """

    def __init__(self, folder: Path, name: str = "files.db", schema: str = _SCHEMA, *, has_log: bool = False) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._path, self._schema, self._has_log = folder / name, schema, has_log
        try:
            # SQLite does not wait for another process that turns the write-ahead log on.
            with self._lock(fcntl.LOCK_EX, ".create"), self._opened() as connection:
                self._create(connection)
        except StorageError as error:
            if not _is_damage(error.__cause__):
                raise

    def set_aside(self) -> list[Path]:
        """Returns the paths of damaged database files that were renamed and still exist."""
        return sorted(self.folder.glob(f"{self._path.name}.damaged-*"))

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Opens a context with a connection in a write transaction, which excludes other writers.

        The transaction is committed at the end of the context. An exception rolls it back.
        """
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Opens a context with a connection that sees one consistent state of the database."""
        with self._opened() as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Opens the file. Raises StorageError for a full disk or a damaged file, and OverloadedError if the file stays
        locked.
        """
        name, inode = self._path.name, 0
        try:
            with self._lock(fcntl.LOCK_SH):
                inode = self._path.stat().st_ino if self._path.exists() else 0
                with self._connected() as connection:
                    yield connection
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._replace(inode, error)
                hint = "Retry: a new one has begun, and what was in the damaged one is not known to it."
                raise StorageError(f"{name} is damaged: {error}.", hint=hint) from error
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise OverloadedError(f"{name} is locked by other requests.", hint="Retry later.") from error
            hint = "Free space on the head."
            raise StorageError(f"{name} cannot be read or written: {error}.", hint=hint) from error

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._has_log else 'FULL'}")
            yield connection

    def _create(self, connection: sqlite3.Connection) -> None:
        if self._has_log:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(self._schema)

    def _replace(self, inode: int, error: sqlite3.DatabaseError) -> None:
        """Renames the damaged file and its journals and creates a new file, unless another process has done so. It
        waits until no process has the file open.
        """
        with self._lock(fcntl.LOCK_EX):
            if not self._path.exists() or self._path.stat().st_ino != inode:
                return
            kept = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{inode}")
            for end in ("-wal", "-shm", "-journal", ""):
                with suppress(FileNotFoundError):
                    os.replace(f"{self._path}{end}", f"{kept}{end}")
            log.error(
                "a damaged database is set aside, and a new one begun",
                extra={"path": str(self._path), "set_aside": str(kept), "error": str(error)},
            )
            with self._connected() as connection:
                self._create(connection)

    @contextmanager
    def _lock(self, kind: int, name: str = "") -> Iterator[None]:
        """Holds a lock: a shared one keeps others from renaming the file, LOCK_EX keeps others from opening it. The
        lock `.create` is of its own: it keeps others from creating the tables.
        """
        try:
            handle = os.open(f"{self._path}{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"{self._path.name} cannot be opened: {error}.", hint="Free space on the head."
            ) from error
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)


def _is_damage(error: BaseException | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
