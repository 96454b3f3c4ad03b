"""Reference operators in plain torch. They define the correct results on every device. `core.py` explains the shape
suffixes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from raytide.kernels.core import (
    Activation,
    AttentionSpec,
    HeadNorms,
    LinearInput,
    NormWeights,
    PagedBatch,
    QuantizedWeight,
    Rope,
)
from raytide.kernels.registry import register

Tensor = torch.Tensor


@register("norm", "any", priority=0)
def norm(x_TN: Tensor, by: NormWeights) -> Tensor:
    """Returns the norm of x over its last dimension, with statistics in float32.

    - `kind` "rms": x / rms(x) * weight
    - `kind` "layer": (x - mean) / std * weight + bias
    """
    if by.kind == "layer":
        return F.layer_norm(x_TN, by.weight.shape, by.weight, by.bias, by.eps)
    return _rms(x_TN, by.weight, by.eps)


@register("add_norm", "any", priority=0)
def add_norm(x_TN: Tensor, delta_TN: Tensor, by: NormWeights) -> Tensor:
    """Adds `delta_TN` to the residual stream `x_TN` in place, and returns the norm of the sum."""
    return norm(x_TN.add_(delta_TN), by)


@register("linear", "any", priority=0)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Returns the function x -> x @ weight.T + bias. Callers of this function may change its result in place. LoRA
    adapters do this.
    """
    return lambda x: F.linear(x, weight, bias)


INPUT_GROUP = 32
"""The most inputs of a row that share a scale when they are rounded to int8."""
SMALLEST_CODED = 2.0**-119
"""Inputs whose largest magnitude is below this have codes of 0, as 127 / it may be no float32."""


@register("quantized_linear", "any", priority=0)
def quantized_linear(weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> Callable[[Tensor], Tensor]:
    """Returns the function x -> x @ weight.dequantized().T + bias. Its result has x's dtype, and its sums are float32.

    With `input_as` "int8", the function first rounds x as `rounded` does.
    """
    dequantized_NK = weight.dequantized()

    def apply(x_TK: Tensor) -> Tensor:
        used = rounded(x_TK, weight.columns_K, weight.group_size) if input_as == "int8" else x_TK.float()
        out = F.linear(used, dequantized_NK, None if bias is None else bias.float())
        return out.to(x_TK.dtype)

    return apply


def rounded(x_TK: Tensor, columns_K: Tensor | None = None, group_size: int | None = None) -> Tensor:
    """Returns x after rounding to int8 by `input_codes`, as float32 values with columns in the model's order."""
    codes, scales = input_codes(x_TK, columns_K, group_size)
    back = (codes * scales).flatten(2)[..., : group_size or x_TK.shape[1]].flatten(1)
    return back if columns_K is None else torch.empty_like(back).index_copy_(1, columns_K, back)


def input_codes(x_TK: Tensor, columns_K: Tensor | None, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Returns x rounded to int8: codes [T, G, P, 32] in float32, and scales [T, G, P, 1]. Their product approximates x.

    The columns are taken in the order `columns_K` and divided into the G groups of a weight. Each group is divided into
    P parts of 32 columns, the last part padded with zeros. A part's scale is its largest magnitude / 127, so codes lie
    in -127 to 127. The scale is NaN if a number of the part is not finite. `_codes` has the details.
    """
    wide = x_TK.float() if columns_K is None else x_TK.float()[:, columns_K]
    size = group_size or wide.shape[1]
    parts = F.pad(wide.unflatten(1, (-1, size)), (0, -size % INPUT_GROUP)).unflatten(2, (-1, INPUT_GROUP))
    return _codes(parts)


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes in -127 to 127, and each last dimension's scale: its largest magnitude / 127.

    A code is the integer nearest to x * (127 / largest), where only the quotient is rounded to float32. The scale is
    NaN, and the codes are zeros, if a number is not finite.
    """
    largest = x.abs().amax(-1, keepdim=True)
    is_finite = largest.isfinite()
    quotient = torch.full_like(largest, 127) / largest  # 127 / largest would round twice
    inverse = torch.where(is_finite & (largest >= SMALLEST_CODED), quotient, 0.0)
    codes = torch.where(inverse > 0, (x.double() * inverse.double()).round(), 0.0).float()
    return codes, torch.where(is_finite, largest / 127, float("nan"))


@register("activate", "any", priority=0, invariant=True)
def activate(x_TF: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(x_TF)
    return F.gelu(x_TF, approximate="tanh" if kind == "gelu_tanh" else "none")


@register("activate_mul", "any", priority=0, invariant=True)
def activate_mul(gate_up_T2F: Tensor, kind: Activation) -> Tensor:
    """Returns activate(gate) * up, where gate and up are the two halves of the last dimension."""
    gate, up = gate_up_T2F.chunk(2, -1)
    return activate(gate, kind) * up


@register("experts", "any", priority=0)
def experts(gate_up_E2FN: Tensor, down_ENF: Tensor, kind: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function (x_TN, chosen_TX, weights_TX) -> y_TN. For each token it returns the weighted sum of its
    chosen experts' outputs.
    """

    def apply(x_TN: Tensor, chosen_TX: Tensor, weights_TX: Tensor) -> Tensor:
        y_TN = torch.zeros_like(x_TN)
        for expert in chosen_TX.unique().tolist():
            rows, ways = (chosen_TX == expert).nonzero(as_tuple=True)
            hidden = activate_mul(F.linear(x_TN[rows], gate_up_E2FN[expert]), kind)
            out = F.linear(hidden, down_ENF[expert]) * weights_TX[rows, ways, None]
            y_TN.index_add_(0, rows, out.to(y_TN.dtype))
        return y_TN

    return apply


@register("rope_write", "any", priority=0, invariant=True)
def rope_write(
    qkv_TAD: Tensor, rope: Rope | None, norms: HeadNorms | None, cache_2SKD: Tensor, slots_T: Tensor
) -> None:
    """Normalizes and rotates the query and key heads in place, then writes each token's keys and values into its cache
    slot.

    If the cache is int8, with shape [2, S, K, D + 4], keys and values are rounded by `rounded_heads`.
    """
    kv_heads = cache_2SKD.shape[2]
    heads = qkv_TAD.shape[1] - 2 * kv_heads
    q_THD, k_TKD = qkv_TAD[:, :heads], qkv_TAD[:, heads : heads + kv_heads]
    if norms is not None:
        q_THD.copy_(_rms(q_THD, norms.q_D, norms.eps))
        k_TKD.copy_(_rms(k_TKD, norms.k_D, norms.eps))
    if rope is not None:
        turned = qkv_TAD[:, : heads + kv_heads, : rope.cos_TR.shape[-1]]
        first, second = turned.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        turned.mul_(rope.cos_TR[:, None]).addcmul_(swapped, rope.sin_TR[:, None])
    kv_2TKD = qkv_TAD[:, heads:].unflatten(1, (2, kv_heads)).transpose(0, 1)
    cache_2SKD.index_copy_(1, slots_T, rounded_heads(kv_2TKD) if cache_2SKD.dtype == torch.int8 else kv_2TKD)


SCALE_BYTES = 4
"""The bytes of a head's scale: a float32 that follows its codes in an int8 KV cache."""


def rounded_heads(kv: Tensor) -> Tensor:
    """Returns each head as D int8 codes in -127 to 127, followed by the 4 bytes of the head's float32 scale.

    The scale is the head's largest magnitude / 127, or NaN if a number is not finite.
    """
    codes, scales = _codes(kv.float())
    return torch.cat((codes.to(torch.int8), scales.view(torch.int8)), -1)


def dequantized_heads(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of heads that `rounded_heads` has rounded."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (codes * scales).to(dtype)


@register("attention", "any", priority=0)
def attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function (q_THD, cache_2SKD) -> out_THD: causal attention of each sequence over its own context.

    An int8 cache must have the format that `rope_write` writes.
    """
    slots = [_slots(batch, b) for b in range(len(batch.query_lens))]

    def attend(q_THD: Tensor, cache_2SKD: Tensor) -> Tensor:
        outs, start = [], 0
        group = q_THD.shape[1] // cache_2SKD.shape[2]
        for query_len, slots_L in zip(batch.query_lens, slots, strict=True):
            q = q_THD[start : start + query_len].float()
            rows = cache_2SKD[:, slots_L]
            kv = dequantized_heads(rows, q_THD.dtype) if rows.dtype == torch.int8 else rows
            k, v = kv.float().repeat_interleave(group, 2)
            scores_HTL = torch.einsum("thd,lhd->htl", q, k) * spec.scale
            if spec.softcap is not None:
                scores_HTL = spec.softcap * torch.tanh(scores_HTL / spec.softcap)
            weights = scores_HTL.masked_fill(~_seen(query_len, len(slots_L), spec.window, q.device), float("-inf"))
            outs.append(torch.einsum("htl,lhd->thd", weights.softmax(-1), v))
            start += query_len
        return torch.cat(outs).to(q_THD.dtype)

    return attend


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _seen(query_len: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """Returns booleans [T, L]: for each of the context's last T tokens, the positions that it attends to."""
    last_T1 = torch.arange(context_len - query_len, context_len, device=device)[:, None]
    at_L = torch.arange(context_len, device=device)
    seen: Tensor = at_L <= last_T1
    return seen if window is None else seen & (at_L > last_T1 - window)


def _slots(batch: PagedBatch, b: int) -> Tensor:
    """Returns the cache slots of sequence b's context, in order."""
    offsets = torch.arange(batch.block_size, device=batch.slots_T.device)
    slots = (batch.block_tables_BM[b, :, None] * batch.block_size + offsets).flatten()
    return slots[: batch.context_lens[b]]
