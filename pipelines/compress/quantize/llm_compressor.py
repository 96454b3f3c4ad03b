"""Runs llm-compressor as a subprocess in a virtual environment of its own, because raytide and llm-compressor need
different versions of the same libraries.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess  # nosec B404
import sys
from pathlib import Path

import torch

from raytide.actors.models.families import architecture_of
from raytide.actors.models.loader import Weights
from raytide.actors.models.quantized.targets import check_groups, expert_patterns, quantized_linears
from raytide.actors.models.tokenizer_files import tokenizer_files
from raytide.actors.trainer.hf.weight_mapping import FamilyFormat, HfWeights
from raytide.core.config import environment
from raytide.core.errors import ConfigError, DataError, ScriptError
from raytide.core.io.storage import full_disk_is_an_error
from raytide.pipelines.compress.layer_files import copy_pooling, plain_config, publish, write_record
from raytide.pipelines.compress.recipe import CalibratedStep
from raytide.pipelines.compress.step_task import StepTask, calibration_windows

VERSION = "0.14.0.1"
_SCRIPT = Path(__file__).with_name("llm_compressor_script.py")
_MAKE = (
    "Make a venv for it (1.5 GB): `python -m venv VENV && VENV/bin/pip install "
    f"llmcompressor=={VERSION}`, and set llm_compressor in the recipe, or RAYTIDE_LLM_COMPRESSOR, to VENV/bin/python."
)
_LAST_LINES = 20
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_llm_compressor(task: StepTask) -> None:
    """Runs a gptq, awq or smoothquant step. A killed step starts again from its beginning.

    Raises ConfigError if llm-compressor's virtual environment is missing. Raises ScriptError if llm-compressor
    fails. The ScriptError contains the last part of llm-compressor's output.
    """
    step = task.step.gptq or task.step.awq or task.step.smoothquant
    assert step is not None  # as the recipe made sure
    source, config = task.source, plain_config(task.source)
    arch = architecture_of(config, str(source / "config.json"))
    HfWeights(source, arch)  # raises for tensors that are missing, stray or of another shape
    weights = Weights(source, torch.float32, torch.device("cpu"))
    root = FamilyFormat.from_names(arch, weights.names).root
    linears = quantized_linears(arch, root, step.skip)
    check_groups(step.group_size, weights.shape, linears)
    python = _python(task.recipe.llm_compressor)
    folder = task.target.with_name(f".{task.target.name}.{task.digest[:12]}.part")
    shutil.rmtree(folder, ignore_errors=True)
    with full_disk_is_an_error(str(task.target)):
        folder.mkdir(parents=True)
        asked = folder / "task.json"
        body = {
            "source": str(source.resolve()),
            "out": str(folder.resolve()),
            "tokens": calibration_windows(task.recipe, source),
            "ignore": ["lm_head", *sorted(quantized_linears(arch, root, ()) - linears), *expert_patterns(arch)],
            **_options(task.step.kind, step),
        }
        asked.write_text(json.dumps(body))
    _run(python, asked, task.step.kind)
    with full_disk_is_an_error(str(task.target)):
        asked.unlink()
        for name, file in tokenizer_files(source).items():
            shutil.copyfile(file, folder / name)
        copy_pooling(source, folder)
        _check(folder)
        write_record(folder, task.digest, {"step": task.step.kind})
        publish(folder, task.target)


def _options(method: str, step: CalibratedStep) -> dict[str, object]:
    return {
        "method": method,
        "bits": step.bits,
        "group": None if step.scheme == "w8a8" else step.group_size,
        "symmetric": step.symmetric,
        "activations": step.scheme == "w8a8",
        "strength": step.strength,
    }


def _python(given: str) -> str:
    python = given or environment("LLM_COMPRESSOR") or ""
    if not python:
        raise ConfigError("gptq, awq and smoothquant run llm-compressor, whose venv is not known.", hint=_MAKE)
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{python} is no program.", hint=_MAKE)
    probe = "import llmcompressor, transformers"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)  # nosec B603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{python} cannot import llm-compressor: {last}.", hint=_MAKE)
    return python


def _run(python: str, asked: Path, method: str) -> None:
    """Prints the program's output as it comes, and keeps its last part for the error."""
    last: list[str] = []
    environ = {**os.environ, **_OFFLINE}
    environ.pop("PYTHONPATH", None)  # its packages are those of its venv
    with subprocess.Popen(  # nosec B603
        [python, str(_SCRIPT), str(asked)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stderr.write(line)
                last = [*last, line.rstrip()][-_LAST_LINES:]
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ScriptError(
            f"llm-compressor's {method} ended with {process.returncode}:\n" + "\n".join(last),
            hint="Run the recipe again once that is solved.",
        )


def _check(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        raise DataError(f"llm-compressor wrote no model to {folder}.", hint=f"Use llmcompressor {VERSION}.")
