"""Copies a cluster's state store, as of one instant, into a SQLite file. Also fills a new store from such a file.

The copy of a PostgreSQL store is a SQLite file, too. A drill can open it without a server, and a cluster can move
from one kind of store to the other.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from raytide.core.errors import ConflictError, StorageError
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.state.database import Database
from raytide.core.state.registry import tables as registry
from raytide.core.state.tables import metadata

_ROWS = 1000
_BUSY_S = 30.0
_HEADER = b"SQLite format 3\0"
_REVISION = "SELECT version_num FROM alembic_version"

assert registry.models.metadata is metadata  # importing the registry's tables adds them to those of the state


def copy_state(url: str, target: Path) -> None:
    """Copies the state store at this URL to the SQLite file `target`. The copy is a consistent snapshot of one instant,
    even if other processes write to the store meanwhile.
    """
    with closing(Database(url)) as database:
        if database.is_sqlite:
            copy_sqlite(Path(str(database.engine.url.database)), target)
        else:
            _copy_rows(database, f"sqlite:///{target}")
            _leave_write_ahead_mode(target)
    check_state(target)


def copy_sqlite(source: Path, target: Path) -> None:
    """Copies a SQLite file in one step. A copy in several steps would start again whenever another process writes to
    the file."""
    try:
        with (
            full_disk_is_an_error(str(target)),
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new, pages=-1)
        _leave_write_ahead_mode(target)
    except sqlite3.Error as error:
        raise StorageError(
            f"{source} cannot be copied to {target}: {error}.", hint="Free space there, and check its permissions."
        ) from error


def check_state(file: Path) -> None:
    """Raises StorageError if SQLite finds the file damaged."""
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as copy:
            found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(3)")]
    except sqlite3.Error as error:
        found = [str(error)]
    if found != ["ok"]:
        raise StorageError(f"{file} is damaged: {'; '.join(found)}.", hint="Use an earlier snapshot.")


def write_state(file: Path, url: str) -> None:
    """Fills the empty store at this URL from a copy, in one transaction. Raises ConflictError if the store is not
    empty."""
    with closing(Database(f"sqlite:///{file}")) as source:
        source.upgrade()
        _copy_rows(source, url)


def is_sqlite_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def _copy_rows(source: Database, url: str) -> None:
    with closing(Database(url)) as target:
        target.upgrade()
        with source.read() as old, target.write() as new:
            if not source.is_sqlite:  # it locks no rows, and may wait long until the target is on the disk
                old.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            have, need = (c.exec_driver_sql(_REVISION).scalar() for c in (old, new))
            if have != need:
                raise ConflictError(
                    f"the state has the schema {have}, and this raytide writes {need}.",
                    hint="Start the cluster with this raytide first, which upgrades its state.",
                )
            _require_empty(new, url)
            for table in metadata.sorted_tables:
                rows = old.execution_options(yield_per=_ROWS).execute(table.select())
                for part in rows.partitions(_ROWS):
                    new.execute(table.insert(), [dict(row._mapping) for row in part])
            if not target.is_sqlite:
                _advance_sequences(new)


def _require_empty(c: sa.Connection, url: str) -> None:
    for table in metadata.sorted_tables:
        if c.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
            shown = sa.make_url(url).render_as_string()
            raise ConflictError(
                f"the store at {shown} holds records already ({table.name}).",
                hint="Restore into a new database: nothing is overwritten.",
            )


def _advance_sequences(c: sa.Connection) -> None:
    """Sets PostgreSQL's sequences so that the numbers of new rows follow those of the copied rows."""
    for table in metadata.sorted_tables:
        key = table.autoincrement_column
        if key is not None:
            sequence = c.execute(sa.select(sa.func.pg_get_serial_sequence(table.name, key.name))).scalar()
            last = c.execute(sa.select(sa.func.max(key))).scalar()
            if sequence is not None and last is not None:
                c.execute(sa.select(sa.func.setval(sequence, last)))


def _leave_write_ahead_mode(file: Path) -> None:
    """Takes the file out of write-ahead mode, so that it is complete without a log file beside it."""
    with closing(sqlite3.connect(file)) as copy:
        copy.execute("PRAGMA journal_mode=DELETE")
    for suffix in ("-wal", "-shm", ".lock"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
