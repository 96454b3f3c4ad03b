"""The scheme that quantisation-aware training recorded in the model it exported, which `rtn` then writes."""

from __future__ import annotations

import json
from pathlib import Path

from raytide.actors.models.quantized.targets import QAT_RECORD
from raytide.core.errors import ConfigError, DataError
from raytide.core.specs.model import QatSpec
from raytide.pipelines.compress.recipe import CompressStep, RtnStep


def with_trained_scheme(step: CompressStep, source: Path) -> CompressStep:
    """Returns the step with what its source was trained for, or as it is if that is nothing.

    Raises ConfigError for a quantising step that would write other weights than those trained.
    """
    qat = read_qat(source) if step.quantizes else None
    if qat is None:
        return step
    if step.rtn is None:
        raise ConfigError(
            f"{source} was trained for {qat.scheme}, and {step.kind} would write other weights.",
            hint="Use `rtn: {}`, which writes the trained ones and needs no calibration.",
        )
    trained = RtnStep(scheme=qat.scheme, group=qat.group_size, symmetric=qat.symmetric, skip=qat.skip)
    for name in sorted(step.rtn.model_fields_set):
        asked, own = getattr(step.rtn, name), getattr(trained, name)
        if asked != own:
            raise ConfigError(
                f"rtn.{name} {asked} differs from the {own} that {source} was trained for.",
                hint=f"Leave {name} out: rtn takes what the training recorded.",
            )
    return CompressStep(rtn=trained)


def read_qat(folder: Path) -> QatSpec | None:
    """Returns the `qat` of the run that exported a directory; None if it had none."""
    file = folder / QAT_RECORD
    if not file.is_file():
        return None
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}.", hint="Export the run again.") from None
    return QatSpec.parse(body, where=str(file))
