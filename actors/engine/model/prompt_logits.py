"""The logits of every position of a prompt, for checks: computed whole, apart from the schedule, with temporary KV."""

from __future__ import annotations

import torch

from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.kernels.core import PagedBatch


def prompt_logits(model: PagedDecoder, tokens: list[int], block_size: int, device: torch.device) -> torch.Tensor:
    """Returns float32 logits [T, V]: row t follows the first t + 1 tokens. Running sequences wait meanwhile."""
    blocks = -(-len(tokens) // block_size)
    positions_T = torch.arange(len(tokens), device=device)
    batch = PagedBatch(
        query_lens=[len(tokens)],
        context_lens=[len(tokens)],
        block_tables_BM=torch.arange(blocks, device=device)[None],
        slots_T=positions_T,
        block_size=block_size,
    )
    cache = model.new_cache(blocks, block_size)
    return model.forward(torch.tensor(tokens, device=device), positions_T, batch, cache, positions_T)
