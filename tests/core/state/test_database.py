from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from raytide.core.errors import StorageError
from raytide.core.state.database import Database
from raytide.core.state.leader import LEASE_S
from raytide.core.state.store import Store


def test_threads_of_a_process_write_to_sqlite_one_after_the_other(tmp_path: Path) -> None:
    """The second does not even open its transaction, in which SQLite would make it sleep."""
    database = Database(f"sqlite:///{tmp_path}/turns.db")
    database.upgrade()
    begun = threading.Event()
    sa.event.listen(database.engine, "begin", lambda _: begun.set())

    def write() -> None:
        with database.write():
            pass

    with database.write():
        begun.clear()
        other = threading.Thread(target=write)
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert not begun.is_set()
    other.join(20)
    assert begun.is_set()
    with pytest.raises(ZeroDivisionError), database.write():
        _ = 1 / 0
    write()  # the turn of a failed write has ended
    database.engine.dispose()


def test_a_store_without_a_free_connection_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its server hangs. Whoever retries after errors of the store must know this one, too."""
    database = Database(f"sqlite:///{tmp_path}/busy.db")
    pool: Any = database.engine.pool
    monkeypatch.setattr(pool, "_timeout", 0.01)
    with ExitStack() as held:
        for _ in range(pool.size() + pool._max_overflow):
            held.enter_context(database.read())
        with pytest.raises(StorageError, match="cannot be read or written: QueuePool limit"):
            database.first(sa.select(1))
    database.close()


def test_a_database_machine_that_vanished_is_noticed_before_a_lease_has_run_out() -> None:
    """Else a query waits for its answer for hours. The options of a state URL come before raytide's."""
    asked: list[dict[str, Any]] = []
    for url in ("postgresql://127.0.0.1:1/tide", "postgresql://127.0.0.1:1/tide?connect_timeout=3&keepalives_idle=60"):
        database = Database(url)
        sa.event.listen(database.engine, "do_connect", lambda *args: asked.append(dict(args[3])))
        with pytest.raises(StorageError):
            database.first(sa.select(1))
        database.close()
    ours, users = asked
    assert ours["connect_timeout"] <= 10
    assert ours["keepalives_idle"] + ours["keepalives_interval"] * ours["keepalives_count"] < LEASE_S
    assert ours["tcp_user_timeout"] < 1000 * LEASE_S
    assert (int(users["connect_timeout"]), int(users["keepalives_idle"])) == (3, 60)
    assert users["tcp_user_timeout"] == ours["tcp_user_timeout"]


@pytest.mark.parametrize("damage", [b"no database " * 1000, None])
def test_a_damaged_state_is_left_as_it_is_and_the_error_names_the_restore(tmp_path: Path, damage: bytes | None) -> None:
    file = tmp_path / "state.db"
    Store.open(f"sqlite:///{file}").close()
    for journal in tmp_path.glob("state.db-*"):
        journal.unlink()
    whole = file.read_bytes()
    damaged = damage or whole[:100] + b"\xff" * (len(whole) - 100)
    file.write_bytes(damaged)
    with pytest.raises(StorageError, match=r"is damaged: .* `raytide backup restore`"):
        Store.open(f"sqlite:///{file}")
    assert file.read_bytes() == damaged
