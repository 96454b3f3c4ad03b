"""Layouts that cannot work are refused by name, before any rank builds anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.actors.trainer.parallel.test_layouts import BASE, FAMILIES, LAYOUTS, RUN

from raytide.actors.models.families import architecture_of
from raytide.actors.trainer.parallel.validate import validate
from raytide.core.errors import ConfigError
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, TrainSpec

DEPTH = {"num_hidden_layers": 4, "n_layer": 4}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"tensor": 3}, {}, "does not divide the model's 4 attention heads", "Choose from 1, 2, 4"),
    ({"tensor": 4}, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads", "Choose from 1, 2, 3, 6"),
    ({"tensor": 4}, {"intermediate_size": 50}, "50 feed-forward units", "Choose from 1, 2, 5"),
    ({"tensor": 4}, FAMILIES["qwen3-moe"] | {"moe_intermediate_size": 18}, "units of each expert", "1, 2, 3, 6, 9, 18"),
    ({"context": 3}, {}, "seq_len 32 does not divide into 6 pieces", "multiple of 6"),
    ({"context": 16, "tensor": 4}, {}, "seq_len 32 does not divide into 64 pieces", "multiple of 64"),
    ({"schedule": "gpipe"}, {}, "needs layout.pipeline above 1", "Leave"),
    ({"pipeline": 2, "stages": 2}, {}, "layout.stages is for", "Leave"),
    ({"pipeline": 4, "schedule": "zbv_zero_bubble"}, {}, "8 pipeline stages have only 4 layers", "Lower"),
    ({"pipeline": 2, "zero": 2}, {}, "once a step, as zero 1 does", "1 or 3"),
    ({"pipeline": 4, "shard": 2}, {}, r"gives a pipeline 3 sequences.*4 microbatches", "Raise global_batch"),
]

SPLIT = {"pipeline": 2, "schedule": "dualpipe_v"}
WITH_MEMORY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (SPLIT, {"checkpointing": "selective"}, "two halves, and selective checkpointing allows one"),
    (SPLIT, {"compile": True}, "two halves, and a compiled one is a single piece"),
    ({"pipeline": 2, "replicate": 2}, {"compression": "int8"}, "a tied embedding's gradient"),
]


@pytest.fixture(scope="module")
def some(make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return make_spec(tmp_path_factory.mktemp("validate"))


@pytest.mark.parametrize(("layout", "model", "problem", "hint"), REFUSED)
def test_what_cannot_work_is_refused_with_what_to_change(
    some: TrainSpec, layout: dict[str, Any], model: dict[str, Any], problem: str, hint: str
) -> None:
    arch = architecture_of(BASE | {"architectures": ["LlamaForCausalLM"]} | DEPTH | model, "model")
    with pytest.raises(ConfigError, match=problem) as refused:
        validate(Parallelism(**layout), arch, some)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(("layout", "memory", "problem"), WITH_MEMORY)
def test_memory_techniques_that_a_pipeline_breaks_are_refused(
    some: TrainSpec, layout: dict[str, Any], memory: dict[str, Any], problem: str
) -> None:
    arch = architecture_of(BASE | FAMILIES["llama"] | DEPTH, "model")
    with pytest.raises(ConfigError, match=problem):
        validate(Parallelism(**layout), arch, some.model_copy(update={"memory": MemorySpec(**memory)}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_trains_is_not_refused(some: TrainSpec, name: str) -> None:
    _, options = LAYOUTS[name]
    layout = Parallelism(**{key: options[key] for key in options if key not in (*RUN, "family", "layers")})
    validate(layout, architecture_of(BASE | FAMILIES[options.get("family", "llama")] | DEPTH, "model"), some)
