"""Prompts computed whole, beside the schedule and with KV memory of their own for the time of a call: the logits of
every position.
"""

from __future__ import annotations

import torch

from raytide.actors.engine.model import Decoder
from raytide.kernels.core import PagedBatch

__all__ = ["WholePrompts"]

Tensor = torch.Tensor


class WholePrompts:
    """The caller bounds how many tokens come in one call: that is how long the running requests wait."""

    def __init__(self, model: Decoder, block_size: int, device: torch.device) -> None:
        self._model, self._block_size, self._device = model, block_size, device

    def logits(self, tokens: list[int]) -> Tensor:
        """float32 [T, V]: row t is what follows the first t + 1 tokens."""
        return self._model.head(self._hidden([tokens]))

    def _hidden(self, prompts: list[list[int]]) -> Tensor:
        """The last hidden states [T, N] of all prompts' tokens, one prompt after the other."""
        lengths = [len(prompt) for prompt in prompts]
        blocks = [-(-length // self._block_size) for length in lengths]
        width = max(blocks)
        tables_BM = torch.arange(len(prompts) * width, device=self._device).view(-1, width)
        first_slots = range(0, len(prompts) * width * self._block_size, width * self._block_size)
        slots = [
            slot for first, length in zip(first_slots, lengths, strict=True) for slot in range(first, first + length)
        ]
        batch = PagedBatch(
            query_lens=lengths,
            context_lens=lengths,
            block_tables_BM=tables_BM,
            slots_T=torch.tensor(slots, device=self._device),
            block_size=self._block_size,
        )
        ids_T = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        positions_T = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        cache = self._model.new_cache(tables_BM.numel(), self._block_size)
        return self._model.hidden(ids_T, positions_T, batch, cache, torch.arange(len(ids_T), device=self._device))
