"""One step of a recipe, as passed to the step's implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytide.actors.models.families import read_architecture
from raytide.actors.quality.corpus import CorpusReader
from raytide.actors.quality.evaluate import model_directory
from raytide.actors.quality.scorers import tokenizer_of
from raytide.core.errors import ConfigError
from raytide.pipelines.compress.layer_files import LayerFiles
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


def calibration_windows(recipe: CompressRecipe, source: Path) -> list[list[int]]:
    """Returns the calibration text as lists of token ids. Raises DataError if the text is unreadable or too short."""
    if recipe.calibration is None:
        raise ConfigError("the step needs calibration text.", hint="Give `calibration: {path: ...}` in the recipe.")
    arch = read_architecture(source)
    reader = CorpusReader(tokenizer_of(source), arch.vocab_size, min(_WINDOW, arch.max_model_len))
    return [window.tokens for window in reader.windows(recipe.calibration)]
