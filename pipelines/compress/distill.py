"""Trains a model on its teacher's predictions, with raytide's trainer in this process."""

from __future__ import annotations

import shutil

from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.compress.layer_files import publish, write_record
from raytide.pipelines.compress.recipe import DistillStep
from raytide.pipelines.compress.step_task import StepTask, teacher_of


def run_distill(step: DistillStep, task: StepTask) -> None:
    """Trains and exports the student. A killed run resumes from its last checkpoint.

    For a larger distillation, submit a training job with a `distill` section. Such a job runs on a gang
    (docs/training.md).
    """
    folder = task.target.with_name(f".{task.target.name}.{task.digest[:12]}.part")
    fields: dict[str, object] = {
        "name": task.recipe.name,
        **step.train,
        "init_from": str(task.source),
        "out": str(folder),
        "distill": {**step.teacher, "teacher": str(teacher_of(step, task.recipe))},
    }
    spec = TrainSpec.parse(fields, where=f"{task.recipe.name}: distill.train")

    def on_step(result: StepResult) -> None:
        task.on_progress("distill: steps", result.step, spec.steps)

    train_local(spec, on_step=on_step)
    model = folder / "model"
    write_record(model, task.digest, {"step": "distill"})
    publish(model, task.target)
    shutil.rmtree(folder, ignore_errors=True)
