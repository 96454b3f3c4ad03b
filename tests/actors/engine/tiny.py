"""Model directories small enough to make in a test: random Llama weights, and a byte-level BPE trained on real
source.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 512
EOS = 0


def save_tokenizer(model_dir: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([argparse.__file__], trainer)
    tokenizer.save(str(model_dir / "tokenizer.json"))


def save_llama(model_dir: Path, max_shard_size: str = "50GB", **overrides: object) -> LlamaForCausalLM:
    """Random weights, wide enough that the top two logits are rarely close. Returns the model itself, the reference."""
    torch.manual_seed(7)
    shape: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**(shape | overrides))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # transformers starts these at 0 and 1, where mistakes do not show
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model.save_pretrained(model_dir, max_shard_size=max_shard_size)
    save_tokenizer(model_dir)
    return model


def save_adapter(path: Path, seed: int = 1, alpha: int = 8) -> Path:
    """A LoRA adapter of the tiny Llama's second layer, in PEFT's format."""
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    at = "base_model.model.model.layers.1.self_attn.q_proj"
    weights = {"A": torch.randn(4, 64, generator=generator), "B": torch.randn(64, 4, generator=generator)}
    save_file({f"{at}.lora_{name}.weight": w for name, w in weights.items()}, path / "adapter_model.safetensors")
    body = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(body))
    return path
