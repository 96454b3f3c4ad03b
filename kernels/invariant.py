"""Operators in plain torch that compute one row at a time, so that a row's result cannot depend on its batch.

Matrix products and sums choose their order of additions by the number of rows. Slow: for deterministic engines on
devices without better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from raytide.kernels import ref
from raytide.kernels.core import Activation, AttentionSpec, NormWeights, PagedBatch
from raytide.kernels.registry import register

Tensor = torch.Tensor

_PRIORITY = -10  # below the references, which are not invariant


@register("norm", "any", priority=_PRIORITY, invariant=True)
def norm(x_TN: Tensor, by: NormWeights) -> Tensor:
    return torch.cat([ref.norm(row, by) for row in x_TN.split(1)])


@register("add_norm", "any", priority=_PRIORITY, invariant=True)
def add_norm(x_TN: Tensor, delta_TN: Tensor, by: NormWeights) -> Tensor:
    return norm(x_TN.add_(delta_TN), by)


@register("linear", "any", priority=_PRIORITY, invariant=True)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


@register("experts", "any", priority=_PRIORITY, invariant=True)
def experts(gate_up_E2FN: Tensor, down_ENF: Tensor, kind: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    together = ref.experts(gate_up_E2FN, down_ENF, kind)

    def apply(x_TN: Tensor, chosen_TX: Tensor, weights_TX: Tensor) -> Tensor:
        rows = zip(x_TN.split(1), chosen_TX.split(1), weights_TX.split(1), strict=True)
        return torch.cat([together(*row) for row in rows])

    return apply


@register("attention", "any", priority=_PRIORITY, invariant=True)
def attention(batch: PagedBatch, spec: AttentionSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns attention that computes each token as its own sequence, so that results do not depend on the batch."""
    lens = list(zip(batch.query_lens, batch.context_lens, strict=True))
    contexts = [end for query, context in lens for end in range(context - query + 1, context + 1)]
    repeats = torch.tensor(batch.query_lens, device=batch.block_tables_BM.device)
    tables = batch.block_tables_BM.repeat_interleave(repeats, 0)
    alone = replace(batch, query_lens=[1] * len(contexts), context_lens=contexts, block_tables_BM=tables)
    return ref.attention(alone, spec)
