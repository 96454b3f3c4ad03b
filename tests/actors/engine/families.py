"""Tiny random models of every supported family, each with the features that set it apart turned on so that they bite:
windows shorter than the prompts, caps that bend, positions beyond the original length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tests.actors.engine.tiny import EOS, VOCAB, save_tokenizer

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}

# name: (transformers' class, what differs from `_COMMON`)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-mha-untied-biased": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3-mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 24, "rope_parameters": LLAMA3}),
    "llama-linear-tied": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, "tie_word_embeddings": True},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2-yarn-windows": (
        "Qwen2",
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3-tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "smollm3": (
        "SmolLM3",
        {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 24,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA_ROPES,
        },
    ),
    "gpt2": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "phi3-longrope": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 128,
            "sliding_window": 40,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 30}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-plain-sums": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 256}


def save_family(model_dir: Path, family: str, *, classifies: bool = False, **overrides: Any) -> Any:
    """Random weights in the form in which transformers writes them. Returns the model itself, the reference."""
    torch.manual_seed(11)
    base, differences = FAMILIES[family]
    common = {
        key: value
        for key, value in _COMMON.items()
        if base != "GPT2" or key[:4] not in ("hidd", "inte", "num_", "max_")
    }
    shape = common | (_GPT2 if base == "GPT2" else {}) | differences | overrides
    config = getattr(transformers, f"{base}{'Text' if base == 'Gemma3' else ''}Config")(**shape)
    config._attn_implementation = "eager"  # the others leave Gemma 2's soft-cap out
    head = "ForSequenceClassification" if classifies else "LMHeadModel" if base == "GPT2" else "ForCausalLM"
    model = getattr(transformers, base + head)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases start at 0 or 1, where mistakes do not show
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
        elif "experts" in name or "gate.weight" in name:  # some stay at 0 or 0.02
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(model_dir)
    save_tokenizer(model_dir)
    return model
