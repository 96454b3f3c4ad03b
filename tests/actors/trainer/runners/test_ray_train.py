"""The loop under Ray Train, on real Ray, and what of Ray Train's checkpoints it goes on from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.ray_fixture import own_ray

import raytide.core
from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.actors.trainer.run_log import history
from raytide.actors.trainer.runners import ray_train
from raytide.actors.trainer.runners.local import train_local
from raytide.core.specs.train import TrainSpec


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this file's own."""
    environment = {"PYTHONPATH": str(Path(raytide.core.__file__).parents[3]), "RAY_AUTH_MODE": "disabled"}
    with own_ray("127.0.76.1", cpus=3, runtime_env={"env_vars": environment}):
        yield


def losses(out: str) -> list[float]:
    return [line["loss"] for line in history.read(out).steps]


@pytest.mark.cluster
def test_two_workers_of_ray_train_follow_one_process_and_report_what_they_sealed(
    local_ray: None, spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # a report waits for the next one
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    spec = spec.model_copy(update={"steps": 6, "checkpoint_every": 3})
    result = TorchTrainer(
        ray_train.train_loop_per_worker,
        train_loop_config=spec.model_dump(mode="json"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
    ).fit()

    assert {"step", "loss", "tokens_per_s", "times/forward_backward"} <= result.metrics.keys()
    assert result.metrics["step"] == spec.steps
    paths = [Path(checkpoint.path) for checkpoint, _ in result.best_checkpoints]
    reported = [manifest.verify(LocalStore(path.parent), path.name).manifest.step for path in paths]
    assert reported == [3, 6]
    alone = spec.model_copy(update={"out": spec.out + "-alone"})
    train_local(alone)
    assert max(abs(a - b) for a, b in zip(losses(spec.out), losses(alone.out), strict=True)) <= 5e-6


class Given:
    """Ray Train's checkpoint, as far as it is used: a directory that may have to be fetched."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.path)


def test_a_new_cluster_goes_on_from_what_ray_train_kept_unless_the_run_has_newer(
    spec: TrainSpec, tmp_path: Path
) -> None:
    spec = spec.model_copy(update={"steps": 2, "checkpoint_every": 1})
    train_local(spec)
    store, kept = LocalStore(Path(spec.checkpoint_url)), tmp_path / "kept"
    newer, older = manifest.folders_newest_first(store)
    shutil.copytree(store.root / older, kept)
    given: Any = Given(kept)

    assert ray_train._place(given, spec) == []
    assert manifest.folders_newest_first(store) == [newer, older]
    shutil.rmtree(store.root)
    assert ray_train._place(given, spec) == []
    (placed,) = manifest.folders_newest_first(store)
    assert manifest.verify(store, placed).manifest.step == 1
    told: list[int] = []
    train_local(spec, on_step=lambda result: told.append(result.step))
    assert told == [2]

    shutil.rmtree(store.root)
    next(kept.glob("*.distcp")).write_bytes(b"torn")
    (error,) = ray_train._place(given, spec)
    assert "was altered" in str(error)
    assert not store.root.exists()
