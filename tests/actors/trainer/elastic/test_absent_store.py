"""A store that is away while a gang forms again is waited for, because the ranks hold the state in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.actors.trainer.elastic.ready_worker import Worker

from raytide.actors.trainer.elastic import driver as module
from raytide.actors.trainer.elastic.generation import GenerationResult
from raytide.actors.trainer.elastic.stragglers import RankTimes
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.core.clock import VirtualClock
from raytide.core.errors import RaytideError, StorageError, WaitTimeoutError
from raytide.core.io.storage import FullDiskError
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.specs.train import TrainSpec

SHAPE = Shape(members=1, resources={"CPU": 1.0})
LEASE = Lease("lease-1", "job-1", SHAPE, LeaseState.ACTIVE, (Member(0, MemberState.READY, "node-0"),))
BROKEN = GenerationResult("broken", "rank 1 died")
AWAY = StorageError("cannot reach s3://bucket/run")


def failed(error: RaytideError) -> GenerationResult:
    return GenerationResult("failed", str(error), error)


class Client:
    def lease(self, job_id: str) -> Lease:
        return LEASE

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        threading.Event().wait(0.01)
        return LEASE

    def report(self, job_id: str, progress: object) -> None: ...


def drive(folder: Path, monkeypatch: pytest.MonkeyPatch, results: Iterator[GenerationResult]) -> list[str]:
    """Runs a driver whose generations end with `results`. Returns the reasons of the broken generations."""
    clock = VirtualClock()
    spec = TrainSpec(name="small", dataset="none", out=str(folder / "run"), steps=3, stall_timeout_s=60.0)

    def generation(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(rank_times=RankTimes(), run=lambda: next(results))

    monkeypatch.setattr(module, "GenerationRunner", generation)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.now_s, sleep=clock.sleep))
    monkeypatch.setattr(module, "TICK_S", 0.0)
    claim: Any = SimpleNamespace(token="", check=lambda: None)
    record = RunLog(spec, clock)
    with closing(module._Driver(spec, Client(), "job-1", record, lambda *_: Worker(), claim)) as driver:
        driver.run()
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event["why"] for event in map(json.loads, lines) if event["event"] == "broke"]


@pytest.mark.parametrize("error", [AWAY, WaitTimeoutError("waited 300 s for s3://bucket/run/metrics.jsonl")])
def test_a_store_that_is_away_while_a_gang_forms_again_ends_no_run(
    error: RaytideError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([BROKEN, *[failed(error)] * 9, GenerationResult("done")])
    assert drive(tmp_path, monkeypatch, results) == ["rank 1 died", *[str(error)] * 9]


@pytest.mark.parametrize(
    ("results", "error"),
    [
        ([failed(AWAY)], AWAY),  # at the start nothing is lost, and the place may be wrong
        ([BROKEN, *[failed(AWAY)] * 99], AWAY),
        ([BROKEN, failed(full := FullDiskError("no space left"))], full),
    ],
)
def test_a_store_is_waited_for_by_ranks_with_a_state_alone_and_not_for_ever(
    results: list[GenerationResult], error: RaytideError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error), match=error.message):
        drive(tmp_path, monkeypatch, iter(results))
