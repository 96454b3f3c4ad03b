"""Trains in this process alone, with a process group of one rank. It is meant for notebooks and tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import RunResult, StepResult
from raytide.core.clock import SystemClock
from raytide.core.errors import ConfigError
from raytide.core.io.claim import Claim
from raytide.core.specs.train import TrainSpec


def train_local(spec: TrainSpec, *, on_step: Callable[[StepResult], None] = lambda result: None) -> RunResult:
    """Runs `spec` to its end, starting from its latest checkpoint. Raises ConflictError if another run is writing to
    `out`.
    """
    refuse_packages(spec)
    claim = Claim(spec.places)
    try:
        record = RunLog(spec, SystemClock(), claim=claim.token)
        return record.log_run(lambda: _train(spec, claim, record, on_step))
    finally:
        claim.release()


def refuse_packages(spec: TrainSpec) -> None:
    """Raises ConfigError for a spec with packages or an image. Packages and images cannot be applied to a process that
    is already running.
    """
    if spec.image is not None:
        raise ConfigError(
            f"{spec.name}: image is for jobs of a cluster; this process runs already.",
            hint=f"Start it in {spec.image}, and leave image out.",
        )
    if spec.pip:
        raise ConfigError(
            f"{spec.name}: pip is for jobs of a cluster; this process has its packages already.",
            hint=f"Install {', '.join(spec.pip)} here, and leave pip out.",
        )


def _train(spec: TrainSpec, claim: Claim, record: RunLog, on_step: Callable[[StepResult], None]) -> None:

    def done(result: StepResult) -> None:
        claim.check()
        record.step(result)
        on_step(result)

    with process_group.single_process() as group, closing(Trainer(spec, group, claim=claim.token)) as trainer:
        for error in trainer.restore():
            record.event("skipped", why=str(error))
        record.steps = trainer.steps_done
        trainer.run(on_step=done)
