"""GGUF files of tiny models, written by llama.cpp's `gguf` package, and small ones written byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.actors.engine.tiny import save_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedModel

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module in _NAMES:
        return f"{_NAMES[module]}.{suffix}"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}.{suffix}"


def side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns the rows of llama.cpp's converter: the halves of each head are interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def save_gguf(
    path: Path,
    model: PreTrainedModel,
    form: str | Mapping[str, str],
    *,
    kind: str = "llama",
    tokenizer: Path | None = None,
    **fields: Any,
) -> None:
    """Saves a model in one format (or in formats by the ends of names), and gives it the weights that were stored."""
    import gguf
    from gguf import quants

    config, writer = model.config, gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in fields.items():
        writer.add_key_value(name, *value) if isinstance(value, tuple) else writer.add_string(name, value)
    add_tokenizer(writer, tokenizer or path.parent)
    for name, parameter in dict(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        wanted = next((to for end, to in form.items() if end in name), "F32") if isinstance(form, Mapping) else form
        wanted = wanted if parameter.ndim == 2 else "F32"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = next((count for part, count in heads.items() if part in name and kind == "llama"), 0)
        values = side_by_side(parameter, permuted) if permuted else parameter
        stored, back = encoded(values.detach().float().numpy(), wanted, quants, gguf.GGMLQuantizationType)
        back_tensor = torch.from_numpy(back.copy())
        if permuted:
            rows = torch.arange(len(back_tensor))
            undone = torch.empty_like(back_tensor)
            undone[side_by_side(rows[:, None], permuted).flatten()] = back_tensor
            back_tensor = undone
        parameter.data.copy_(back_tensor)
        raw_dtype = None if wanted == "F32" else gguf.GGMLQuantizationType[wanted]
        writer.add_tensor(gguf_name(name), stored, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(values: np.ndarray, form: str, quants: Any, kinds: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the stored bytes and the values that the `gguf` package reads from them. It does not write K-quants:
    their blocks are random, with scales that make values of the usual size."""
    if form == "F32":
        return values, values
    if form in ("Q4_K", "Q6_K"):
        size = {"Q4_K": 144, "Q6_K": 210}[form]
        blocks = np.random.default_rng(values.shape[0]).integers(
            0, 256, (*values.shape[:-1], values.shape[-1] // 256, size)
        )
        blocks = blocks.astype(np.uint8)
        scale = np.full((*blocks.shape[:-1], 1), 2e-4 if form == "Q6_K" else 4e-4, np.float16).view(np.uint8)
        if form == "Q6_K":
            blocks[..., 208:210] = scale
        else:
            blocks[..., 0:2] = scale
            blocks[..., 2:4] = (scale.view(np.float16) * 7.5).view(np.uint8)
        stored = blocks.reshape(*values.shape[:-1], -1)
    else:
        stored = quants.quantize(values, kinds[form])
    return stored, quants.dequantize(stored, kinds[form]).astype(np.float32)


def add_tokenizer(writer: Any, folder: Path, splits: str = "gpt-2", special: Sequence[str] = ("<eos>",)) -> None:
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    writer.add_eos_token_id(tokens.index(special[0]))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: str | int | Sequence[str]) -> bytes:
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """Returns a tensor's entry; the first number of `shape` is the length of a row."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(fields: Sequence[bytes] = (), tensors: Sequence[bytes] = (), version: int = 3) -> bytes:
    """Returns a file's beginning, padded to where its tensors lie."""
    body = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join([*fields, *tensors])
    return body + bytes(-len(body) % 32)
