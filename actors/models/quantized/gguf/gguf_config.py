"""Reads the architecture of a GGUF file. The result has the fields of the `config.json` that the same model has on
Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raytide.actors.models.quantized.gguf.gguf_file import GgufFile
from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError

_TOKENS = "tokenizer.ggml.tokens"
_ENDS = frozenset({"<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"})
"""The texts of the tokens that end an answer of the families here."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The name of a tensor with a divisor for each frequency, with which files of Llama 3.1 scale their rotation."""

_YARN_FIELDS = {
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""The fields of yarn that llama.cpp's converter copies from a `config.json`, and their names there."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """The properties of an architecture's GGUF files. RoPE rotates elements in pairs. `permutes` is True if the files
    store the two elements of a pair next to each other.
    """

    architecture: str
    permutes: bool = False


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", permutes=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
}


def family_of(file: GgufFile) -> GgufFamily:
    """Returns the family of a GGUF file. Raises ConfigError if the file is not supported."""
    name = file.text("general.architecture")
    if name not in FAMILIES:
        raise ConfigError(
            f"{file.where}: architecture {shortened(name, 100)} is not supported.",
            hint=f"Supported in GGUF: {', '.join(FAMILIES)}. Others are read from Hugging Face directories.",
        )
    for field, most in {"split.count": 1, f"{name}.expert_count": 0}.items():
        if file.number(field, 0) > most:
            raise ConfigError(
                f"{file.where}: {field} {file.number(field)} is not supported.",
                hint="Merge the parts (llama-gguf-split --merge)." if most else "Use the Hugging Face directory.",
            )
    return FAMILIES[name]


def gguf_config(file: GgufFile) -> dict[str, object]:
    """Returns the fields that a `config.json` of the same model would have. `families.py` checks these fields like the
    fields of a real `config.json`.
    """
    family, name = family_of(file), file.text("general.architecture")

    def number(field: str, default: float | None = None) -> int | float:
        return file.number(f"{name}.{field}", default)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", int(hidden // max(1, heads)))
    positions = number("context_length")
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0] if embedding else number("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "dtype": "bfloat16",
        "eos_token_id": end_token_ids(file),
    }
    rotated = number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ConfigError(
            f"{file.where}: a rotation of {rotated} of {head_dim} elements is not supported.",
            hint="Use the Hugging Face directory.",
        )
    if (rope := _rope(file, number, positions)) is not None:
        config["rope_parameters"] = {"rope_theta": config["rope_theta"], **rope}
    if window := number("attention.sliding_window", 0):
        if family.architecture != "LlamaForCausalLM":
            raise ConfigError(f"{file.where}: sliding windows of {name} are not supported.", hint="Use another file.")
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def end_token_ids(file: GgufFile) -> list[int]:
    """Returns the tokens that end an answer: those that end a text, a turn, and a message with tool calls. As in
    llama.cpp, these are the tokens that the file names, and all that have the text of such a token: files seldom name
    more than one.
    """
    fields = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    named = [int(file.number(field)) for field in fields if field in file]
    tokens = file.texts(_TOKENS) if _TOKENS in file else []
    return list(dict.fromkeys([*named, *(index for index, token in enumerate(tokens) if token in _ENDS)]))


def _rope(file: GgufFile, number: Callable[..., int | float], positions: int | float) -> dict[str, object] | None:
    if _ROPE_FACTORS in file.tensors:
        tensor = file.tensors[_ROPE_FACTORS]
        if tensor.format != "F32":
            raise ConfigError(f"{file.where}: {_ROPE_FACTORS} is {tensor.format}, not F32.", hint="Use another file.")
        factors = np.frombuffer(file.data, np.float32, tensor.bytes // 4, tensor.start).tolist()
        fixed = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": positions, **fixed}
    name = file.text("general.architecture")
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    rope: dict[str, object] = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = number("rope.scaling.original_context_length", positions)
        for field, key in _YARN_FIELDS.items():
            if f"{name}.rope.scaling.{field}" in file:
                rope[key] = number(f"rope.scaling.{field}")
    return rope
