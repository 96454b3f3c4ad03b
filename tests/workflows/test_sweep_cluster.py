"""A sweep of 16 runs on four real nodes: ASHA ends most of them early and finds one that is nearly the best."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.workflows.bigram import losses

import raytide as rt
from raytide.core.objects.job import JobState
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner
from raytide.workflows.sweep.sampler import suggest
from raytide.workflows.sweep.spec import SweepSpec

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
STEPS = 100
STEP_S = 0.15
SWEEP = {
    "space": {
        "params.rate": {"low": 0.01, "high": 1000.0, "log": True},
        "params.momentum": {"choices": [0.0, 0.9]},
    },
    "sampler": "random",
    "trials": 16,
    "at_once": 4,
    "asha": {"first": 10, "factor": 4},
}


def test_asha_costs_at_most_45_percent_and_finds_a_run_within_2_percent_of_the_best(
    tide: rt.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepSpec.parse(SWEEP, where="sweep")
    drawn = [suggest(sweep, number, ()) for number in range(16)]
    finals = [list(losses(float(each["params.rate"]), float(each["params.momentum"]), STEPS))[-1][1] for each in drawn]
    assert max(finals) > 1.2 * min(finals), "the choice matters"

    stage = {
        "kind": "script",
        "spec": {
            "command": ["python", "bigram.py"],
            "params": {"rate": 1.0, "momentum": 0.0, "steps": STEPS, "step_s": STEP_S},
            "steps": STEPS,
        },
        "gang": {"cpus": 1, "spot": True},
        "sweep": SWEEP,
    }
    flow = {"name": "bigrams", "out": str(tmp_path / "out"), "stages": {"tune": stage}}
    run = tide.flow(flow, working_dir=Path(__file__).parent).wait(timeout_s=300.0)

    trials = [each for each in tide.jobs(limit=200) if each.view.job.spec.labels.get("flow") == "bigrams"]
    trials = [each for each in trials if "stage" in each.view.job.spec.labels]
    assert len(trials) == 16
    whole = [each for each in trials if each.refresh().state is JobState.SUCCEEDED]
    cost = sum(float(each.progress.get("step", 0)) for each in trials) / (16 * STEPS)
    found = min(float(each.progress["loss"]) for each in whole)
    with capsys.disabled():
        shown = f"cost {cost:.1%} of 16 whole runs, {len(whole)} whole, loss {found:.4f}, best {min(finals):.4f}"
        sys.stdout.write(f"\n{shown}\n")
    assert cost <= 0.45
    assert found <= 1.02 * min(finals)
    assert "16 of 16 trials" in run.stage("tune").result


def test_a_sweep_of_trainings_gives_the_model_of_its_best_trial(tide: rt.Client, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    tokenizer = TokenizerSpec(train=TrainTokenizer(vocab_size=320))
    build(
        DataSpec(inputs=(str(tmp_path / "a.txt"),), tokenizer=tokenizer, out=str(tmp_path / "data")),
        runner=InlineRunner(),
    )
    spec = {
        "dataset": str(tmp_path / "data"),
        "model": {"dim": 32, "layers": 1, "heads": 2, "max_seq_len": 64},
        "optim": {"warmup_steps": 2},
        "steps": "${params.steps}",
        "global_batch": 4,
        "seq_len": 32,
    }
    sweep = {
        "space": {"optim.lr": {"choices": [1e-5, 1e-2, 1e-4]}},
        "sampler": "grid",
        "trials": 3,
        "at_once": 2,
        "asha": {"first": 5, "factor": 3},
    }
    stages = {"tune": {"kind": "train", "spec": spec, "sweep": sweep}}
    flow = {"name": "tuned", "out": str(tmp_path / "out"), "params": {"steps": 20}, "stages": stages}
    run = tide.flow(flow).wait(timeout_s=300.0)
    stage = run.stage("tune")
    assert "3 of 3 trials" in stage.result
    assert "with optim.lr=0.01" in stage.result
    best = tide.job(stage.job)
    assert best.view.job.spec.config["optim"]["lr"] == 1e-2  # type: ignore[index]
    assert Path(str(best.progress["model"]), "config.json").is_file()
