"""One step of a recipe, as passed to the step's implementation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.models.families import read_architecture
from raytide.actors.quality.corpus import CorpusReader
from raytide.actors.quality.evaluate import model_directory
from raytide.actors.quality.scorers import tokenizer_of
from raytide.core.errors import ConfigError, ConflictError, DataError, RaytideError
from raytide.core.io.storage import cloud_failures, open_url
from raytide.core.io.token_dataset import sha256_of
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.compress.layer_files import LayerFiles, read_record
from raytide.pipelines.compress.recipe import CompressRecipe, CompressStep, DistillStep

_WINDOW = 512
OnProgress = Callable[[str, int, int], None]
"""Called with the name of the present work, the amount done and the total."""


@dataclass(frozen=True, slots=True)
class StepTask:
    """One step of a recipe, with the model directories from which it reads and to which it writes."""

    recipe: CompressRecipe
    step: CompressStep
    parent: Path
    """The recipe's model, before any step."""
    source: Path
    target: Path
    digest: str
    on_progress: OnProgress

    def files(self) -> LayerFiles:
        return LayerFiles(self.target, self.digest)


def teacher_of(step: DistillStep, recipe: CompressRecipe) -> Path:
    """Returns the directory of a distillation's teacher. The default is the recipe's model."""
    return model_directory(str(step.teacher.get("teacher", recipe.model)))


def training_of(step: DistillStep, task: StepTask, out: Path) -> TrainSpec:
    """Returns the training run of a distillation."""
    fields: dict[str, object] = {
        "name": task.recipe.name,
        **step.train,
        "init_from": str(task.source),
        "out": str(out),
        "distill": {**step.teacher, "teacher": str(teacher_of(step, task.recipe))},
    }
    return TrainSpec.parse(fields, where=f"{task.recipe.name}: distill.train")


def data_digest(spec: TrainSpec) -> str:
    """Returns a hash of the data on which a run trains: the manifests of its datasets, or its conversations."""
    if spec.chat is None:
        return hashlib.sha256("".join(map(sha256_of, spec.datasets)).encode()).hexdigest()
    fs, path = open_url(spec.chat.file)
    try:
        with cloud_failures(spec.chat.file), fs.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {spec.chat.file}: {error}.", hint="Check chat.file.") from None


def check_data(step: DistillStep, task: StepTask) -> None:
    """Raises ConflictError if a finished distillation has learnt from data that has changed since. Data that cannot be
    read any more is not compared.
    """
    learnt = read_record(task.target).get("data")
    try:
        present = data_digest(training_of(step, task, task.target))
    except (RaytideError, OSError):
        return
    if learnt not in (None, present):  # records of earlier releases name no data
        raise ConflictError(
            f"{task.target} has learnt from other data than there is now.",
            hint="Choose another out, or remove it to make it again.",
        )


def calibration_windows(recipe: CompressRecipe, source: Path) -> list[list[int]]:
    """Returns the calibration text as lists of token ids. Raises DataError if the text is unreadable or too short."""
    if recipe.calibration is None:
        raise ConfigError("the step needs calibration text.", hint="Give `calibration: {path: ...}` in the recipe.")
    arch = read_architecture(source)
    reader = CorpusReader(tokenizer_of(source), arch.vocab_size, min(_WINDOW, arch.max_model_len))
    return [window.tokens for window in reader.windows(recipe.calibration)]
