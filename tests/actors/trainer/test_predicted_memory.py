"""The planner's bytes are those that the trainer allocates: states exactly, activations within a tenth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.actors.trainer import trainer_ranks
from tests.actors.trainer.memory_ranks import Measured, measure

from raytide.actors.models.architecture import model_shape
from raytide.actors.models.families import architecture_of
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, OptimSpec, TrainSpec
from raytide.sizing.memory.estimate import Hardware, estimate
from raytide.sizing.workload import Strategy, TrainWorkload

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "n_embd": 64,
    "n_head": 8,
    "n_layer": 4,
    "n_positions": 64,
    "head_dim": 8,
    "eos_token_id": 0,
}
CONFIGS: dict[str, tuple[int, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama, adamw": (1, {"tie_word_embeddings": True}, {}),
    "untied, adafactor": (1, {}, {"optim": OptimSpec(name="adafactor")}),
    "qwen3, adamw8bit": (
        1,
        {"architectures": ["Qwen3ForCausalLM"]},
        {"optim": OptimSpec(name="adamw8bit")},
    ),
    "gpt2, lamb": (1, {"architectures": ["GPT2LMHeadModel"]}, {"optim": OptimSpec(name="lamb")}),
    "bf16, muon": (1, {}, {"precision": "bf16", "optim": OptimSpec(name="muon")}),
    "full checkpointing": (1, {}, {"memory": MemorySpec(checkpointing="full")}),
    "selective checkpointing": (1, {}, {"memory": MemorySpec(checkpointing="selective")}),
    "loss in chunks": (1, {}, {"memory": MemorySpec(loss_chunk=16)}),
    "sharded over 2": (2, {}, {}),
    "tensor 2, tied": (2, {"tie_word_embeddings": True}, {"layout": Parallelism(tensor=2)}),
    "context 2": (2, {}, {"layout": Parallelism(context=2)}),
    "pipeline 2, bf16": (2, {}, {"layout": Parallelism(pipeline=2), "precision": "bf16"}),
}


def spec_of(base: TrainSpec, config: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainSpec:
    fixed = {"model": ModelSpec(config={**BASE, **config}), "steps": 1, "micro_batch": 4, "global_batch": 8}
    return base.model_copy(update={**fixed, "export": False, **changes})


@pytest.fixture(scope="module")
def measured(
    make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, tuple[TrainSpec, list[Measured]]]]:
    root = tmp_path_factory.mktemp("memory")

    @cache
    def of(world: int) -> dict[str, tuple[TrainSpec, list[Measured]]]:
        specs = {
            name: spec_of(make_spec(root), config, changes)
            for name, (ranks, config, changes) in CONFIGS.items()
            if ranks == world
        }
        by_rank = trainer_ranks.run(
            world, str(root / f"meet-{world}"), measure, (list(specs.values()),), timeout_s=300.0
        )
        return {name: (spec, [each[at] for each in by_rank]) for at, (name, spec) in enumerate(specs.items())}

    return of


@pytest.mark.parametrize("name", CONFIGS)
def test_states_are_exact_and_activations_within_a_tenth(measured: Callable[..., Any], name: str) -> None:
    world = CONFIGS[name][0]
    spec, ranks = measured(world)[name]
    model = model_shape(architecture_of(spec.model.config, name))
    workload, strategy = TrainWorkload.from_spec(spec, model), Strategy.from_spec(spec, world)
    for rank, seen in enumerate(ranks):
        stage = rank if spec.layout.pipeline > 1 else 0
        found = estimate(workload, strategy, Hardware.cpu(), pipeline_rank=stage)
        if rank == stage:  # other ranks of an uneven shard have less
            assert (found.weights, found.gradients, found.optimizer) == (seen.weights, seen.gradients, seen.optimizer)
        assert found.micro_batch_activations == pytest.approx(seen.activations, rel=0.1), (rank, found, seen)
