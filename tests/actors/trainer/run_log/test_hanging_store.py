"""A store that hangs, or that refuses to delete, delays no step of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import pytest
import torch
from botocore.exceptions import EndpointConnectionError

from raytide.actors.trainer.checkpoint.storage import UrlStore
from raytide.actors.trainer.run_log import folder as run_folder
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.run_log.profiler import REQUEST, Profiler
from raytide.actors.trainer.run_log.writer import StepLog
from raytide.actors.trainer.types import StepResult
from raytide.core.clock import VirtualClock
from raytide.core.errors import WaitTimeoutError
from raytide.core.io import claim as claims
from raytide.core.io.claim import Claim, committing
from raytide.core.io.storage import exists, open_url, read_bytes, write_bytes
from raytide.core.specs.train import TrainSpec


class HangingStore(UrlStore):
    """A store whose requests hang until `answers` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers, self.reads, self.removals = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
        self.may_delete = True

    def publish(self, path: str, body: bytes) -> None:
        assert self.answers.wait(60.0)
        super().publish(path, body)

    def remove_file(self, path: str) -> None:
        self.removals.release()
        assert self.answers.wait(60.0)
        if not self.may_delete:
            raise PermissionError("delete is denied")
        super().remove_file(path)

    @contextmanager
    def read(self, path: str) -> Iterator[BinaryIO]:
        self.reads.release()
        assert self.answers.wait(60.0)
        with super().read(path) as stream:
            yield stream


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSpec:
    monkeypatch.setattr(run_folder, "UPLOAD_EVERY_S", 0.001)
    out, short = f"memory://{tmp_path.name}/run", 0.01
    return TrainSpec(name="there", dataset="none", out=out, steps=3, checkpoint_every=1, collective_timeout_s=short)


def open_run(spec: TrainSpec) -> tuple[RunFolder, HangingStore]:
    folder = RunFolder(spec.out)
    folder.store = store = HangingStore(spec.out)
    store.answers.set()
    return folder, store


def ask(spec: TrainSpec, steps: int) -> None:
    write_bytes(f"{spec.out}/{REQUEST}", f'{{"steps": {steps}}}'.encode())


def test_no_step_waits_for_a_store_that_hangs(there: TrainSpec) -> None:
    ask(there, 2)
    folder, store = open_run(there)
    profiler, log = Profiler(None, folder, 0, torch.device("cpu")), StepLog(there, VirtualClock(0.0), folder)
    store.answers.clear()
    assert profiler.requested_steps() == 2
    profiler.begin(1, 2)
    log.add(StepResult(1, 3.0, 1e-3, 0.5, 64, 0.5, 0.0, world=2))  # a checkpoint is due
    profiler.end(2)
    assert profiler.requested_steps() == 0, "the request was handled, although the store still has it"
    assert exists(f"{there.out}/{REQUEST}")
    store.answers.set()
    folder.close()
    assert not exists(f"{there.out}/{REQUEST}")
    assert b'"loss": 3.0' in read_bytes(f"{there.out}/metrics.jsonl")
    assert exists(f"{there.out}/profile/steps-1-2/rank-0.json")


def test_a_store_that_hangs_gets_one_thread_and_its_files_stay_here(
    there: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, store = open_run(there)
    store.answers.clear()
    before = threading.active_count()
    for step in range(4):
        (folder.path / "metrics.jsonl").write_text(f"{step}")
        folder.changed("metrics.jsonl")
        assert not folder.flush(0.01)
    assert threading.active_count() == before + 1
    monkeypatch.setattr(run_folder, "STORE_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeoutError):
        folder.fetch("metrics.jsonl")
    folder.close()
    assert (folder.path / "metrics.jsonl").read_text() == "3"
    store.answers.set()
    assert folder.flush(60.0)
    assert read_bytes(f"{there.out}/metrics.jsonl") == b"3"


def test_a_request_is_found_while_the_run_goes_on(there: TrainSpec) -> None:
    folder, store = open_run(there)
    profiler = Profiler(None, folder, 0, torch.device("cpu"))
    assert profiler.requested_steps() == 0
    ask(there, 3)
    while store.reads.acquire(blocking=False):
        pass
    for _ in range(3):  # the first read may have begun before the request was written
        assert store.reads.acquire(timeout=60.0)
    assert profiler.requested_steps() == 3
    folder.close()


def test_a_request_that_the_store_does_not_delete_is_not_taken_again(there: TrainSpec) -> None:
    ask(there, 1)
    folder, store = open_run(there)
    store.may_delete = False
    profiler = Profiler(None, folder, 0, torch.device("cpu"))
    profiler.begin(1, profiler.requested_steps())
    profiler.end(1)
    for _ in range(3):
        assert store.removals.acquire(timeout=60.0)
    assert exists(f"{there.out}/{REQUEST}")
    assert profiler.requested_steps() == 0
    store.may_delete = True
    folder.close()
    assert not exists(f"{there.out}/{REQUEST}")


def test_uploads_go_on_after_a_store_was_away(there: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SETTLE_S", 0.0)
    claim = Claim([there.out], beat_s=1000.0)
    folder = RunFolder(there.out, partial(committing, [there.out], claim.token))
    (folder.path / "metrics.jsonl").write_text("1")
    with monkeypatch.context() as away:
        error = EndpointConnectionError(endpoint_url="https://s3")
        away.setattr(type(open_url(there.out)[0]), "cat_file", Mock(side_effect=error))
        folder.changed("metrics.jsonl")
        assert not folder.flush(5.0)
        assert "EndpointConnectionError" in folder.problem
    assert folder.flush(60.0)
    assert read_bytes(f"{there.out}/metrics.jsonl") == b"1"
    folder.close()
    claim.release()


def test_files_that_a_store_refuses_at_the_end_stay_here(
    there: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, store = open_run(there)
    (folder.path / "metrics.jsonl").write_text("1")
    monkeypatch.setattr(store, "publish", Mock(side_effect=OSError(5, "SlowDown")))
    folder.changed("metrics.jsonl")
    folder.close()
    assert (folder.path / "metrics.jsonl").read_text() == "1"
