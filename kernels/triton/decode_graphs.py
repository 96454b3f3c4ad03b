"""Decode steps as captured graphs: one graph for each bucket of batch sizes, captured when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from raytide.kernels.core import PagedBatch
from raytide.kernels.triton.geometry import DecodeBatch
from raytide.kernels.triton.graph_capture import CapturedStep, GraphCapture

Tensor = torch.Tensor

_log = logging.getLogger(__name__)

_FINEST = 8  # buckets double up to here


def bucket_of(rows: int, most_rows: int) -> int:
    """Returns the number of rows to which a step of `rows` rows is padded, at most `most_rows`.

    - Up to 8 rows, it is a power of two.
    - Above that, it is a multiple of 8.
    - From 128 rows on, it is at most an eighth more than `rows`.
    """
    power = 1 << (rows - 1).bit_length()
    step = max(_FINEST, power // 16)
    bucket = power if rows <= _FINEST else -(-rows // step) * step
    return min(bucket, most_rows)


class DecodeGraphs:
    """Runs `forward` as a captured graph if each sequence of the step adds one token.

    `forward` is (ids_T, positions_T, batch) -> logits [T, V]. A step is padded to its bucket with rows that read and
    write only `dummy_block`, a block of the cache that no sequence owns. A graph uses the weights and the cache that
    existed at its capture. After either is replaced, call `clear`.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, DecodeBatch], Tensor],
        capture: GraphCapture,
        *,
        most_rows: int,
        table_width: int,
        block_size: int,
        dummy_block: int,
        device: torch.device,
    ) -> None:
        self._forward, self._capture, self._pool = forward, capture, capture.new_pool()
        self._most_rows, self._dummy_block = most_rows, dummy_block
        self._ids_T = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._ids_T)
        self._batch = DecodeBatch.allocate(most_rows, table_width, block_size, device)
        self._steps: dict[int, CapturedStep] = {}
        self._is_broken = False

    def clear(self) -> None:
        """Drops all graphs. Each graph is captured again when it is needed."""
        self._steps.clear()
        self._is_broken = False

    @torch.inference_mode()
    def run(self, ids_T: Tensor, positions_T: Tensor, batch: PagedBatch) -> Tensor | None:
        """Returns the logits [T, V], which are valid until the next call. Returns None if the step cannot run as a
        graph.

        A step cannot run as a graph if a sequence adds more than one token, if the batch is too large, or if the
        capture has failed. The caller must run such a step itself.
        """
        rows = len(batch.query_lens)
        if self._is_broken or rows > self._most_rows or ids_T.shape[0] != rows:
            return None
        self._fill(ids_T, positions_T, batch)
        bucket = bucket_of(rows, self._most_rows)
        if bucket not in self._steps:
            try:
                self._steps[bucket] = self._captured(bucket)
            except RuntimeError as error:
                self._is_broken = True
                _log.warning("decode steps run without graphs, they could not be captured: %s", error)
                return None
        step = self._steps[bucket]
        step.replay()
        return step.out[:rows]

    def _captured(self, bucket: int) -> CapturedStep:
        ids_T, positions_T, batch = self._ids_T[:bucket], self._positions_T[:bucket], self._batch.first(bucket)
        return self._capture.capture(lambda: self._forward(ids_T, positions_T, batch), self._pool)

    def _fill(self, ids_T: Tensor, positions_T: Tensor, batch: PagedBatch) -> None:
        rows, width = batch.block_tables_BM.shape
        tables, lens, slots = self._batch.block_tables_BM, self._batch.lens_B3, self._batch.slots_T
        for kept, given, padding in (
            (self._ids_T, ids_T, 0),
            (self._positions_T, positions_T, 0),
            (slots, batch.slots_T, self._dummy_block * batch.block_size),
            (lens[:, 2], torch.tensor(batch.context_lens, dtype=torch.int32), 1),
            (tables[:, :width], batch.block_tables_BM, self._dummy_block),
        ):
            kept[:rows].copy_(given, non_blocking=True)
            kept[rows:].fill_(padding)
