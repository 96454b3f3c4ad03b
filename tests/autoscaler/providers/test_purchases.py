"""Purchases from a cloud are in files."""

from __future__ import annotations

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
