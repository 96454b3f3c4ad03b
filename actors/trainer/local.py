"""Train in this process alone: the loop of the gang with a group of one, for notebooks and tests."""

from __future__ import annotations

from collections.abc import Callable

from raytide.actors.trainer import group
from raytide.actors.trainer.core import RunResult, StepResult
from raytide.actors.trainer.loop import Trainer
from raytide.actors.trainer.record import Record
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import RaytideError
from raytide.core.train_spec import TrainSpec


def train_local(
    spec: TrainSpec, *, on_step: Callable[[StepResult], None] = lambda result: None, clock: Clock | None = None
) -> RunResult:
    """Run `spec` to its end, going on from its latest checkpoint if it has one."""
    record = Record(spec, clock or SystemClock())

    def done(result: StepResult) -> None:
        record.step(result)
        on_step(result)

    try:
        with group.alone() as mine:
            trainer = Trainer(spec, mine)
            try:
                for error in trainer.restore():
                    record.event("skipped", why=str(error))
                record.steps = trainer.steps_done
                trainer.run(on_step=done)
            finally:
                trainer.close()
    except RaytideError as error:
        record.close("failed", str(error))
        raise
    return record.close("done")
