"""The persistent batch. The tokens and block table of each running sequence are rows of arrays, from which the inputs
of a step are gathered.

In each step, Python visits each sequence once. All work per token or per block is done in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from raytide.actors.engine.model.lora import LoraRows
from raytide.actors.engine.model.vision.encoder import ImageRows
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.kernels.core import PagedBatch

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """The inputs of one forward pass.

    `rows_R` lists the rows of the flat batch whose results are needed. A sequence that gets a next token needs the
    row of its last token, and one row for each token of its draft. These rows come first, sequence by sequence. Rows
    that the caller adds come after them.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    batch: PagedBatch
    rows_R: torch.Tensor
    loras: LoraRows | None = None
    images: ImageRows | None = None


class InputBatch:
    """The rows of the running sequences. A row is assigned at a sequence's first step and freed by `release`."""

    def __init__(self, max_running: int, max_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_len // block_size)
        self._tokens: Ints = np.zeros((max_running, max_len), np.int64)
        self._tables: Ints = np.zeros((max_running, max_blocks), np.int64)
        self._num_tokens = [0] * max_running
        self._num_blocks = [0] * max_running
        self._free = list(reversed(range(max_running)))
        self._row_of: dict[str, int] = {}
        self._block_size, self._device = block_size, device

    def release(self, seq: Sequence) -> None:
        """Frees a sequence's row. Does nothing if the sequence never ran."""
        row = self._row_of.pop(seq.seq_id, None)
        if row is not None:
            self._free.append(row)

    def build(self, chunks: list[ScheduledChunk]) -> StepInputs:
        rows = np.array([self._sync(chunk) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        lengths = [chunk.length for chunk in chunks]
        ends = list(accumulate(lengths))
        if ends[-1] == len(chunks):  # one token of each sequence
            row_T, positions_T = rows, starts
        else:
            # Flat positions: 0..T-1, shifted per sequence from its place in the batch to its place in its context.
            row_T = rows.repeat(lengths)
            positions_T = np.arange(ends[-1]) + (starts - ends + lengths).repeat(lengths)
        blocks_T, offsets_T = np.divmod(positions_T, self._block_size)
        slots_T = self._tables[row_T, blocks_T] * self._block_size + offsets_T
        contexts = [chunk.start + chunk.length for chunk in chunks]
        width = -(-max(contexts) // self._block_size)
        batch = PagedBatch(
            query_lens=lengths,
            context_lens=contexts,
            block_tables_BM=self._to_device(self._tables[rows, :width]),
            slots_T=self._to_device(slots_T),
            block_size=self._block_size,
        )
        ended = [(end, chunk) for end, chunk in zip(ends, chunks, strict=True) if chunk.yields_token]
        sampled = np.array(
            [row for end, chunk in ended for row in range(end - min(1 + len(chunk.draft), chunk.length), end)], np.int64
        )
        return StepInputs(
            self._to_device(self._tokens[row_T, positions_T]),
            self._to_device(positions_T),
            batch,
            self._to_device(sampled),
        )

    def _sync(self, chunk: ScheduledChunk) -> int:
        """Returns a sequence's row, updated with its new tokens and blocks. For this step, the draft's tokens follow
        the sequence's own.
        """
        seq = chunk.seq
        row = self._row_of.get(seq.seq_id)
        if row is None:
            row = self._row_of[seq.seq_id] = self._free.pop()
            self._num_tokens[row] = self._num_blocks[row] = 0
        known, total = self._num_tokens[row], len(seq.tokens)
        if known < total:
            self._tokens[row, known:total] = seq.tokens[known:]
            self._num_tokens[row] = total
        if chunk.draft:
            self._tokens[row, len(seq.tokens) : len(seq.tokens) + len(chunk.draft)] = chunk.draft
        known, total = self._num_blocks[row], len(seq.block_ids)
        if known < total:
            self._tables[row, known:total] = seq.block_ids[known:]
            self._num_blocks[row] = total
        return row

    def _to_device(self, values: Ints) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
