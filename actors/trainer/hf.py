"""Weights in Hugging Face's names and layout, from the decoder's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES, Names

__all__ = ["to_hf"]

_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def to_hf(arch: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename, and stack or turn what the family's files keep so. `weights` has all of the decoder's parameters."""
    names = NAMES[arch.names]
    out = {f"{names.root}{names.embedding}.weight": weights["embedding.weight"]}
    if arch.learned_positions:
        out[f"{names.root}{names.positions}.weight"] = weights["positions.weight"]
    if not arch.tied_embeddings:
        out[f"{names.head}.weight"] = weights["head.weight"]
    _copy(out, weights, "norm", names.root + names.norm)
    for index in range(arch.num_layers):
        at, to = f"layers.{index}.", names.root + names.layer.format(index)
        for ours, theirs in _pairs(names):
            _copy(out, weights, at + ours, to + theirs)
        gate_up = ("ffn.gate_proj", "ffn.up_proj") if arch.gated_ffn else ("ffn.up_proj",)
        linears = [(_QKV, names.qkv), (("attention.o_proj",), (names.attention_out,))]
        if arch.layers[index].sparse:
            _copy(out, weights, at + "ffn.router", to + names.routers[0])
            _experts(out, weights, at + "ffn.", to, names)
        else:
            linears += [(gate_up, names.gate_up), (("ffn.down_proj",), (names.down,))]
        for ours_all, theirs_all in linears:
            _linear(out, weights, [at + each for each in ours_all], [to + each for each in theirs_all], names)
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _pairs(names: Names) -> list[tuple[str, str]]:
    """A layer's parameters that are kept as they are: ours, theirs."""
    return [
        ("input_norm", names.input_norm),
        ("attention.q_norm", names.query_norm),
        ("attention.k_norm", names.key_norm),
        ("post_attention_norm", names.post_attention_norm),
        ("ffn_norm", names.ffn_norm),
        ("post_ffn_norm", names.post_ffn_norm),
    ]


def _copy(out: dict[str, Tensor], weights: Mapping[str, Tensor], ours: str, theirs: str) -> None:
    for kind in ("weight", "bias"):
        if f"{ours}.{kind}" in weights:
            out[f"{theirs}.{kind}"] = weights[f"{ours}.{kind}"]


def _linear(
    out: dict[str, Tensor], weights: Mapping[str, Tensor], ours: list[str], theirs: list[str], names: Names
) -> None:
    turned: Callable[[Tensor], Tensor] = Tensor.t if names.transposed else Tensor.contiguous
    for kind in ("weight", "bias"):
        parts = [weights[f"{each}.{kind}"] for each in ours if f"{each}.{kind}" in weights]
        if not parts:
            continue
        stacked = parts if len(theirs) == len(parts) else [torch.cat(parts)]
        for name, tensor in zip(theirs, stacked, strict=True):
            out[f"{name}.{kind}"] = turned(tensor) if kind == "weight" else tensor


def _experts(out: dict[str, Tensor], weights: Mapping[str, Tensor], at: str, to: str, names: Names) -> None:
    """One by one, as on the hub."""
    gate_name, up_name = names.expert_gate_up
    for ours, theirs in (("gate_proj", gate_name), ("up_proj", up_name), ("down_proj", names.expert_down)):
        for expert, tensor in enumerate(weights[at + ours]):
            out[f"{to}{theirs.format(expert)}.weight"] = tensor
