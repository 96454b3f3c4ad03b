"""The file with what a gateway has finished and not reported, as the next process finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gateway.tenancy.test_usage import row

from raytide.gateway.tenancy import usage_journal
from raytide.gateway.tenancy.usage_journal import UsageJournal


def killed(folder: Path, name: str, *ids: str) -> Path:
    """Leaves the file of a process that was killed, with a row that it was writing."""
    journal = UsageJournal(folder, name)
    for id in ids:
        journal.add(row(id, "key-1"))
    path = folder / f"usage-{name}.jsonl"
    content = path.read_bytes()
    journal.close()
    path.write_bytes(content + b'{"id": "torn"')
    return path


def found(journal: UsageJournal) -> list[str]:
    return [request.id for request in journal.take_over()]


def test_the_rows_of_killed_processes_are_found_once_and_are_safe_in_the_next_journal(tmp_path: Path) -> None:
    left = [killed(tmp_path, "g1", "a", "b"), killed(tmp_path, "g2", "c")]
    journal = UsageJournal(tmp_path, "g3")
    assert found(journal) == ["a", "b", "c"]
    assert not any(path.exists() for path in left)
    assert found(journal) == []
    journal.close()
    assert found(UsageJournal(tmp_path, "g4")) == ["a", "b", "c"]


def test_a_process_that_lives_keeps_its_rows(tmp_path: Path) -> None:
    living = UsageJournal(tmp_path, "g1")
    living.add(row("a", "key-1"))
    assert found(UsageJournal(tmp_path, "g2")) == []
    assert (tmp_path / "usage-g1.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_file_that_another_process_has_just_taken_over_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "usage-g0.jsonl").symlink_to(tmp_path / "deleted")  # listed, and gone when it is opened
    killed(tmp_path, "g1", "a")
    assert found(UsageJournal(tmp_path, "g2")) == ["a"]


def test_reported_rows_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage-g1.jsonl"
    journal = UsageJournal(tmp_path, "g1")
    rows = [row(f"r{number}", "key-1") for number in range(20)]
    for each in rows:
        journal.add(each)
    journal.keep(rows[10:])
    assert len(path.read_bytes().splitlines()) == 20  # the file is small
    monkeypatch.setattr(usage_journal, "MOST_BYTES", 100)
    journal.keep([*rows[10:], row("nobody's")])
    assert len(path.read_bytes().splitlines()) == 10
    other = UsageJournal(tmp_path, "g2")
    assert found(other) == []  # the new file is locked, too
    journal.add(rows[0])
    assert len(path.read_bytes().splitlines()) == 11
    journal.keep([])
    assert path.read_bytes() == b""
    journal.close()
    assert not path.exists()


def test_a_full_disk_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = UsageJournal(tmp_path, "g1")

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    journal.add(row("a", "key-1"))
    journal.add(row("b", "key-1"))
