"""raytide plan: trainings, endpoints and budgets, on the repository's cluster.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raytide as rt
from raytide.cli.app import app
from raytide.core.errors import CapacityError, NotFoundError, UsageError
from raytide.sdk.plan import PlanReport

CLUSTER = str(Path(__file__).parents[3] / "cluster.yaml")
LOCAL = str(Path(__file__).parents[3] / "platform/raytide/control/bootstrap/local.yaml")


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["plan", *args, "--cluster-file", CLUSTER])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_a_known_model_is_planned_best_first() -> None:
    lines = shown("llama-3-70b", "--details").splitlines()
    assert lines[0].split("\t") == [
        *("nodes", "layout", "step", "MFU", "time", "cost", "energy", "memory", "limited by")
    ]
    assert "h100x8.spot" in lines[1]
    assert any(line.startswith(("pipeline bubble\t", "activations\t")) for line in lines)


def test_json_has_the_bytes_and_seconds_of_every_plan() -> None:
    body = json.loads(shown("llama-3-8b", "--json", "--tokens", "1e9"))
    assert body["tokens"] == pytest.approx(1e9, rel=1e-3)
    assert body["model"]["parameters"] == 8_030_261_248
    best = body["plans"][0]
    assert sum(best["bytes"].values()) == pytest.approx(best["peak_bytes"], abs=10)
    assert sum(best["step_parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["usd"] == min(plan["usd"] for plan in body["plans"])


def test_a_training_file_is_planned_with_its_own_model(tmp_path: Path) -> None:
    spec = tmp_path / "train.yaml"
    spec.write_text(
        "name: mine\ndataset: missing\nout: out\nsteps: 100\nseq_len: 512\nprecision: bf16\nlayout: auto\ngang: auto\n"
        "model: {vocab_size: 32000, dim: 512, layers: 8, heads: 8}\n"
    )
    body = json.loads(shown(str(spec), "--json"))
    assert (body["model"]["name"], body["steps"]) == ("mine", 100)
    spec.write_text(spec.read_text().replace("vocab_size: 32000, ", "").replace("seq_len: 512", "seq_len: 256"))
    with pytest.raises(Exception, match=r"vocabulary is that of missing.*not here"):
        shown(str(spec))


def test_a_config_json_is_planned(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(shown(str(tmp_path), "--json", "--seq-len", "128"))["model"]["layers"] == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Exception, match=r"is not a model's config\.json"):
        shown(str(tmp_path))


def test_an_endpoint_is_planned_for_a_rate_and_an_slo() -> None:
    lines = shown("llama-3-8b", "--requests-per-s", "20", "--ttft-s", "1").splitlines()
    assert lines[0].startswith("replicas\teach\tslots")
    body = json.loads(shown("llama-3-8b", "--requests-per-s", "20", "--json"))
    assert set(body["plans"][0]["speed"]) == {"prefill_tps", "slots", "tpot_ms"}
    with pytest.raises(CapacityError, match="no node type serves llama-3-405b"):
        shown("llama-3-405b", "--requests-per-s", "1")


def test_a_budget_shows_every_law() -> None:
    lines = shown("--flops", "5.76e23", "--served-tokens", "1e12", "--unique-tokens", "1e11").splitlines()
    assert [line.split("\t")[0][:6] for line in lines] == ["by", "Besiro", *["Hoffma"] * 3, "Sardan", "Muenni"]
    assert lines[1].split("\t")[1] == "7.22e+10"
    money = json.loads(shown("--usd", "1000", "--json"))
    assert 1e19 < money["flops"] < 1e24
    assert json.loads(shown("--usd", "1000000", "--hours", "1", "--json"))["flops"] < money["flops"] * 100


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(NotFoundError, match="neither a file nor a known model"):
        shown("llama-9")
    with pytest.raises(UsageError, match="nothing to plan"):
        shown()
    with pytest.raises(CapacityError, match="no plan fits llama-3-405b: it needs") as error:
        shown("llama-3-405b", "--seq-len", "8192")
    assert error.value.hint


def test_the_sdk_shows_plans_as_a_table() -> None:
    report = rt.plan("llama-3-8b", cluster_file=CLUSTER, by="time")
    assert isinstance(report, PlanReport)
    assert report.best.hours == min(plan.hours for plan in report.search.plans)
    assert "h100x8" in report._repr_html_()
    small = rt.plan("llama-3-8b", cluster_file=LOCAL, tokens=1e6, seq_len=128, global_batch=8)
    assert small.best.device.is_cpu
