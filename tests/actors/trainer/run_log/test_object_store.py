"""A run whose `out` is in an object store: a real S3 server, in this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.actors.trainer.gang_processes import Run, losses
from tests.actors.trainer.pranks import HoldsBefore
from tests.actors.trainer.trainer_ranks import PRELOAD
from typer.testing import CliRunner

from raytide.actors.trainer.checkpoint.verify import verify
from raytide.actors.trainer.run_log import folder as run_folder
from raytide.actors.trainer.run_log import history, profiler
from raytide.actors.trainer.run_log.curve import CurveReader
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.runners.local import train_local
from raytide.cli.app import app
from raytide.core.errors import ConflictError
from raytide.core.io.claim import Claim, committing
from raytide.core.io.private_folder import private_folder
from raytide.core.io.storage import exists, open_url, read_bytes
from raytide.core.objects.gang import Shape
from raytide.core.specs.train import TrainSpec


@dataclass(frozen=True)
class Environment:
    """Gives a worker's process this test's environment: the forkserver has that of its own start."""

    values: tuple[tuple[str, str], ...]

    @classmethod
    def of_aws(cls) -> Environment:
        return cls(tuple((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))

    def __call__(self) -> None:
        os.environ.update(self.values)


@dataclass(frozen=True)
class Both:
    environment: Environment
    holds: HoldsBefore

    def __call__(self) -> None:
        self.environment()
        self.holds()


def train_until_killed(spec: TrainSpec, environment: Environment, step: int) -> None:
    environment()
    train_local(spec, on_step=lambda result: os.kill(os.getpid(), signal.SIGKILL) if result.step == step else None)


@pytest.fixture
def there(spec: TrainSpec, bucket: str) -> TrainSpec:
    changes = {"out": f"{bucket}/run", "checkpoint_every": 2, "steps": 6, "export": True, "record_samples": True}
    return spec.model_copy(update=changes)


def test_a_run_is_written_to_a_bucket_read_there_and_goes_on_from_there(
    spec: TrainSpec, there: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train_local(spec.model_copy(update={"steps": 6}))
    alone = train_local(spec.model_copy(update={"steps": 8}))
    first = train_local(there)
    assert first.model_dir == f"{there.out}/model"
    assert exists(f"{there.out}/model/model.safetensors")
    assert history.result(there.out) == first
    profiler.request(there.out, 2)
    again = train_local(there.model_copy(update={"steps": 8}))
    assert (again.steps, again.first_loss, again.loss) == (8, alone.first_loss, alone.loss)
    steps = history.read(there.out).steps
    assert [line["loss"] for line in steps] == [line["loss"] for line in history.read(spec.out).steps]
    assert CurveReader(there.out).read().steps == tuple(range(1, 9))
    assert [verdict.state for verdict in verify(there.out)] == ["whole", "whole"]
    assert read_bytes(f"{there.out}/samples/0.jsonl").count(b"\n") == 8
    assert exists(f"{there.out}/profile/steps-7-8/rank-0.json")
    assert not exists(f"{there.out}/{profiler.REQUEST}")
    assert not list(private_folder("runs").iterdir()), "the copies are removed"
    for command in (["metrics"], ["plot", "--output", str(tmp_path / "run.svg")], ["checkpoint", "verify"]):
        done = CliRunner().invoke(app, [*command, there.out], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "run.svg").exists()


def test_a_run_in_a_bucket_that_is_killed_has_all_its_steps_in_the_end(spec: TrainSpec, there: TrainSpec) -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=train_until_killed, args=(there, Environment.of_aws(), 5))
    process.start()
    process.join(240.0)
    assert process.exitcode == -signal.SIGKILL
    assert [line["step"] for line in history.read(there.out).steps] == [1, 2, 3, 4], "up to the last checkpoint"
    train_local(there)
    train_local(spec.model_copy(update={"steps": 6}))
    assert losses(there) == losses(spec)


def test_a_gang_whose_first_rank_dies_goes_on_in_the_bucket(spec: TrainSpec, there: TrainSpec, tmp_path: Path) -> None:
    changes = {"steps": 30, "snapshot_every": 0, "collective_timeout_s": 20.0}
    environment, holds = Environment.of_aws(), HoldsBefore(tmp_path, (12,))
    first = Both(environment, holds)
    run = Run(
        there.model_copy(update=changes),
        Shape(members=2, min_members=2, resources={"CPU": 1.0}),
        {0: [first, environment], 1: [first, environment]},
    )
    try:
        run.until_step(5)
        os.kill(run.pid(0), signal.SIGKILL)
        run.leases.take(0)
        run.leases.give(0)
        holds.open(12)
        result = run.result()
    finally:
        run.close()
    assert (result.steps, result.restarts) == (30, 1)
    assert len(run.events("recovered")) == 1
    train_local(spec.model_copy(update={"steps": 30}))
    assert losses(there) == pytest.approx(losses(spec), abs=1e-5)


def test_a_run_that_lost_its_claim_overwrites_nothing(there: TrainSpec) -> None:
    claim = Claim([there.out])
    folder = RunFolder(there.out, lambda: committing([there.out], claim.token))
    (folder.path / "metrics.jsonl").write_text("mine")
    folder.changed("metrics.jsonl")
    assert folder.flush()
    claim.release()
    with pytest.raises(ConflictError), committing([there.out], claim.token):
        pass
    (folder.path / "metrics.jsonl").write_text("no longer")
    folder.changed("metrics.jsonl")
    folder.close()
    assert read_bytes(f"{there.out}/metrics.jsonl") == b"mine"


def test_what_a_store_does_not_take_is_kept_and_uploaded_later(
    there: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "UPLOAD_EVERY_S", 0.01)
    folder = RunFolder(there.out)
    assert folder.store is not None
    publish = folder.store.publish
    monkeypatch.setattr(folder.store, "publish", lambda path, body: (_ for _ in ()).throw(OSError("unreachable")))
    (folder.path / "events.jsonl").write_text("{}\n")
    folder.changed("events.jsonl")
    assert not folder.flush()
    assert "unreachable" in folder.problem
    monkeypatch.setattr(folder.store, "publish", publish)
    folder.close()
    open_url(there.out)[0].invalidate_cache()
    assert (read_bytes(f"{there.out}/events.jsonl"), folder.problem) == (b"{}\n", "")


def test_a_file_that_is_stored_hides_no_other_that_is_not(there: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(there.out)
    assert folder.store is not None
    publish = folder.store.publish

    def refuses_events(path: str, body: bytes) -> None:
        if path == "events.jsonl":
            raise OSError("unreachable")
        publish(path, body)

    monkeypatch.setattr(folder.store, "publish", refuses_events)
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder.path / name).write_text("{}\n")
        folder.changed(name)
    assert not folder.flush()
    monkeypatch.setattr(folder.store, "publish", publish)
    assert folder.flush()
    folder.close()
