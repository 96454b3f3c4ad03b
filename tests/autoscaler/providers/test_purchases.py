"""Purchases from a cloud are in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raytide.autoscaler.providers import purchases
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases


def test_what_is_over_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bought = Purchases(tmp_path)
    for name in ("node-1", "node-2"):
        bought.record(PurchaseRecord(name, "cpu", "a", 1, 10.0))
    bought.end("node-1", 20.0, "terminated")
    before, read = bought.over(), []
    real = purchases.read_json
    monkeypatch.setattr(purchases, "read_json", lambda path: (read.append(path.name), real(path))[1])
    assert bought.over() == before
    assert read == []
    bought.end("node-2", 30.0, "terminated")
    assert [machine.ended_at_s for machine in bought.over()] == [20.0, 30.0]
    assert sorted(read) == ["node-2.end.json", "node-2.json", "node-2.prices.json"]


def test_the_folder_is_listed_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the records of all ended machines, and each tick asks for them."""
    bought, other, lists, real = Purchases(tmp_path), Purchases(tmp_path), [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (lists.append(path), real(path))[1])
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("the folder is listed"))
    for name in ("node-1", "node-2"):
        other.record(PurchaseRecord(name, "cpu", "a", 1, 10.0))
    other.end("node-1", 20.0, "terminated")
    os.utime(tmp_path, (1000.0, 1000.0))
    assert [machine.ended_at_s for machine in bought.machines()] == [20.0, None]
    assert len(lists) == 1
    bought.machines()
    assert len(lists) == 1
    other.end("node-2", 30.0, "terminated")
    assert [machine.ended_at_s for machine in bought.machines()] == [20.0, 30.0]


def test_a_change_at_the_same_time_as_a_listing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bought, other = Purchases(tmp_path), Purchases(tmp_path)
    other.record(PurchaseRecord("node-1", "cpu", "a", 1, 10.0))
    os.utime(tmp_path, (1000.0, 1000.0))
    monkeypatch.setattr("time.time", lambda: 1001.0)
    assert [machine.ended_at_s for machine in bought.machines()] == [None]
    other.end("node-1", 20.0, "terminated")
    os.utime(tmp_path, (1000.0, 1000.0))
    assert [machine.ended_at_s for machine in bought.machines()] == [20.0]


def test_a_machine_that_ends_while_the_records_are_read_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller writes them while others read the bill."""
    bought, opened = Purchases(tmp_path), Purchases.open
    bought.record(PurchaseRecord("node-1", "cpu", "a", 1, 10.0))

    def ended_after(records: Purchases) -> list[PurchaseRecord]:
        found = opened(records)
        Purchases(tmp_path).end("node-1", 20.0, "terminated")
        return found

    monkeypatch.setattr(Purchases, "open", ended_after)
    assert [machine.ended_at_s for machine in bought.machines()] == [20.0]
