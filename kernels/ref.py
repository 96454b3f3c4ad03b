"""Reference operators in plain torch: the definition of right, on every device. Shape suffixes: see `paged.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from raytide.kernels.paged import PagedBatch
from raytide.kernels.registry import register

__all__ = ["attention", "kv_write", "linear", "rms_norm", "rope", "silu_mul"]

Tensor = torch.Tensor


@register("rms_norm", "any", priority=0)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean in float32 as transformers has it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@register("rope", "any", priority=0)
def rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotate, in place, the pairs (i, i + D/2) of each head. `sin` comes with its first half negated."""
    first, second = x_THD.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    x_THD.mul_(cos_T1D).addcmul_(swapped, sin_T1D)


@register("silu_mul", "any", priority=0)
def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the two halves of the last dimension."""
    gate, up = gate_up_T2F.chunk(2, -1)
    return F.silu(gate) * up


@register("linear", "any", priority=0)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function x -> x @ weight.T + bias."""
    return lambda x: F.linear(x, weight, bias)


@register("kv_write", "any", priority=0)
def kv_write(cache_2SKD: Tensor, kv_T2KD: Tensor, slots_T: Tensor) -> None:
    """Put each token's key and value into its slot."""
    cache_2SKD.index_copy_(1, slots_T, kv_T2KD.transpose(0, 1))


@register("attention", "any", priority=0)
def attention(batch: PagedBatch) -> Callable[[Tensor, Tensor], Tensor]:
    """A function (q_THD, cache_2SKD) -> out_THD: causal attention of each sequence over its own context, scale
    D^-0.5.
    """
    slots = [_slots(batch, b) for b in range(len(batch.query_lens))]

    def attend(q_THD: Tensor, cache_2SKD: Tensor) -> Tensor:
        outs, start = [], 0
        group = q_THD.shape[1] // cache_2SKD.shape[2]
        for query_len, slots_L in zip(batch.query_lens, slots, strict=True):
            q = q_THD[start : start + query_len].float()
            k, v = cache_2SKD[:, slots_L].float().repeat_interleave(group, 2)
            scores_HTL = torch.einsum("thd,lhd->htl", q, k) * q.shape[-1] ** -0.5
            first = len(slots_L) - query_len
            causal = torch.ones(query_len, len(slots_L), dtype=torch.bool, device=q.device).tril(first)
            weights = scores_HTL.masked_fill(~causal, float("-inf")).softmax(-1)
            outs.append(torch.einsum("htl,lhd->thd", weights, v))
            start += query_len
        return torch.cat(outs).to(q_THD.dtype)

    return attend


def _slots(batch: PagedBatch, b: int) -> Tensor:
    """The cache slots of sequence b's context, in order."""
    offsets = torch.arange(batch.block_size, device=batch.slots_T.device)
    slots = (batch.block_tables_BM[b, :, None] * batch.block_size + offsets).flatten()
    return slots[: batch.context_lens[b]]
