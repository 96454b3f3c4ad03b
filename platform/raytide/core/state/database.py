"""The store's database, SQLite or PostgreSQL: its engine, transactions, pages and migrations.

SQLite uses a write-ahead log. A write transaction takes the lock when it begins, because SQLite fails at once if a
transaction asks for the lock later.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVarTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError

from raytide.core.bounds import MOST_PAGE_BYTES, encodable
from raytide.core.errors import ConfigError, ConflictError, StorageError

Ts = TypeVarTuple("Ts")

BUSY_TIMEOUT_S = 30.0
PAUSED_TRANSACTION_S = 10
"""The seconds after which PostgreSQL ends the session of a process that stopped in the middle of a transaction, because
its locks would block all other writers.
"""
_LOST_SERVER = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""PostgreSQL's options that end a connection to a machine that has vanished. By default, a query waits for its answer
for a quarter of an hour, or for two hours if the machine vanished after it had received the query.
"""
_MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADE_LOCK = 7_283_118_433
"""The key of the advisory lock that serializes migrations on PostgreSQL."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped surrogate, usually one of a valid pair."""


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """The failure of the last write to the store: the error's text, and the failure's age in seconds."""

    text: str
    age_s: float


class Database:
    """A database engine with methods for read and write transactions."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self._turn = threading.Lock()
        self._failed: tuple[str, float] | None = None
        self.fence: Callable[[sa.Connection], None] | None = None
        """A function that is called in each write transaction, before anything is written. If it raises, nothing is
        written.
        """

    @property
    def last_failure(self) -> WriteFailure | None:
        """Returns the failure of the last write, or None if the last write succeeded."""
        failed = self._failed
        return None if failed is None else WriteFailure(failed[0], time.monotonic() - failed[1])

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Yields a read transaction with one consistent view of the database."""
        with _clear_errors(self.engine), self.engine.connect() as plain:
            level = None if self.is_sqlite else "REPEATABLE READ"
            connection = plain.execution_options(isolation_level=level) if level else plain
            with connection.begin():
                yield connection

    def rows(self, query: sa.Select[*Ts]) -> Sequence[sa.Row[*Ts]]:
        """Returns all rows of one query, which runs in a separate transaction."""
        with self.read() as c:
            return c.execute(query).all()

    def first(self, query: sa.Select[*Ts]) -> sa.Row[*Ts] | None:
        """Returns the first row of one query, which runs in a separate transaction."""
        with self.read() as c:
            return c.execute(query).first()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Yields a connection in a write transaction. The transaction is committed as a whole after the block, or
        rolled back if the block raises.
        """
        try:
            with _clear_errors(self.engine), self._my_turn(), self.engine.connect() as plain:
                connection = plain.execution_options(raytide_write=True)
                with connection.begin():
                    if self.fence is not None:
                        self.fence(connection)
                    yield connection
        except StorageError as error:
            self._failed = (str(error), time.monotonic())
            raise
        self._failed = None

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """Lets the threads of this process write to SQLite one after another.

        Otherwise, SQLite would make a thread that finds the database locked sleep for up to a tenth of a second at a
        time.
        """
        is_mine = self.is_sqlite and self._turn.acquire(timeout=BUSY_TIMEOUT_S)
        try:
            yield
        finally:
            if is_mine:
                self._turn.release()

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def upgrade(self, *, only_new: bool = False) -> None:
        """Runs the missing migrations, under a lock that admits one process at a time. Raises ConflictError if a newer
        raytide wrote the schema. With `only_new`, the schema of a database that has one stays as it is.
        """
        from alembic import command
        from alembic.config import Config
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.set_main_option("recursive_version_locations", "true")
        known = ScriptDirectory.from_config(config)
        with self._exclusive() as connection:
            have = MigrationContext.configure(connection).get_current_revision()
            if have == known.get_current_head():
                return
            if have is not None and have not in {script.revision for script in known.walk_revisions()}:
                raise ConflictError(
                    f"a newer raytide (schema {have}) wrote the state at {self.engine.url.render_as_string()}; "
                    f"this one knows schemas up to {known.get_current_head()}.",
                    hint="Run the newer raytide, or name another state URL.",
                )
            if only_new and have is not None:
                return
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def _exclusive(self) -> Iterator[sa.Connection]:
        """Yields a write transaction during which no other process opens the store."""
        if not self.is_sqlite:
            with self.write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
                yield connection
            return
        with _clear_errors(self.engine), open(f"{self.engine.url.database}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The mode is stored in the file. SQLite does not wait for others when it changes it, hence the lock file.
            # Migrations replace tables whose constraints change, which breaks foreign keys until they are done, so
            # the keys are checked at the end.
            with self.engine.connect() as connection:
                plain = connection.connection.driver_connection
                assert isinstance(plain, sqlite3.Connection)
                plain.execute("PRAGMA journal_mode=WAL").close()
                plain.execute("PRAGMA foreign_keys=OFF").close()
                try:
                    with connection.execution_options(raytide_write=True).begin():
                        yield connection
                        if lost := connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                            raise StorageError(f"the upgrade would leave rows of {lost[0]} without their {lost[2]}.")
                finally:
                    plain.execute("PRAGMA foreign_keys=ON").close()


class DatabaseAccess:
    """The base of the classes that read and write one part of the database."""

    def __init__(self, database: Database) -> None:
        self._db = database


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(parsed)
        if parsed.get_backend_name() == "postgresql":
            options = {"options": f"-c idle_in_transaction_session_timeout={PAUSED_TRANSACTION_S}s", **_LOST_SERVER}
            return sa.create_engine(
                parsed,
                connect_args={name: value for name, value in options.items() if name not in parsed.query},
                pool_pre_ping=True,
                json_serializer=dumps,
                json_deserializer=loads,
            )
    except sa.exc.ArgumentError:
        raise ConfigError(
            f"{url!r} is not a state URL.", hint="Use sqlite:////path/state.db or postgresql://host/db."
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"PostgreSQL state needs {error.name}, which is not installed.", hint="Install raytide[postgres]."
        ) from None
    raise ConfigError(
        f"state cannot be stored in {parsed.get_backend_name()}.",
        hint="Use sqlite:////path/state.db or postgresql://host/db.",
    )


def _sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise ConfigError("state must be a file: in-memory state would be lost.", hint="Use sqlite:////path/state.db.")
    with _clear_errors(None):
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    # Autocommit: `_begin` opens transactions, not the driver.
    engine = sa.create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None},
        json_serializer=dumps,
        json_deserializer=loads,
    )
    sa.event.listen(engine, "connect", _configure)
    sa.event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA foreign_keys=ON").close()


def _begin(connection: sa.Connection) -> None:
    write = connection.get_execution_options().get("raytide_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


_RESTORE = (
    "Stop the cluster, move its run folder away, and restore it with `raytide backup restore` "
    "(docs/runbooks/lost-head.md). Nothing replaces a damaged state by itself."
)


@contextmanager
def _clear_errors(engine: sa.Engine | None) -> Iterator[None]:
    where = engine.url.render_as_string() if engine else "the state's folder"
    try:
        yield
    except IntegrityError as error:
        raise ConflictError(
            f"the state at {where} refused a row: {error.orig}.", hint="Nothing was written."
        ) from error
    except (DBAPIError, sa.exc.TimeoutError, sqlite3.Error, OSError) as error:  # a timeout: no connection was free
        what = error.orig if isinstance(error, DBAPIError) else error
        if getattr(what, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StorageError(f"the state at {where} is damaged: {what}.", hint=_RESTORE) from error
        raise StorageError(
            f"the state at {where} cannot be read or written: {what}.",
            hint="Free space there, check its permissions, or start its server; no partial write was kept.",
        ) from error


def dumps(value: Any) -> str:
    """Returns the value as JSON text that every database accepts. Non-finite numbers become strings, and characters
    that cannot be stored are replaced."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # NaN or infinity
        text = json.dumps(_storable(value))
    return json.dumps(_storable(value)) if _SURROGATE.search(text) else text


def loads(stored: str | bytes) -> Any:
    """Returns the value that a JSON text stores. Returns None if the value is nested too deeply to be read."""
    text = stored if isinstance(stored, str) else stored.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    return _storable(value) if _SURROGATE.search(text) else value


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {encodable(str(name)): _storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner) for inner in value]
    return value


def paged(
    c: sa.Connection,
    query: sa.Select[Any],
    column: sa.ColumnElement[Any],
    limit: int,
    most_bytes: int = MOST_PAGE_BYTES,
) -> Sequence[sa.Row[Any]]:
    """Returns the first rows of a query, at most `limit`. It returns fewer rows, but at least one, if the texts in
    `column` would exceed `most_bytes` in total."""
    sizes = c.execute(query.with_only_columns(sa.func.length(sa.cast(column, sa.Text))).limit(limit)).scalars()
    within = sum(total <= most_bytes for total in accumulate(sizes))
    return c.execute(query.limit(min(limit, max(1, within)))).all()
