"""Trains a model on its teacher's predictions, with raytide's trainer in this process."""

from __future__ import annotations

import shutil

from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.pipelines.compress.layer_files import copy_pooling, publish, write_record
from raytide.pipelines.compress.recipe import DistillStep
from raytide.pipelines.compress.step_task import StepTask, data_digest, training_of


def run_distill(step: DistillStep, task: StepTask) -> None:
    """Trains and exports the student. A killed run resumes from its last checkpoint.

    For a larger distillation, submit a training job with a `distill` section. Such a job runs on a gang
    (docs/training.md).
    """
    folder = task.target.with_name(f".{task.target.name}.{task.digest[:12]}.part")
    spec = training_of(step, task, folder)
    data = data_digest(spec)  # a resumed run refuses changed data

    def on_step(result: StepResult) -> None:
        task.on_progress("distill: steps", result.step, spec.steps)

    train_local(spec, on_step=on_step)
    model = folder / "model"
    copy_pooling(task.source, model)
    write_record(model, task.digest, {"step": "distill", "data": data})
    publish(model, task.target)
    shutil.rmtree(folder, ignore_errors=True)
