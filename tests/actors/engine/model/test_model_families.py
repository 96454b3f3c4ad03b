"""The forms in which model directories come: older configs, experts in one tensor or each in its own, and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.actors.engine.families import save_family
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raytide.actors.engine import LLM
from raytide.actors.models.components.rope import cos_sin
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConfigError, DataError

PROMPT = [5, 9, 17, 300, 41, 6, 77, 8] * 6
Config = dict[str, Any]


def older_form(config: Config) -> Config:
    """As transformers 4 wrote it."""
    new = config.pop("rope_parameters", {})
    config["torch_dtype"] = config.pop("dtype")
    if "full_attention" in new:
        config["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
        new = new["full_attention"]
    theta, kind = new.pop("rope_theta", None), new.pop("rope_type", "default")
    if theta is not None:
        config["rope_theta"] = theta
    if "partial_rotary_factor" in new:
        config["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    config["rope_scaling"] = None if kind == "default" else new | {"type": kind}
    if config["model_type"] in ("gemma2", "qwen2"):
        del config["layer_types"]
    if config["model_type"].startswith("gemma"):  # it was left out when it equalled the default of all models
        del config["tie_word_embeddings"]
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    return config


def rewrite(model_dir: Path, change: Callable[[Config], Config]) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "family",
    [
        "llama3-mqa",
        "llama-linear-tied",
        "qwen2-yarn-windows",
        "qwen3-moe",
        "mixtral",
        "gemma2",
        "gemma3",
        "phi3-longrope",
    ],
)
def test_the_config_of_transformers_4_means_the_same(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    now = read_architecture(tmp_path)
    rewrite(tmp_path, older_form)
    assert read_architecture(tmp_path) == now


REQUIRED = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": None}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True}),
        ("MixtralForCausalLM", {}),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}),
        ("Gemma2ForCausalLM", {}),
        ("Gemma3ForCausalLM", {}),
        ("Phi3ForCausalLM", {}),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 64}),
        ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    ],
)
def test_what_a_config_leaves_out_is_as_in_transformers(architecture: str, more: Config, tmp_path: Path) -> None:
    short, full = tmp_path / "short", tmp_path / "full"
    short.mkdir()
    required = {"vocab_size": 64} if architecture.startswith("GPT2") else REQUIRED
    config_class = getattr(transformers, architecture).config_class
    body = required | more | {"architectures": [architecture], "model_type": config_class.model_type, "eos_token_id": 3}
    (short / "config.json").write_text(json.dumps(body))
    config_class.from_pretrained(short, dtype="float32").save_pretrained(full)
    assert len((full / "config.json").read_text()) > 1.5 * len((short / "config.json").read_text())
    assert read_architecture(short) == read_architecture(full)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "truncate": False, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 1.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "default", "rope_theta": 5e5},
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
def test_every_rope_scaling_turns_as_in_transformers(rope: Config, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**REQUIRED, rope_parameters=dict(rope), architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    mine = cos_sin(read_architecture(tmp_path).ropes[0], 512)
    assert (mine[0] - cos[0]).abs().max() < 1e-4
    assert (mine[1][:, 8:] - sin[0, :, 8:]).abs().max() < 1e-4
    assert (mine[1][:, :8] + sin[0, :, :8]).abs().max() < 1e-4


def test_gemma3_counts_its_windows_when_it_names_no_layer_types(tmp_path: Path) -> None:
    save_family(tmp_path, "gemma3")
    rewrite(tmp_path, lambda config: config | {"layer_types": None, "sliding_window_pattern": 3})
    layers = read_architecture(tmp_path).layers
    assert [(layer.window, layer.rope) for layer in layers] == [(16, 1), (16, 1), (None, 0), (16, 1)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_in_one_tensor_are_read_like_experts_one_by_one(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    before, path = LLM(tmp_path).logits(PROMPT), tmp_path / "model.safetensors"
    weights = load_file(path)
    assert not any("gate_up_proj" in name for name in weights)
    save_file(
        fused(weights, ["w1", "w3", "w2"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]), path
    )
    assert torch.equal(LLM(tmp_path).logits(PROMPT), before)


def fused(weights: dict[str, torch.Tensor], parts: list[str]) -> dict[str, torch.Tensor]:
    """The layout that transformers 5 computes with."""
    whole = {
        name.replace("block_sparse_moe.gate", "mlp.gate"): w for name, w in weights.items() if "experts." not in name
    }
    for layer in range(3):
        experts = [
            name for name in weights if f"layers.{layer}." in name and name.endswith(f"experts.0.{parts[0]}.weight")
        ]
        for first in experts:
            at = [
                [first.replace("experts.0", f"experts.{i}").replace(parts[0], part) for part in parts] for i in range(6)
            ]
            gate_up = torch.stack([torch.cat((weights[gate], weights[up])) for gate, up, _ in at])
            whole[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = gate_up
            whole[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack([weights[down] for *_, down in at])
    return whole


def test_a_file_saved_without_the_head_needs_no_prefix(tmp_path: Path) -> None:
    """As gpt2 is on the hub."""
    save_family(tmp_path, "gpt2")
    before, path = LLM(tmp_path).logits(PROMPT), tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): weight for name, weight in load_file(path).items()}, path)
    assert torch.equal(LLM(tmp_path).logits(PROMPT), before)


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral-window")
    path = tmp_path / "model.safetensors"
    save_file({name: weight for name, weight in load_file(path).items() if name != "lm_head.weight"}, path)
    with pytest.raises(DataError, match=r"no weight lm_head\.weight"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": None}, "has no 'max_position_embeddings'"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"rope_parameters": [1.0]}, "rope_parameters is .*, not an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters has no 'factor'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "short_factor is .* 8 positive numbers",
        ),
        ({"partial_rotary_factor": 0.2}, "3 of 16 elements cannot be rotated in pairs"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"architectures": None}, r"architecture \(none\) is not supported"),
    ],
)
def test_a_wrong_field_is_named(change: Config, message: str, tmp_path: Path) -> None:
    save_family(tmp_path, "llama-linear-tied")
    rewrite(tmp_path, lambda config: config | change)
    with pytest.raises((ConfigError, DataError), match=message):
        read_architecture(tmp_path)


def test_an_index_without_its_map_lacks_the_weights(tmp_path: Path) -> None:
    save_family(tmp_path, "llama3-mqa")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match="no weight"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama3-mqa", {"hidden_act": "relu2"}, "activation relu2 is not supported.*gelu_pytorch_tanh"),
        ("llama3-mqa", {"quantization_config": {"bits": 4}}, "quantized weights"),
        ("gemma3", {"use_bidirectional_attention": True}, "not a causal decoder"),
        ("gpt2", {"add_cross_attention": True}, "not a causal decoder"),
        ("qwen2-yarn-windows", {"is_causal": False}, "not a causal decoder"),  # gte-Qwen2-7B-instruct
        ("gemma3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer type chunked_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "does not name 4 layers"),
        ("mixtral", {"num_experts_per_tok": 7}, "7 of 6 experts"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, change: Config, message: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    rewrite(tmp_path, lambda config: config | change)
    with pytest.raises((ConfigError, DataError), match=message):
        read_architecture(tmp_path)


def test_yarn_stretches_the_positions(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen2-yarn-windows")
    rewrite(tmp_path, lambda config: config | {"max_position_embeddings": 32})
    arch = read_architecture(tmp_path)
    assert arch.max_model_len == 128
    cos, sin = cos_sin(arch.ropes[0], 4)
    assert torch.allclose((cos**2 + sin**2).sqrt(), torch.tensor(arch.ropes[0].magnitude))
