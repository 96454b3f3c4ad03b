"""llm-compressor is a program of another venv: the commands to make it are shown, and its failures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.actors.engine.tiny import save_llama

from raytide.actors.quality.evaluate import evaluate
from raytide.actors.quality.suite import HeldOutText, QualitySuite
from raytide.core.errors import ConfigError, ScriptError
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.quantize import llm_compressor_script
from raytide.pipelines.compress.recipe import CompressRecipe

REAL = os.environ.get("RAYTIDE_LLM_COMPRESSOR", "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recipe(model: Path, python: str, kind: str = "gptq", **step: object) -> CompressRecipe:
    fields = {
        "model": str(model),
        "out": str(model.parent / "out"),
        "steps": [{kind: step}],
        "calibration": {"path": argparse.__file__, "tokens": 1000},
        "llm_compressor": python,
    }
    return CompressRecipe.parse(fields, where="recipe")


def program(tmp_path: Path, body: str) -> str:
    """A python that has the packages, and runs `body` in place of the script."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {sys.executable} - "$2" <<"END"\n{body}\nEND\n')
    path.chmod(0o755)
    return str(path)


def test_without_its_venv_the_commands_to_make_one_are_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYTIDE_LLM_COMPRESSOR", raising=False)
    with pytest.raises(ConfigError, match="pip install llmcompressor=="):
        compress(recipe(model, ""))
    with pytest.raises(ConfigError, match="is no program"):
        compress(recipe(model, "/nowhere/python"))
    with pytest.raises(ConfigError, match=r"cannot import llm-compressor: .*No module named"):
        compress(recipe(model, sys.executable))


def test_the_end_of_a_failed_run_is_shown_and_nothing_is_left_as_a_model(model: Path, tmp_path: Path) -> None:
    python = program(tmp_path, 'print("calibrating")\nraise SystemExit("out of memory in layer 3")')
    with pytest.raises(ScriptError, match="out of memory in layer 3"):
        compress(recipe(model, python))
    assert not (tmp_path / "out" / "model").exists()


def test_it_is_given_token_ids_and_the_layers_that_stay(model: Path, tmp_path: Path) -> None:
    body = (
        "import json, shutil, sys\n"
        "task = json.load(open(sys.argv[1]))\n"
        f"json.dump(task, open({str(tmp_path / 'seen.json')!r}, 'w'))\n"
        "for name in ('config.json', 'model.safetensors'): shutil.copy(task['source'] + '/' + name, task['out'])\n"
    )
    card = compress(recipe(model, program(tmp_path, body), "smoothquant", scheme="w8a8", skip=["*.down_proj"]))
    task = json.loads((tmp_path / "seen.json").read_text())
    assert sum(map(len, task["tokens"])) > 1000
    assert all(isinstance(each, int) for each in task["tokens"][0])
    assert task["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3))]
    assert (task["method"], task["bits"], task["group"], task["activations"]) == ("smoothquant", 8, None, True)
    assert card.steps[0].kind == "smoothquant"
    assert not (tmp_path / "out" / "model" / "task.json").exists()
    assert (tmp_path / "out" / "model" / "tokenizer.json").is_file()


def test_a_temperature_without_sampling_does_not_end_a_finished_calibration(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Vicuna's and older Llama 2's files: transformers reads them, but does not save them."""
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}))
    library = ModuleType("llmcompressor")
    library.oneshot = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llmcompressor", library)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)  # the script replaces it
    monkeypatch.setattr(llm_compressor_script, "modifiers", lambda task: [])
    (tmp_path / "out").mkdir()
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"source": str(model), "out": str(tmp_path / "out"), "tokens": [[1, 2, 3]]}))
    llm_compressor_script.main(str(task))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_group_that_does_not_fit_is_refused_before_the_program_runs(model: Path) -> None:
    with pytest.raises(ConfigError, match="group of 48 does not divide"):
        compress(recipe(model, sys.executable, group=48))


@pytest.mark.skipif(not REAL, reason="RAYTIDE_LLM_COMPRESSOR names no venv with llm-compressor")
@pytest.mark.parametrize(
    ("kind", "scheme", "most_kl"), [("gptq", "w4a16", 1.0), ("awq", "w4a16", 1.0), ("smoothquant", "w8a8", 0.1)]
)
def test_the_engine_serves_what_it_wrote(kind: str, scheme: str, most_kl: float, model: Path, tmp_path: Path) -> None:
    compress(recipe(model, REAL, kind, scheme=scheme))
    suite = QualitySuite(
        parent=str(model), corpora={"code": HeldOutText(path=json.__file__, tokens=500)}, dtype="float32"
    )
    found = evaluate(str(tmp_path / "out" / "model"), suite).corpora["code"]
    assert found.kl is not None
    assert 0 < found.kl < most_kl
