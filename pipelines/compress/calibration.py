"""The windows of calibration text that steps look at."""

from __future__ import annotations

from pathlib import Path

from raytide.actors.models.families import read_architecture
from raytide.actors.quality.corpus import CorpusReader
from raytide.actors.quality.scorers import tokenizer_of
from raytide.core.errors import ConfigError
from raytide.pipelines.compress.recipe import CompressRecipe

_WINDOW = 512


def calibration_windows(recipe: CompressRecipe, source: Path) -> list[list[int]]:
    """Returns lists of token ids. Raises DataError for text that cannot be read or is too short."""
    if recipe.calibration is None:
        raise ConfigError("the step needs calibration text.", hint="Give `calibration: {path: ...}` in the recipe.")
    arch = read_architecture(source)
    reader = CorpusReader(tokenizer_of(source), arch.vocab_size, min(_WINDOW, arch.max_model_len))
    return [window.tokens for window in reader.windows(recipe.calibration)]
