"""Packed rows, mixtures and held-out evaluation on ranks: as in one process, whatever the layout and its changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.actors.trainer.conftest import RunRanks
from tests.actors.trainer.document_ranks import resized, train
from tests.actors.trainer.token_files import random_documents, write_documents

from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.data.mixture_dataset import create_sampler, open_tokens
from raytide.actors.trainer.data.packed_dataset import pairs_of
from raytide.actors.trainer.parallel.validate import validate
from raytide.actors.trainer.run_log.mfu import flops_per_token
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.types import StepResult
from raytide.core.clock import SystemClock
from raytide.core.errors import CheckpointError, ConfigError
from raytide.core.specs.train import TrainSpec

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"layout": {}},
    "replicated": {"layout": {"replicate": 2, "shard": 1}, "micro_batch": 1},
    "tensor": {"layout": {"tensor": 2}},
    "context": {"layout": {"context": 2}},
    "1f1b": {"layout": {"pipeline": 2}, "micro_batch": 2},
    "interleaved": {"layout": {"pipeline": 2, "schedule": "interleaved_1f1b"}, "micro_batch": 2},
}
ZERO_BUBBLE = {"layout": {"pipeline": 2, "schedule": "zbv_zero_bubble"}, "micro_batch": 2}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_documents(tmp_path / f"s{s}", random_documents(150, longest=40, seed=s)) for s in range(3)]


def spec_of(folders: list[Path], out: Path, **fields: Any) -> TrainSpec:
    sources = [{"dataset": str(folder), "weight": weight} for folder, weight in zip(folders, (5, 2, 1), strict=True)]
    phases = [{"from_step": 4, "weights": {"s0": 1, "s2": 2}}]
    return TrainSpec.model_validate(
        {
            "dataset": {"sources": sources, "phases": phases},
            "out": str(out),
            "model": {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "max_seq_len": 32},
            "optim": {"lr": 3e-3, "warmup_steps": 2, "eps": 1e-6},
            "steps": 6,
            "global_batch": 7,
            "micro_batch": 3,
            "seq_len": 32,
            "packing": "best_fit",
            "eval": {"fraction": 0.2, "every": 3, "batches": 2},
            "checkpoint_every": 100,
            "export": False,
            "collective_timeout_s": 60.0,
            **fields,
        }
    )


def same(one: list[tuple[float, float | None]], other: list[tuple[float, float | None]]) -> None:
    assert len(one) == len(other)
    for (loss, held_out), (other_loss, other_held_out) in zip(one, other, strict=True):
        assert abs(loss - other_loss) <= 5e-6
        assert (held_out is None) == (other_held_out is None)
        assert held_out is None or other_held_out is None or abs(held_out - other_held_out) <= 5e-6


def test_every_layout_trains_and_evaluates_packed_rows_as_one_process_does(
    folders: list[Path], tmp_path: Path, run_ranks: RunRanks
) -> None:
    specs = {name: spec_of(folders, tmp_path / name, **fields) for name, fields in LAYOUTS.items()}
    alone = run_ranks(1, train, {"alone": spec_of(folders, tmp_path / "alone")})[0]["alone"]
    assert [held_out is not None for _, held_out in alone] == [False, False, True, False, False, True]
    assert alone[-1][0] < alone[0][0]
    for rank in run_ranks(2, train, specs):
        for name in specs:
            same(rank[name], alone)


def test_a_zero_bubble_pipeline_trains_packed_rows_and_refuses_to_evaluate(
    folders: list[Path], tmp_path: Path, run_ranks: RunRanks
) -> None:
    alone = run_ranks(1, train, {"alone": spec_of(folders, tmp_path / "alone", eval=None)})[0]["alone"]
    for rank in run_ranks(2, train, {"z": spec_of(folders, tmp_path / "z", eval=None, **ZERO_BUBBLE)}):
        same(rank["z"], alone)
    arch = architecture_of(spec_of(folders, tmp_path / "z").model.hf_config(96, 0), "test")
    refused = spec_of(folders, tmp_path / "z", **ZERO_BUBBLE)
    with pytest.raises(ConfigError, match=r"eval with layout\.schedule zbv_zero_bubble"):
        validate(refused.layout, arch, refused)


def test_micro_batches_change_nothing(folders: list[Path], tmp_path: Path, run_ranks: RunRanks) -> None:
    specs = {str(size): spec_of(folders, tmp_path / str(size), micro_batch=size) for size in (1, 2, 7)}
    runs = run_ranks(1, train, specs)[0]
    same(runs["1"], runs["7"])
    same(runs["2"], runs["7"])


def test_four_three_and_four_ranks_see_the_samples_of_one(
    folders: list[Path], tmp_path: Path, run_ranks: RunRanks
) -> None:
    augment = {"masked_inputs": {"rate": 0.1, "token": 95}}
    fields = {"record_samples": True, "augment": augment, "eval": {"fraction": 0.2, "every": 2, "batches": 2}}
    alone = run_ranks(1, train, {"alone": spec_of(folders, tmp_path / "alone", **fields)})[0]["alone"]
    spec = spec_of(folders, tmp_path / "resized", **fields)
    same(run_ranks(4, resized, spec, [(4, 2), (3, 4), (4, 6)])[0], alone)
    seen: dict[int, list[int]] = {}
    for file in (tmp_path / "resized/samples").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            seen.setdefault(line["step"], []).extend(line["ids"])
    sampler = create_sampler(spec, open_tokens(spec))
    assert {step: sorted(ids) for step, ids in seen.items()} == {
        step + 1: sorted(sampler.ids(step).tolist()) for step in range(6)
    }


def test_a_resume_with_another_order_is_refused(folders: list[Path], tmp_path: Path) -> None:
    spec = spec_of(folders, tmp_path / "run")
    train_local(spec.model_copy(update={"steps": 2}))
    body = json.loads(spec.model_dump_json())
    heavier = json.loads(json.dumps(body))
    heavier["dataset"]["sources"][0]["weight"] = 6
    write_documents(tmp_path / "more/s1", random_documents(151, longest=40, seed=1))
    grown = json.loads(json.dumps(body).replace(str(folders[1]), str(tmp_path / "more/s1")))
    others = [heavier, grown, {**body, "document_masks": False}, {**body, "eval": None}, {**body, "seed": 1}]
    others.append({**body, "augment": {"masked_inputs": {"rate": 0.1, "token": 95}}})
    for other in others:
        with pytest.raises(CheckpointError):
            train_local(TrainSpec.model_validate(other))
    assert train_local(spec).steps == 6


def test_the_log_has_the_held_out_loss_and_its_perplexity(folders: list[Path], tmp_path: Path) -> None:
    train_local(spec_of(folders, tmp_path / "run", log_every=6, steps=6))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert all(math.isclose(line["eval_perplexity"], math.exp(line["eval_loss"])) for line in lines)
    resumed = RunLog(spec_of(folders, tmp_path / "run"), SystemClock())
    assert resumed.eval_loss == lines[-1]["eval_loss"]


def test_mfu_counts_the_pairs_that_attention_computes(folders: list[Path], tmp_path: Path) -> None:
    spec = spec_of(folders, tmp_path / "run", steps=1, eval=None, peak_tflops=1.0)
    results: list[StepResult] = []
    train_local(spec, on_step=results.append)
    data = open_tokens(spec)
    rows = data.rows(create_sampler(spec, data).ids(0))  # type: ignore[attr-defined]
    computed = sum(int(np.flatnonzero(row)[-1]) + 1 for row in rows.learnt)
    span = float(pairs_of(rows.documents).sum()) / computed
    arch = architecture_of(spec.model.hf_config(96, 0), "test")
    done = results[0]
    assert done.mfu is not None
    assert span < 0.9 * spec.seq_len
    assert done.mfu * done.step_s * 1e12 / computed == pytest.approx(flops_per_token(arch, span))
