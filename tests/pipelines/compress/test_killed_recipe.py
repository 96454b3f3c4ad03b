"""A recipe whose process is killed leaves nothing that looks finished, and the next process goes on."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

from raytide.core.errors import ConflictError
from raytide.core.io.claim import Claim
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.recipe import CompressRecipe

KILLED = """
import os, signal, sys
from raytide.pipelines.compress.chain import compress
from raytide.pipelines.compress.recipe import CompressRecipe

what, at = sys.argv[2], int(sys.argv[3])

def kill(doing, done, of):
    if doing == what and done == at:
        os.kill(os.getpid(), signal.SIGKILL)

compress(CompressRecipe.model_validate_json(sys.argv[1]), kill)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> CompressRecipe:
    save_llama(tmp_path / "model")
    fields = {
        "model": str(tmp_path / "model"),
        "out": str(tmp_path / "out"),
        "steps": [{"prune": {"ffn": 0.6}}, {"rtn": {}}],
        "calibration": {"path": argparse.__file__, "tokens": 300},
    }
    return CompressRecipe.parse(fields, where="recipe")


def test_it_goes_on_after_the_last_whole_layer_and_gives_the_bytes_of_a_run_that_was_not_killed(
    recipe: CompressRecipe, tmp_path: Path
) -> None:
    for what, at in (("prune: files", 2), ("rtn: files", 3)):
        command = [sys.executable, "-c", KILLED, recipe.model_dump_json(), what, str(at)]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "out" / "model").exists()
    assert (tmp_path / "out" / "steps" / "01-prune" / "config.json").is_file()
    (partial,) = (tmp_path / "out").glob(".model.*.part")
    kept = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert len(kept) == 3
    compress(recipe)
    whole = recipe.model_copy(update={"out": str(tmp_path / "whole")})
    compress(whole)
    result = tmp_path / "out" / "model"
    assert {name: (result / name).stat().st_mtime_ns for name in kept} == kept
    for file in (tmp_path / "whole" / "model").glob("*.safetensors"):
        assert file.read_bytes() == (result / file.name).read_bytes()


def test_two_processes_do_not_write_to_one_folder(recipe: CompressRecipe, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    claim = Claim((str(tmp_path / "out"),))
    try:
        with pytest.raises(ConflictError):
            compress(recipe)
    finally:
        claim.release()


def test_a_finished_recipe_is_another_one_once_its_texts_have_changed(recipe: CompressRecipe, tmp_path: Path) -> None:
    own, held_out = tmp_path / "own.txt", tmp_path / "held_out.txt"
    for file, source in ((own, argparse), (held_out, subprocess)):
        file.write_text(Path(str(source.__file__)).read_text())
    fields = recipe.model_dump(mode="json", exclude_none=True) | {
        "calibration": {"path": str(own), "tokens": 300},
        "quality": {"corpora": {"held_out": {"path": str(held_out), "tokens": 100}}},
    }
    changed = CompressRecipe.parse(fields, where="recipe")
    first = compress(changed)
    assert compress(changed).quality == first.quality
    held_out.write_text("1 2 3 4 5 6 7 8 9 " * 50)
    second = compress(changed)
    assert second.quality != first.quality, "a gate judges the corpora of now"
    assert second.quality == compress(changed).quality
    own.write_text("9 8 7 6 5 4 3 2 1 " * 100)
    with pytest.raises(ConflictError, match=r"another recipe, or of another model or calibration text"):
        compress(changed)
