"""Copies of the state: whole while others write, from and to either kind of store."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from tests.control.backup.conftest import AT_S, Cluster
from tests.core.state.conftest import postgres_server
from tests.stores import new_store

from raytide.control.backup.state_copy import check_state, copy_state, write_state
from raytide.core.errors import ConflictError, StorageError
from raytide.core.objects.plan import Plan, Wait
from raytide.core.state import Changes, Store

__all__ = ["postgres_server"]


def test_a_copy_is_one_file_with_the_same_records(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "state.db"
    copy.parent.mkdir()
    copy_state(f"sqlite:///{cluster.run_dir / 'state.db'}", copy)
    assert [path.name for path in copy.parent.iterdir()] == ["state.db"]
    store = Store.open(f"sqlite:///{copy}")
    try:
        assert store.job("job-1") == cluster.jobs[0]
        assert store.books.entries() == cluster.store.books.entries()
        assert store.load() == cluster.store.load()
    finally:
        store.close()


def test_a_copy_taken_while_others_write_has_whole_transactions(cluster: Cluster, tmp_path: Path) -> None:
    is_over = threading.Event()

    def write() -> None:
        node = 2
        while not is_over.is_set():
            cluster.book(node, 7)
            node += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            copy = tmp_path / f"{number}.db"
            copy_state(f"sqlite:///{cluster.run_dir / 'state.db'}", copy)
            with closing(sqlite3.connect(copy)) as records:
                sums = [
                    records.execute(f"SELECT SUM(amount_micro_usd) FROM {name}").fetchone()
                    for name in ("entries", "totals")
                ]
            assert sums[0] == sums[1]
    finally:
        is_over.set()
        writer.join()


def test_a_state_that_is_not_there_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be copied"):
        copy_state(f"sqlite:///{tmp_path}/nowhere.db", tmp_path / "copy.db")
    assert not (tmp_path / "nowhere.db").exists()
    new_store(tmp_path).close()
    body = bytearray((tmp_path / "state.db").read_bytes())
    body[4096 * 3 : 4096 * 4] = b"\xff" * 4096
    (tmp_path / "state.db").write_bytes(bytes(body))
    with pytest.raises(StorageError, match="is damaged"):
        check_state(tmp_path / "state.db")


def test_a_store_that_holds_records_is_not_written_to(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy_state(f"sqlite:///{cluster.run_dir / 'state.db'}", copy)
    with pytest.raises(ConflictError, match="holds records already"):
        write_state(copy, f"sqlite:///{cluster.run_dir / 'state.db'}")


def test_a_state_goes_to_postgresql_and_back_and_both_number_on(
    cluster: Cluster, tmp_path: Path, postgres_server: str
) -> None:
    import psycopg

    plan = Plan(AT_S, (Wait("job-1", "capacity", "no room"),))
    cluster.store.commit(Changes(at_s=AT_S, plan=plan))
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    url, copy, back = postgres_server.format(name), tmp_path / "copy.db", tmp_path / "back.db"
    copy_state(f"sqlite:///{cluster.run_dir / 'state.db'}", copy)
    write_state(copy, url)
    moved = Store.open(url)
    try:
        assert moved.load() == cluster.store.load()
        assert moved.books.entries() == cluster.store.books.entries()
        moved.commit(Changes(at_s=AT_S + 1, plan=Plan(AT_S + 1, (Wait("job-1", "quota", "none"),))))
        assert len(moved.plans()) == 2, "its number follows the copied one"
        moved.submit_job(cluster.jobs[0].spec, "ana", AT_S)
        copy_state(url, back)
    finally:
        moved.close()
    returned = Store.open(f"sqlite:///{back}")
    try:
        assert [job.id for job in returned.jobs()] == ["job-2", "job-1"]
        assert returned.datasets.find("tokens") == cluster.store.datasets.find("tokens")
        assert returned.tenancy.audit.verify().is_whole
    finally:
        returned.close()


def test_a_copy_of_postgresql_may_take_long(
    tmp_path: Path, postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its read transaction idles while the copy is written, which takes minutes for many gigabytes."""
    import psycopg

    def wait(*_: object) -> None:
        time.sleep(1.5)

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(postgres_server.format("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    Store.open(postgres_server.format(name)).close()
    monkeypatch.setattr("raytide.core.state.database.PAUSED_TRANSACTION_S", 1)
    monkeypatch.setattr("raytide.control.backup.state_copy._require_empty", wait)
    copy_state(postgres_server.format(name), tmp_path / "copy.db")
