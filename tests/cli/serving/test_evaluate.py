"""eval: the table, the JSON, and the exit code of the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.core.errors import ConfigError, UsageError

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("def main() -> int:\n    return 0\n" * 20)
    suite = f"corpora: {{code: {{path: {tmp_path}/text.txt}}}}\nparent: {tmp_path}/model\ngate: {{max_kl: 0.01}}\n"
    (tmp_path / "suite.yaml").write_text(suite)
    return tmp_path


def test_a_model_that_passes_is_shown_and_written(folder: Path) -> None:
    done = runner.invoke(
        app, ["eval", str(folder / "model"), str(folder / "suite.yaml"), "--out", str(folder / "out.json")]
    )
    assert done.exit_code == 0, done.output
    head, row = done.stdout.splitlines()
    assert head.split("\t")[:3] == ["CORPUS", "TOKENS", "PERPLEXITY"]
    assert row.split("\t")[4:] == ["+0.00%", "+0.0000 ± 0.0000", "0.0000", "0.0000", "100.0%"]
    written = json.loads((folder / "out.json").read_text())
    assert written["broken"] == []
    assert written["metrics"]["code_kl"] == written["corpora"]["code"]["kl"] == 0


def test_a_gate_that_is_not_passed_ends_with_1_and_says_which_limit(folder: Path) -> None:
    suite = folder / "suite.yaml"
    suite.write_text(suite.read_text().replace("max_kl: 0.01", "max_perplexity: 1.5"))
    done = runner.invoke(app, ["eval", str(folder / "model"), str(suite), "--json"])
    assert done.exit_code == 1
    assert "gate: perplexity is " in done.stderr
    assert len(json.loads(done.stdout)["broken"]) == 1


def test_a_misspelt_key_is_named(folder: Path) -> None:
    (folder / "suite.yaml").write_text("corpora: {a: {path: x}}\ngate: {max_k1: 1}\n")
    error = runner.invoke(app, ["eval", str(folder / "model"), str(folder / "suite.yaml")]).exception
    assert isinstance(error, ConfigError)
    assert "did you mean max_kl?" in str(error)


def test_a_folder_for_the_results_that_is_not_there_is_named_before_anything_runs(folder: Path) -> None:
    words = ["eval", "none", str(folder / "suite.yaml"), "--out", str(folder / "none" / "out.json")]
    error = runner.invoke(app, words).exception
    assert isinstance(error, UsageError)
    assert "no folder" in str(error)
