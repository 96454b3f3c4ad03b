"""A Llama-style decoder over a flat batch of tokens and a paged KV cache, made of the operators of `raytide.kernels`.

Projections that read the same input are stacked at load (qkv, gate and up), so that each is one product. Shape
suffixes: see `kernels/core.py`, and N hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raytide.actors.engine.architecture import Architecture
from raytide.actors.engine.loader import Weights
from raytide.kernels.core import AttentionSpec, Norm, PagedBatch, Rope
from raytide.kernels.registry import Ops

__all__ = ["Decoder"]

Tensor = torch.Tensor
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Norm
    qkv: Linear
    attention_out: Linear
    ffn_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and the forward pass. It keeps no state between calls: the KV cache is the caller's."""

    def __init__(self, arch: Architecture, weights: Weights, ops: Ops, max_len: int) -> None:
        self.arch, self._ops = arch, ops
        self._embedding = weights.get("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)
        self._layers = [_load_layer(arch, weights, ops, i) for i in range(arch.num_layers)]
        self._norm = Norm(weights.get("model.norm.weight", arch.hidden_size), None, arch.norm_eps)
        self._attention = AttentionSpec(scale=arch.head_dim**-0.5)
        if arch.tied_embeddings or "lm_head.weight" not in weights:
            self._head = ops.linear(self._embedding, None)
        else:
            self._head = ops.linear(weights.get("lm_head.weight", arch.vocab_size, arch.hidden_size), None)
        self._cos, self._sin = _rope_tables(arch, max_len, self._embedding)

    def new_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Zeroed KV per layer, [2, S, K, D]. Zeroed because padding is multiplied by 0, which leaves no NaN only if
        finite.
        """
        shape = (2, num_blocks * block_size, self.arch.num_kv_heads, self.arch.head_dim)
        return [self._embedding.new_zeros(shape) for _ in self._layers]

    @torch.inference_mode()
    def forward(
        self, ids_T: Tensor, positions_T: Tensor, batch: PagedBatch, cache: list[Tensor], rows_R: Tensor
    ) -> Tensor:
        """Write the KV of all tokens and return float32 logits [R, V] that follow the tokens `rows_R`."""
        return self.head(self.hidden(ids_T, positions_T, batch, cache, rows_R))

    @torch.inference_mode()
    def head(self, hidden_RN: Tensor) -> Tensor:
        """float32 logits [R, V] of last hidden states."""
        return self._head(hidden_RN).float()

    @torch.inference_mode()
    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, batch: PagedBatch, cache: list[Tensor], rows_R: Tensor
    ) -> Tensor:
        """Write the KV of all tokens and return the last hidden states [R, N], normed, of the tokens `rows_R`."""
        arch, ops = self.arch, self._ops
        attend = ops.attention(batch, self._attention)
        rope = Rope(self._cos[positions_T], self._sin[positions_T])
        heads, kv_heads = arch.num_heads, arch.num_kv_heads
        x_TN = self._embedding[ids_T]
        delta_TN = torch.zeros_like(x_TN)
        for layer, kv in zip(self._layers, cache, strict=True):
            qkv_TAD = layer.qkv(ops.add_norm(x_TN, delta_TN, layer.input_norm)).view(
                -1, heads + 2 * kv_heads, arch.head_dim
            )
            ops.rope_write(qkv_TAD, rope, None, kv, batch.slots_T)
            delta_TN = layer.attention_out(attend(qkv_TAD[:, :heads], kv).flatten(1))
            gate_up = layer.gate_up(ops.add_norm(x_TN, delta_TN, layer.ffn_norm))
            delta_TN = layer.down(ops.activate_mul(gate_up, "silu"))
        return ops.add_norm(x_TN[rows_R], delta_TN[rows_R], self._norm)


def _load_layer(arch: Architecture, weights: Weights, ops: Ops, index: int) -> _Layer:
    hidden, ffn = arch.hidden_size, arch.ffn_size
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    at = f"model.layers.{index}."

    def linear(names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        biases = weights.stack([f"{at}{name}.bias" for name in names], rows) if bias else None
        return ops.linear(weights.stack([f"{at}{name}.weight" for name in names], rows, columns), biases)

    qkv_names = [f"self_attn.{name}_proj" for name in "qkv"]
    return _Layer(
        input_norm=Norm(weights.get(at + "input_layernorm.weight", hidden), None, arch.norm_eps),
        qkv=linear(qkv_names, [q, kv, kv], hidden, arch.attention_bias),
        attention_out=linear(["self_attn.o_proj"], [hidden], q, arch.attention_bias),
        ffn_norm=Norm(weights.get(at + "post_attention_layernorm.weight", hidden), None, arch.norm_eps),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [ffn, ffn], hidden, arch.mlp_bias),
        down=linear(["mlp.down_proj"], [hidden], ffn, arch.mlp_bias),
    )


def _rope_tables(arch: Architecture, max_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [max_len, D], in the model's dtype as transformers has it; sin's first half negated, see the
    rope operator.
    """
    dim = arch.head_dim
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / arch.rope_theta**steps
    if arch.rope_scaling:
        frequencies = torch.tensor([arch.rope_scaling.apply(f) for f in frequencies.tolist()])
    angles = torch.outer(torch.arange(max_len).float(), frequencies)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return cos.to(like), sin.to(like)
