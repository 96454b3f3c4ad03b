"""A compress stage is a job that writes its card's numbers as metrics; gates fail their stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

from raytide.core.errors import ConfigError, DataError
from raytide.core.objects.job import JobKind
from raytide.core.specs.script import ScriptSpec
from raytide.workflows.spec import FlowSpec, StageSpec
from raytide.workflows.stages import compression
from raytide.workflows.stages.base import StageTask
from raytide.workflows.stages.configs import EvalSpec, check
from raytide.workflows.stages.evaluation import suite_metrics
from raytide.workflows.stages.runner import METRICS_FILE, job_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("def main() -> int:\n    return 0\n" * 20)
    return tmp_path


def spec_of(folder: Path, **gate: float) -> dict[str, object]:
    quality = {"corpora": {"code": {"path": str(folder / "text.txt")}}, "gate": gate}
    return {"model": str(folder / "model"), "steps": [{"rtn": {}}], "quality": quality}


def run(folder: Path, spec: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Does what the stage's job does."""
    stage = StageSpec.parse({"kind": "compress", "spec": {}}, where="stage")
    job = job_spec(StageTask("flow-small", stage, spec, str(folder / "out"), "run-1"), "")
    assert job.kind is JobKind.SCRIPT
    script = ScriptSpec.parse(job.config, where="job")
    assert script.command[:3] == ("python", "-m", "raytide.workflows.stages.compression")
    for name, value in script.env.items():
        monkeypatch.setenv(name, value)
    return compression.main(script.command[3])


def test_the_stage_s_metrics_are_bytes_and_quality(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, spec_of(folder, max_kl=1.0), monkeypatch) == 0
    metrics = json.loads((folder / "out" / METRICS_FILE).read_text())
    assert 0 < metrics["bytes"] < metrics["parent_bytes"]
    assert 0 < metrics["kl"] < 1
    assert (folder / "out" / "model" / "config.json").is_file()


def test_a_gate_fails_the_stage_of_the_compression_and_that_of_the_evaluation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, spec_of(folder, max_kl=1e-9), monkeypatch) == 1
    assert "the gate is not passed: kl is " in capsys.readouterr().err
    suite = {
        "parent": str(folder / "model"),
        "corpora": {"code": {"path": str(folder / "text.txt")}},
        "gate": {"max_ppl_change": -0.5},
    }
    spec = EvalSpec.parse({"model": str(folder / "out" / "model"), "suite": suite}, where="eval")
    with pytest.raises(DataError, match="the gate is not passed: ppl_change is "):
        suite_metrics(spec)


def test_a_flow_with_a_wrong_recipe_is_refused_before_anything_runs(folder: Path) -> None:
    stages = {
        "small": {"kind": "compress", "spec": {"model": str(folder / "model"), "steps": [{"rtn": {"schem": "w8a16"}}]}},
        "serve": {"kind": "serve", "spec": {"name": "small", "model": "${small.model}"}},
    }
    flow = FlowSpec.parse({"name": "f", "out": str(folder), "stages": stages}, where="flow")
    with pytest.raises(ConfigError, match="did you mean scheme"):
        check(flow)
