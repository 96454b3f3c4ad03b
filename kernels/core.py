"""The types that operators share.

Shape suffixes here and in the operators: T tokens of the step, N hidden size, B sequences, M blocks per sequence, S
slots of the cache (blocks x block size), A = H + 2K heads of a stacked qkv, H query heads, K KV heads, D head dim, L
context length, F feed-forward width, E experts, X experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Tensor = torch.Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMSNorm (`kind` "rms") or LayerNorm ("layer"). Gemma's 1 + weight is folded into `weight` at load."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head over its D numbers, before the rotation (Qwen3, Gemma 3)."""

    q_D: Tensor
    k_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """The step's rotation, gathered at the tokens' positions: pairs (i, i + R/2) of the first R numbers of a head.

    `sin_TR` comes with its first half negated, so that the rotation is x * cos + swapped(x) * sin. R is D unless the
    rotation is partial.
    """

    cos_TR: Tensor
    sin_TR: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The fixed parameters of an attention operator.

    `window` is the number of positions a token sees, itself included; scores become c * tanh(score / c) with
    `softcap` c.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class PagedBatch:
    """One step's geometry, the same for all layers.

    Sequence b owns the next `query_lens[b]` tokens; they are the last ones of its context of `context_lens[b]` tokens,
    whose KV is in the blocks of row b of `block_tables_BM` (padded with any valid block). Token t's own KV goes to
    `slots_T[t]`.
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables_BM: Tensor
    slots_T: Tensor
    block_size: int
