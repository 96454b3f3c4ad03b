"""The training loop inside Ray Train: `TorchTrainer(train_loop_per_worker, train_loop_config=...)`. The config is the
spec as a dict.

Ray Train makes the process group and restarts workers. Raytide writes its usual files into the spec's `out`, which
every worker must be able to reach. It reports committed checkpoints to Ray Train and resumes from them. Checkpoints in
an object store (`out` or `checkpoint_dir`) stay there and are not reported.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.storage import CheckpointStorage, LocalStore, open_store
from raytide.actors.trainer.runners.local import refuse_packages
from raytide.actors.trainer.types import StepResult, scalar_metrics
from raytide.core.clock import SystemClock
from raytide.core.errors import CheckpointError
from raytide.core.io.claim import Claim
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from ray.train import Checkpoint

    from raytide.actors.trainer.distributed.process_group import ProcessGroup
    from raytide.actors.trainer.run_log.writer import RunLog
    from raytide.actors.trainer.trainer import Trainer


def train_loop_per_worker(config: Mapping[str, Any]) -> None:
    """Trains the spec in `config` to its end. Ray Train calls this function on each of its workers."""
    from raytide.actors.trainer.distributed import process_group

    spec = TrainSpec.parse(config, where="train_loop_config")
    refuse_packages(spec)
    group = process_group.adopt(spec.layout, timeout_s=spec.collective_timeout_s, stall_timeout_s=spec.stall_timeout_s)
    claim = group.run_on_all(lambda: Claim(spec.places) if group.is_first else None)
    try:
        _train(spec, group, claim)
    finally:
        if claim is not None:
            claim.release()


def _train(spec: TrainSpec, group: ProcessGroup, claim: Claim | None) -> None:
    from raytide.actors.trainer.run_log.writer import RunLog

    token = group.from_first("" if claim is None else claim.token)
    record = RunLog(spec, SystemClock(), claim=token) if group.is_first else None
    train = partial(_train_with, spec, group, token, record)
    train() if record is None else record.log_run(train)


def _train_with(spec: TrainSpec, group: ProcessGroup, token: str, record: RunLog | None) -> None:
    import ray.train

    from raytide.actors.trainer.trainer import Trainer

    ray_checkpoint = ray.train.get_checkpoint()
    bad = group.from_first(_place(ray_checkpoint, spec) if group.is_first and ray_checkpoint is not None else [])
    with closing(Trainer(spec, group, claim=token)) as trainer:
        rejected = [*bad, *trainer.restore()]
        if record is not None:
            record.steps = trainer.steps_done
            for error in rejected:
                record.event("skipped", why=str(error))
        reports = RayTrainReporter(trainer, record)
        trainer.run(on_step=reports.step)
        reports.send()


class RayTrainReporter:
    """Reports to Ray Train, from all workers at the same steps. A report is a barrier that waits up to two seconds for
    Ray Train's controller. For that reason every checkpoint is reported, but not every step.
    """

    def __init__(self, trainer: Trainer, record: RunLog | None) -> None:
        self.trainer, self.spec, self.record = trainer, trainer.spec, record
        self._last: StepResult | None = None
        self._reported = ""

    def step(self, result: StepResult) -> None:
        if self.record is not None:
            self.record.step(result)
        if self._last is not None and self._last.step % self.spec.checkpoint_every == 0:
            self.send()
        self._last = result

    def send(self) -> None:
        """Reports the latest step. Includes the newest checkpoint unless it has been reported already."""
        import ray.train

        if self._last is None:
            return
        self.trainer.wait_for_save()
        ray.train.report(
            {"step": self._last.step} | scalar_metrics(self._last.metrics_line()), checkpoint=self._new_checkpoint()
        )

    def _new_checkpoint(self) -> Checkpoint | None:
        import ray.train

        store = open_store(self.spec.checkpoint_url)
        checkpoint = _newest(store) if self.record is not None and isinstance(store, LocalStore) else None
        if checkpoint is None or checkpoint == self._reported:
            return None
        self._reported = checkpoint
        return ray.train.Checkpoint.from_directory(f"{store.url}/{checkpoint}")


def _place(ray_checkpoint: Checkpoint, spec: TrainSpec) -> list[CheckpointError]:
    """Copies Ray Train's checkpoint into the run's folder, unless that has a newer one. Returns the error of a bad
    copy.
    """
    store = open_store(spec.checkpoint_url)
    with ray_checkpoint.as_directory() as folder:
        source = LocalStore(Path(folder).parent)
        try:
            checkpoint = manifest.verify(source, Path(folder).name)
        except CheckpointError as error:
            return [error]
        newest, step = _newest(store), checkpoint.manifest.step
        if newest is None or (manifest.step_of(newest) or 0) < step:
            name = manifest.folder_name(step, uuid.uuid4().hex[:8])
            for file in checkpoint.manifest.files:
                with source.read(f"{checkpoint.name}/{file}") as old, store.write(f"{name}/{file}") as new:
                    shutil.copyfileobj(old, new)
            manifest.commit(store, name, checkpoint.manifest)
    return []


def _newest(store: CheckpointStorage) -> str | None:
    unfinished = manifest.unfinished_folders(store)
    return next((name for name in manifest.folders_newest_first(store) if name not in unfinished), None)
