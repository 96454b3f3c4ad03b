"""The objects that outlive a failed attempt hold nothing of its group: its sockets would keep other ranks waiting."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
from raytide.actors.trainer.elastic.worker import TrainWorker
from raytide.actors.trainer.elastic.worker_status import StatusRecorder
from raytide.actors.trainer.types import RankAssignment, WorkerExit
from raytide.core.errors import StorageError


class Group:
    """Stands for a process group, whose sockets are open while it is alive."""


def test_its_error_holds_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Group]] = []

    def run(self: TrainWorker, assignment: RankAssignment, group: Group) -> WorkerExit:
        seen.append(weakref.ref(group))
        try:
            Path("/nowhere/at/all").read_bytes()
        except OSError as error:
            raise StorageError("cannot read it", hint="Mount it.") from error
        raise AssertionError

    monkeypatch.setattr(TrainWorker, "_join", lambda self, assignment: Group())
    monkeypatch.setattr(TrainWorker, "_run", run)
    ended = TrainWorker._attempt(object.__new__(TrainWorker), None)  # type: ignore[arg-type]
    gc.collect()
    assert (ended.kind, seen[0]()) == ("failed", None)


def test_its_snapshots_hold_no_group_although_the_trainer_was_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = object.__new__(TrainWorker)
    worker._status, worker._snapshots, worker._store = StatusRecorder(), Snapshots("host"), None

    def attempt(self: Any, assignment: RankAssignment) -> WorkerExit:
        self._snapshots._group = object()  # as `join` leaves it
        return WorkerExit("broken", "no room")

    monkeypatch.setattr(TrainWorker, "_attempt", attempt)
    worker._train(RankAssignment(1, 0, 1, ("", 0), "127.0.0.1", 1))
    assert worker._snapshots._group is None
