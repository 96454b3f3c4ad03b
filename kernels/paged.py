"""The batch that attention works on: many sequences' tokens end to end, their KV scattered over blocks of one cache.

Shape suffixes here and in the operators: T tokens of the step, B sequences, M blocks per sequence, S slots of the cache
(blocks x block size), H query heads, K KV heads, G = H / K, D head dim, L context length, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PagedBatch"]


@dataclass(slots=True)
class PagedBatch:
    """One step's geometry, the same for all layers.

    Sequence b owns the next `query_lens[b]` tokens; they are the last ones of its context of `context_lens[b]`
    tokens, whose KV lies in the blocks of row b of `block_tables_BM` (padded with any valid block). Token t's own KV
    goes to `slots_T[t]`.
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables_BM: torch.Tensor
    slots_T: torch.Tensor
    block_size: int
