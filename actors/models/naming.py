"""The names of each family's weights in safetensors files, and the projections that are computed as one matrix product.
Names are relative to the model, or to a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytide.actors.models.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The weight names of a model family. The defaults are Llama's.

    If a projection has several names here, the file stores one weight for each name. These weights are stacked in
    the order of the names. If a projection has a single name, the weight in the file is already stacked. Its parts
    are then in the order of Llama's names.
    """

    root: str = "model."  # missing in files of a model without its head
    layer: str = "layers.{}."
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    head: str = "lm_head"  # not below the root
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    ffn_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_ffn_norm: str = ""
    # Experts: all in two tensors, as transformers 5 computes with them, or one by one, as on the hub.
    routers: tuple[str, ...] = ("mlp.gate",)
    fused_gate_up: str = "mlp.experts.gate_up_proj"
    fused_down: str = "mlp.experts.down_proj"
    expert_gate_up: tuple[str, str] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    transposed: bool = False  # GPT-2's Conv1D keeps [in, out]


NAMES: Mapping[str, Names] = {
    "llama": Names(),
    "gemma": Names(
        post_attention_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        post_ffn_norm="post_feedforward_layernorm",
    ),
    "gpt2": Names(
        root="transformer.",
        layer="h.{}.",
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        attention_out="attn.c_proj",
        ffn_norm="ln_2",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    ),
    "mixtral": Names(
        routers=("block_sparse_moe.gate", "mlp.gate"),
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    "phi3": Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
}


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear projection of a layer: the weights at `paths`, stacked. `rows` has the number of outputs of each path.
    All paths have `columns` inputs.
    """

    paths: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool


def projections(arch: Architecture, index: int) -> dict[str, Projection]:
    """Returns a layer's projections by name: `qkv` and `attention_out`. A layer that is not sparse also has `gate_up`
    and `down`. Without a gate, as in GPT-2, `gate_up` has only the up projection.
    """
    names, hidden, ffn = NAMES[arch.names], arch.hidden_size, arch.ffn_size
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim

    def projection(paths: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Projection:
        return Projection(paths, rows if len(paths) == len(rows) else (sum(rows),), columns, bias)

    attention = {
        "qkv": projection(names.qkv, (q, kv, kv), hidden, arch.qkv_bias),
        "attention_out": projection((names.attention_out,), (hidden,), q, arch.attention_out_bias),
    }
    if arch.layers[index].sparse:
        return attention
    return attention | {
        "gate_up": projection(names.gate_up, (ffn, ffn) if arch.gated_ffn else (ffn,), hidden, arch.ffn_bias),
        "down": projection((names.down,), (hidden,), ffn, arch.ffn_bias),
    }
