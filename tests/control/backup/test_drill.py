"""Drills: a whole backup passes and is measured; a flipped byte, a missing pack and wrong sums are found."""

from __future__ import annotations

import itertools
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.control.backup.conftest import AT_S, NAME, Cluster

from raytide.control.backup import drill as drill_module
from raytide.control.backup.contents import Contents
from raytide.control.backup.drill import drill, problems_of_state
from raytide.control.backup.repository import RepositorySnapshot
from raytide.control.backup.restore import Unpacked, hold_back
from raytide.control.backup.results import read_results
from raytide.control.backup.run import BackupManifest, back_up
from raytide.core.errors import NotFoundError
from raytide.core.io.process import free_port


@pytest.fixture
def saved(backed_up: Cluster) -> Cluster:
    backed_up.checkpoint(20, 3_000_000)
    back_up(backed_up.place)
    return backed_up


def packs(cluster: Cluster) -> list[Path]:
    """The files of data, the largest first."""
    found = [path for path in (cluster.repository / "data").rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_size, reverse=True)


def test_a_whole_backup_starts_a_control_plane_and_is_measured(saved: Cluster) -> None:
    result = drill(saved.place)
    assert result.problems == ()
    assert result.restore_s > 0
    assert result.bytes > 3_000_000
    assert result.lost_s >= 0
    assert read_results(saved.place.work_dir).found == result
    assert saved.store.orders.hold() is None, "the cluster itself is not touched"
    assert [path.name for path in saved.place.work_dir.glob("drill-*")] == []


def test_an_api_whose_port_was_opened_by_another_process_gets_another_port(
    saved: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        chosen = itertools.chain([foreign.getsockname()[1]], iter(free_port, None))
        monkeypatch.setattr(drill_module, "free_port", lambda: next(chosen))
        assert drill(saved.place).problems == ()


def test_a_control_plane_that_does_not_answer_has_no_time_to_restore(
    saved: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill_module, "_nodes_of_api", lambda unpacked, state: "it ended with exit code 1.")
    result = drill(saved.place)
    assert result.problems == ("the restored API did not answer: it ended with exit code 1.",)
    assert result.restore_s == 0.0 and result.bytes > 3_000_000


def test_a_flipped_byte_is_found(saved: Cluster) -> None:
    pack = packs(saved)[0]
    body = bytearray(pack.read_bytes())
    body[len(body) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(bytes(body))
    result = drill(saved.place)
    assert any(pack.name[:8] in problem for problem in result.problems)
    assert read_results(saved.place.work_dir).found == result


def test_a_missing_pack_is_found(saved: Cluster) -> None:
    pack = packs(saved)[0]
    pack.unlink()
    assert any(pack.name[:8] in problem for problem in drill(saved.place).problems)


def test_totals_that_differ_from_the_entries_and_a_state_without_a_hold_are_found(cluster: Cluster) -> None:
    manifest = BackupManifest(
        cluster=NAME,
        at_s=AT_S,
        raytide="1",
        run_dir=str(cluster.run_dir),
        state_sha256="",
        staging=str(cluster.run_dir),
        contents=Contents(),
    )
    unpacked = Unpacked(RepositorySnapshot("0123abcd", AT_S, NAME, ()), Path("/"), manifest, ())
    state = cluster.run_dir / "state.db"
    assert list(problems_of_state(unpacked, state)) == [
        "the restored controller would act at once: its state has no hold."
    ]
    hold_back(state, manifest, "0123abcd")
    assert list(problems_of_state(unpacked, state)) == []
    with closing(sqlite3.connect(state)) as records, records:
        records.execute("UPDATE totals SET amount_micro_usd = amount_micro_usd + 1")
    assert list(problems_of_state(unpacked, state)) == [
        "the ledger's entries sum to 100 micro-dollars, and its totals to 101."
    ]


def test_without_a_snapshot_the_drill_fails_and_that_is_recorded(backed_up: Cluster) -> None:
    with pytest.raises(NotFoundError, match=f"no snapshot.*{NAME}"):
        drill(backed_up.place)
    assert "no snapshot" in read_results(backed_up.place.work_dir).drill.error
