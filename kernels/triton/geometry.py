"""The sequences of a step as tensors on the device, and the batch of single tokens that a CUDA graph reads.

The module does not need Triton. A `lens` tensor [B, 3] has three numbers for each sequence: the position of its first
token in the flat batch, the number of its new tokens, and the length of its context.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from raytide.kernels.core import PagedBatch

Tensor = torch.Tensor


@dataclass(slots=True)
class DecodeBatch(PagedBatch):
    """A batch with one new token for each sequence. Its tensors keep their addresses while their contents change, so a
    captured graph reads the next step from them.

    The lengths of the contexts are only in `lens_B3`. They may grow to `most_context`. `context_lens` is empty on
    purpose: an operator that reads it fails. Otherwise it would use the lengths of the captured step in every later
    step.
    """

    lens_B3: Tensor = field(kw_only=True)
    most_context: int = field(kw_only=True)

    @classmethod
    def allocate(cls, size: int, width: int, block_size: int, device: torch.device) -> DecodeBatch:
        """Returns a new batch of `size` sequences, each with at most `width` cache blocks."""
        lens_B3 = torch.ones(size, 3, dtype=torch.int32, device=device)
        lens_B3[:, 0] = torch.arange(size, device=device)
        return cls(
            query_lens=[1] * size,
            context_lens=[],
            block_tables_BM=torch.zeros(size, width, dtype=torch.int64, device=device),
            slots_T=torch.zeros(size, dtype=torch.int64, device=device),
            block_size=block_size,
            lens_B3=lens_B3,
            most_context=width * block_size,
        )

    def first(self, size: int) -> DecodeBatch:
        """Returns a batch of the first `size` sequences. It shares this batch's memory."""
        return DecodeBatch(
            query_lens=self.query_lens[:size],
            context_lens=[],
            block_tables_BM=self.block_tables_BM[:size],
            slots_T=self.slots_T[:size],
            block_size=self.block_size,
            lens_B3=self.lens_B3[:size],
            most_context=self.most_context,
        )


def longest_context(batch: PagedBatch, members: list[int]) -> int:
    """Returns the length of the longest context of these sequences. For a DecodeBatch, returns the greatest possible
    length.
    """
    if isinstance(batch, DecodeBatch):
        return batch.most_context
    return max(batch.context_lens[b] for b in members)


def lens_on_device(batch: PagedBatch) -> Tensor:
    """Returns the `lens` tensor [B, 3] in int32 (described at the top of this module), on the device of the block
    tables.
    """
    if isinstance(batch, DecodeBatch):
        return batch.lens_B3
    queries = np.array(batch.query_lens, np.int32)
    lens = np.stack((queries.cumsum() - queries, queries, batch.context_lens), 1).astype(np.int32)
    return torch.from_numpy(lens).to(batch.block_tables_BM.device, non_blocking=True)


def query_blocks(batch: PagedBatch, members: list[int], block_tokens: int) -> Tensor:
    """Divides the new tokens of these sequences into I blocks of `block_tokens`.

    Returns a tensor [I, 2] with two numbers for each block: the index of its sequence, and the index of its first token
    among the new tokens of the sequence.
    """
    device = batch.block_tables_BM.device
    if isinstance(batch, DecodeBatch):  # made on the device: a graph must not copy from the host's memory
        sequences = torch.arange(len(members), dtype=torch.int32, device=device)
        return torch.stack((sequences, torch.zeros_like(sequences)), 1)
    pairs = [(b, first) for b in members for first in range(0, batch.query_lens[b], block_tokens)]
    return torch.tensor(pairs, dtype=torch.int32).to(device, non_blocking=True)
