"""A SQLite database that the gateway processes of a cluster share: that of files and batches, unless told otherwise."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from raytide.core.errors import OverloadedError, StorageError

__all__ = ["FileDatabase"]

_BUSY_S = 10.0
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
    """A folder with the database in it, for this user alone. Each call opens the file: any thread may call it.

    It has a rollback journal, not a write-ahead log, whose readers would need room on the disk. One that `has_log` is
    faster, and may lose the last transactions when the power fails.
    """

    def __init__(self, folder: Path, name: str = "files.db", schema: str = _SCHEMA, *, has_log: bool = False) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._path, self._has_log = folder / name, has_log
        with self._errors(), self._opened() as connection:
            if has_log:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(schema)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction that no other writer can interleave with; it is durable once the block has ended."""
        with self._errors(), self._opened() as connection:
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
        """Opens a consistent view."""
        with self._errors(), self._opened() as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._has_log else 'FULL'}")
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises StorageError for a full disk or a damaged file, and OverloadedError for one that stays locked."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = self._path.name
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise OverloadedError(f"{name} is locked by other requests.", hint="Retry later.") from error
            hint = "Free space on the head, or move a damaged file away."
            raise StorageError(f"{name} cannot be read or written: {error}.", hint=hint) from error
