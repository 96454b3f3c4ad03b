"""Every layout trains as one process does: loss, gradient norm, weights. Broken ones show that this would be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.actors.trainer import trainer_ranks
from tests.actors.trainer.layout_ranks import Case, Curve, curves

from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, ModelSpec, OptimSpec, TrainSpec

TOLERANCE = {"fp32": 5e-6, "bf16": 5e-3, "fp16": 1e-3}
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 64,
    "head_dim": 8,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "untied": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 8,
        "sliding_window": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "odd-vocabulary": {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "tie_word_embeddings": True},
}
OPTIM = OptimSpec(lr=3e-3, warmup_steps=2, eps=1e-6)
"""Its eps is larger than usual: Adam divides by it where a gradient is only rounding, as that of GPT-2's key biases."""
RUN = ("precision", "global_batch", "micro_batch", "memory")
Options = Mapping[str, Any]
"""The layout's options, except `family` and those of RUN."""

LAYOUTS: dict[str, tuple[int, Options]] = {
    "sharded, zero 3": (2, {}),
    "sharded, zero 2": (2, {"zero": 2}),
    "sharded, zero 1": (2, {"zero": 1}),
    "replicated": (2, {"replicate": 2, "shard": 1}),
    "tensor": (2, {"tensor": 2}),
    "tensor, untied": (2, {"tensor": 2, "family": "untied"}),
    "tensor, odd vocabulary": (2, {"tensor": 2, "family": "odd-vocabulary"}),
    "context": (2, {"context": 2}),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "1f1b": (2, {"pipeline": 2}),
    "interleaved 1f1b": (2, {"pipeline": 2, "schedule": "interleaved_1f1b"}),
    "looped bfs": (2, {"pipeline": 2, "schedule": "looped_bfs"}),
    "interleaved zero bubble": (2, {"pipeline": 2, "schedule": "interleaved_zero_bubble"}),
    "zbv": (2, {"pipeline": 2, "schedule": "zbv_zero_bubble"}),
    "dualpipe v": (2, {"pipeline": 2, "schedule": "dualpipe_v"}),
    "sharded, bf16": (2, {"precision": "bf16"}),
    "tensor, bf16": (2, {"tensor": 2, "precision": "bf16"}),
    "1f1b, bf16": (2, {"pipeline": 2, "precision": "bf16"}),
    "tensor, fp16": (2, {"tensor": 2, "precision": "fp16"}),
    "1f1b, fp16": (2, {"pipeline": 2, "precision": "fp16"}),
    "zbv, recomputed": (2, {"pipeline": 2, "schedule": "zbv_zero_bubble", "memory": MemorySpec(checkpointing="full")}),
    "tensor, recomputed": (2, {"tensor": 2, "memory": MemorySpec(checkpointing="selective")}),
    "tensor, qwen3": (2, {"tensor": 2, "family": "qwen3"}),
    "tensor, gpt2": (2, {"tensor": 2, "family": "gpt2"}),
    "tensor, moe": (2, {"tensor": 2, "family": "qwen3-moe"}),
    "context, gemma2": (2, {"context": 2, "family": "gemma2"}),
    "hybrid sharded": (4, {"replicate": 2, "micro_batch": 1}),
    "tensor beyond the kv heads": (4, {"tensor": 4}),
    "shard x tensor": (4, {"tensor": 2}),
    "replicate x tensor": (4, {"tensor": 2, "replicate": 2, "shard": 1}),
    "shard x context": (4, {"context": 2}),
    "replicate x context": (4, {"context": 2, "replicate": 2, "shard": 1}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "1f1b over four": (4, {"pipeline": 4}),
    "1f1b x shard": (4, {"pipeline": 2}),
    "1f1b x shard, zero 1": (4, {"pipeline": 2, "zero": 1}),
    "1f1b x replicate": (4, {"pipeline": 2, "replicate": 2, "shard": 1}),
    "interleaved zero bubble x shard": (4, {"pipeline": 2, "schedule": "interleaved_zero_bubble"}),
    "zbv x shard": (4, {"pipeline": 2, "schedule": "zbv_zero_bubble"}),
    "dualpipe v x shard": (4, {"pipeline": 2, "schedule": "dualpipe_v"}),
    "zbv x tensor": (4, {"pipeline": 2, "tensor": 2, "schedule": "zbv_zero_bubble"}),
    "1f1b x tensor, gpt2": (4, {"pipeline": 2, "tensor": 2, "family": "gpt2"}),
    "1f1b x tensor, qwen3": (4, {"pipeline": 2, "tensor": 2, "family": "qwen3"}),
    "1f1b x context, gemma2": (4, {"pipeline": 2, "context": 2, "family": "gemma2"}),
    "shard x tensor, gemma2": (4, {"tensor": 2, "family": "gemma2"}),
    "shard x tensor, moe": (4, {"tensor": 2, "family": "qwen3-moe"}),
    "a batch that does not divide": (4, {"pipeline": 2, "global_batch": 5}),
    "pipeline x shard x tensor": (8, {"pipeline": 2, "tensor": 2}),
}
BREAKS: dict[str, tuple[int, Options, str]] = {
    "split backward that frees weights": (
        4, {"pipeline": 2, "schedule": "zbv_zero_bubble"}, "weights freed under a split backward",
    ),
    "copies of a tensor-parallel model by torch's replicate": (
        4, {"tensor": 2, "replicate": 2, "shard": 1}, "copies by torch's replicate",
    ),
    "gradients divided by microbatches": (2, {"pipeline": 2}, "gradients scaled by torch"),
    "tied copies trained apart": (2, {"pipeline": 2}, "tied copies apart"),
    "mean for a sum": (2, {}, "mean for a sum"),
    "mask from the first key": (2, {"context": 2}, "mask not offset"),
    "last microbatch not reduced": (2, {"zero": 1}, "last microbatch not reduced"),
}  # fmt: skip


@pytest.fixture(scope="module")
def measure(make_spec: Callable[[Path], TrainSpec], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Curve]:
    """`measure(world, options, broken)`: what came out, on the first use of a world for all of its layouts at once."""
    root = tmp_path_factory.mktemp("layouts")

    def case(options: Options, broken: str = "") -> Case:
        run = {key: value for key, value in options.items() if key in RUN}
        layout = Parallelism(**{key: value for key, value in options.items() if key not in (*RUN, "family", "layers")})
        depth = {"num_hidden_layers": layers(options), "n_layer": layers(options)}
        model = ModelSpec(config=BASE | FAMILIES[options.get("family", "llama")] | depth)
        change = {"model": model, "optim": OPTIM, "steps": 12, "micro_batch": 3, "layout": layout}
        return Case(make_spec(root).model_copy(update=change | run), broken)

    @cache
    def all_of(world: int) -> dict[str, Curve]:
        cases = {f"{options}": case(options) for ranks, options in LAYOUTS.values() if ranks == world}
        cases |= {f"{options}{why}": case(options, why) for ranks, options, why in BREAKS.values() if ranks == world}
        if world == 1:
            cases = {alone(options): case(dict(plain(options))) for _, options in LAYOUTS.values()}
        meet = str(root / f"meet-{world}")
        by_rank = trainer_ranks.run(world, meet, curves, (list(cases.values()),), timeout_s=600.0)
        of_case = {name: [ranks[index] for ranks in by_rank] for index, name in enumerate(cases)}
        return {name: _joined(ranks, agree=not cases[name].broken) for name, ranks in of_case.items()}

    return lambda world, options, broken="": all_of(world)[alone(options) if world == 1 else f"{options}{broken}"]


def plain(options: Options) -> tuple[tuple[str, Any], ...]:
    """Returns all that one process needs to know."""
    run = tuple((key, options[key]) for key in (*RUN, "family") if key in options and key != "memory")
    return (*run, ("layers", layers(options)))


def layers(options: Options) -> int:
    """As many as the longest pipeline has stages, else two."""
    return int(options.get("layers", 4 if "pipeline" in options else 2))


def alone(options: Options) -> str:
    return str(plain(options))


def _joined(ranks: list[Curve], agree: bool = True) -> Curve:
    """One curve of all ranks, which must `agree`; a weight that several of them have must be one and the same."""
    weights: dict[str, Any] = {}
    for rank in ranks:
        assert rank.losses in ([], ranks[0].losses)
        for name, weight in rank.weights.items():
            assert np.array_equal(weights.setdefault(name, weight), weight) or not agree, name
    return Curve(ranks[0].losses, ranks[0].norms, weights)


def _apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(measure: Callable[..., Curve], name: str) -> None:
    world, options = LAYOUTS[name]
    one, many = measure(1, options), measure(world, options)
    tolerance = TOLERANCE[options.get("precision", "fp32")]
    assert one.losses[-1] < one.losses[0] - 0.2
    assert _apart(one.losses, many.losses) <= tolerance
    assert _apart(one.norms, many.norms) <= 20 * tolerance
    assert one.weights.keys() == many.weights.keys()
    for weight in one.weights if tolerance == TOLERANCE["fp32"] else ():
        assert np.abs(one.weights[weight] - many.weights[weight]).max() <= 1e-5, weight


@pytest.mark.parametrize("name", BREAKS)
def test_a_layout_without_its_safeguard_would_be_seen(measure: Callable[..., Curve], name: str) -> None:
    world, options, broken = BREAKS[name]
    one, many = measure(1, options), measure(world, options, broken)
    assert _apart(one.losses, many.losses) > 1e-4 or _apart(one.norms, many.norms) > 1e-2
