"""Runs a compression recipe. Each step reads a model directory and writes another. Finished steps are not run again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from raytide.actors.models.content import content_digest
from raytide.actors.models.quantized.targets import QAT_RECORD
from raytide.actors.quality.corpus import corpus_digest
from raytide.actors.quality.evaluate import evaluate, model_directory
from raytide.core.errors import ConfigError, ConflictError, DataError
from raytide.core.io.claim import Claim
from raytide.core.specs.model import QatSpec
from raytide.pipelines.compress.card import CompressionCard, StepCard, read_card, weight_bytes, write_card
from raytide.pipelines.compress.layer_files import digest_in, remove_others
from raytide.pipelines.compress.recipe import CompressRecipe, CompressStep, RtnStep
from raytide.pipelines.compress.step_task import OnProgress, StepTask, check_data, teacher_of


def compress(recipe: CompressRecipe, on_progress: OnProgress = lambda what, done, of: None) -> CompressionCard:
    """Runs the unfinished steps of a recipe, evaluates the result, and writes and returns its card.

    If a call is killed, the next call continues after the last finished step. An rtn, prune or mask step continues
    after its last finished layer. A distill step continues from its last checkpoint. Any other unfinished step
    starts from its beginning. Raises ConflictError while another process works on the same `out`, or if `out` has
    the result of another recipe, or of a distillation from other data.
    """
    parent = model_directory(recipe.model)
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)
    claim = Claim((str(out),))
    try:
        return _compress(recipe, parent, out, on_progress)
    finally:
        claim.release()


def _compress(recipe: CompressRecipe, parent: Path, out: Path, on_progress: OnProgress) -> CompressionCard:
    source, cards = parent, list[StepCard]()
    for number, asked in enumerate(recipe.steps, start=1):
        step = with_trained_scheme(asked, source)
        is_last = number == len(recipe.steps)
        target = out / "model" if is_last else out / "steps" / f"{number:02d}-{step.kind}"
        digest = _digest(recipe, step, source)
        target.parent.mkdir(exist_ok=True)
        remove_others(target, digest)
        found = digest_in(target)
        if found is not None and found != digest:
            raise ConflictError(
                f"{target} is the result of another recipe, or of another model or calibration text.",
                hint="Choose another out, or remove it to make it again.",
            )
        task = StepTask(recipe, step, parent, source, target, digest, on_progress)
        if found is None:
            _run(task)
        elif step.distill is not None:
            check_data(step.distill, task)
        cards.append(StepCard(step.kind, step.model_dump(mode="json", exclude_none=True), weight_bytes(target)))
        source = target
    before = read_card(source)
    if before is not None and before.belongs_to(recipe):
        return before
    quality = None
    if recipe.quality is not None:
        suite = recipe.quality.model_copy(update={"parent": str(parent)})
        quality = evaluate(str(source), suite, on_progress=on_progress)
    speed = None
    if recipe.speed:
        from raytide.pipelines.compress.speed import measure_decoding

        speed = measure_decoding(parent, source)
    card = CompressionCard.of(recipe, str(parent), weight_bytes(parent), tuple(cards), quality, speed)
    write_card(source, card)
    return card


def with_trained_scheme(step: CompressStep, source: Path) -> CompressStep:
    """Returns the step with the quantisation scheme for which the source model was trained. If the model was not
    trained for quantisation, or if the step does not quantise, returns the step unchanged.

    Raises ConfigError if the step asks for a different scheme, or for a method other than rounding. The result would
    then differ from the quantised weights of the training.
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
    """Returns the quantisation-aware training spec (`qat`) with which the model in this directory was trained. Returns
    None if its training run had no such spec.
    """
    file = folder / QAT_RECORD
    if not file.is_file():
        return None
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}.", hint="Export the run again.") from None
    return QatSpec.parse(body, where=str(file))


def _run(task: StepTask) -> None:
    """Runs one step. Each step imports its own modules only when it runs, so that quantisation does not load the
    trainer.
    """
    step = task.step
    if step.rtn is not None:
        from raytide.pipelines.compress.quantize.rtn import run_rtn

        run_rtn(step.rtn, task.source, task.files(), lambda at, of: task.on_progress("rtn: files", at, of))
    elif step.prune is not None:
        from raytide.pipelines.compress.prune.prune import run_prune

        run_prune(step.prune, task)
    elif step.mask is not None:
        from raytide.pipelines.compress.prune.prune import run_mask

        run_mask(step.mask, task)
    elif step.distill is not None:
        from raytide.pipelines.compress.distill import run_distill

        run_distill(step.distill, task)
    else:
        from raytide.pipelines.compress.quantize.llm_compressor import run_llm_compressor

        run_llm_compressor(task)


def _digest(recipe: CompressRecipe, step: CompressStep, source: Path) -> str:
    """Returns a hash of everything that decides the step's result."""
    text = recipe.calibration if step.reads_text else None
    body = {
        "step": step.model_dump(mode="json"),
        "input": content_digest(source),
        "config": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "teacher": None if step.distill is None else content_digest(teacher_of(step.distill, recipe)),
        "text": None if text is None else [text.model_dump(mode="json"), corpus_digest(text)],
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
