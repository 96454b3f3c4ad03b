"""A pruned model regains what distillation gives back, and a killed chain goes on within its training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

from raytide.core.errors import ConfigError, ConflictError
from raytide.core.specs.data import DataSpec, TokenizerSpec
from raytide.pipelines.build import build
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.recipe import CompressRecipe
from raytide.pipelines.runners.inline import InlineRunner


def test_pruning_distilling_and_rounding_are_one_recipe(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=2)
    text = tmp_path / "text.txt"
    text.write_text(Path(json.__file__).read_text())
    file = TokenizerSpec(file=str(tmp_path / "model" / "tokenizer.json"), eos="<eos>")
    build(DataSpec(inputs=(str(text),), tokenizer=file, out=str(tmp_path / "data")), runner=InlineRunner())
    train: dict[str, object] = {
        "dataset": str(tmp_path / "data"),
        "steps": 150,
        "global_batch": 8,
        "seq_len": 32,
        "optim": {"lr": 0.003},
        "checkpoint_every": 50,
    }
    fields: dict[str, object] = {
        "model": str(tmp_path / "model"),
        "out": str(tmp_path / "out"),
        "calibration": {"path": str(text), "tokens": 500},
        "quality": {"corpora": {"json": {"path": json.decoder.__file__, "tokens": 400}}},
    }
    prune: dict[str, object] = {"prune": {"ffn": 0.6}}

    def recipe(*steps: object, out: str = "out") -> CompressRecipe:
        return CompressRecipe.parse({**fields, "out": str(tmp_path / out), "steps": steps}, where="recipe")

    bare = compress(recipe(prune, {"rtn": {}}, out="bare"))
    asked = recipe(prune, {"distill": {"train": train, "teacher": {"top_k": 64}}}, {"rtn": {}})

    class Killed(BaseException):
        pass

    def kill(what: str, done: int, of: int) -> None:
        if what.startswith("distill") and done == 101:  # the second save has waited for the first one
            raise Killed

    with pytest.raises(Killed):
        compress(asked, kill)
    steps = list[int]()
    card = compress(asked, lambda what, done, of: steps.append(done) if what.startswith("distill") else None)
    assert steps[0] > 50, "it went on from a checkpoint"
    assert steps[-1] == 150
    assert [each.kind for each in card.steps] == ["prune", "distill", "rtn"]
    assert {path.name for path in (tmp_path / "out" / "steps").iterdir()} == {"01-prune", "02-distill"}
    assert _kl(card.quality) < 0.9 * _kl(bare.quality)


def test_a_finished_distillation_is_another_one_once_its_data_have_changed(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    text, data = tmp_path / "text.txt", tmp_path / "data"
    file = TokenizerSpec(file=str(tmp_path / "model" / "tokenizer.json"), eos="<eos>")

    def build_from(source: str) -> None:
        shutil.rmtree(data, ignore_errors=True)
        text.write_text(Path(source).read_text())
        build(DataSpec(inputs=(str(text),), tokenizer=file, out=str(data)), runner=InlineRunner())

    build_from(json.__file__)
    train: dict[str, object] = {"dataset": str(data), "steps": 1, "global_batch": 2, "seq_len": 16}
    fields = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), "steps": [{"distill": {"train": train}}]}
    asked = CompressRecipe.parse(fields, where="recipe")
    first = compress(asked)
    assert compress(asked) == first
    build_from(json.decoder.__file__)
    with pytest.raises(ConflictError, match="has learnt from other data"):
        compress(asked)
    shutil.rmtree(data)
    assert compress(asked) == first, "a finished step does not need its data"


def _kl(quality: object) -> float:
    assert isinstance(quality, dict)
    return float(quality["metrics"]["kl"])


def test_the_recipe_s_own_fields_of_a_training_cannot_be_set() -> None:
    step = {"distill": {"train": {"dataset": "d", "steps": 1, "out": "x"}}}
    with pytest.raises(ConfigError, match="out cannot be set: the recipe gives them"):
        CompressRecipe.parse({"model": "m", "out": "o", "steps": [step]}, where="recipe")
