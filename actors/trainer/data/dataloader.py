"""Loads a rank's part of each step's batch, one step ahead, and cuts it into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from raytide.actors.trainer.data.token_dataset import BatchSampler, Ids, TokenDataset, rank_slice
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.loss import IGNORE, Micro
from raytide.core.errors import DataError
from raytide.core.specs.train import TrainSpec

T = TypeVar("T")
_ANY: Ids = np.zeros(1, dtype=np.int64)
"""The sequence that pads a microbatch; its targets are ignored."""


class DataLoader:
    def __init__(self, data: TokenDataset, sampler: BatchSampler, group: ProcessGroup, spec: TrainSpec) -> None:
        self.device, self.layout = group.device, spec.layout
        self._one_shape = group.sizes.pipeline > 1
        self._most = math.ceil(spec.global_batch / group.sizes.data)
        vocab_size = data.vocab_size
        rank_rows = rank_slice(spec.global_batch, group.data_rank, group.sizes.data)

        def read(step: int) -> tuple[Ids, Ids, Ids]:
            ids = sampler.ids(step)[rank_rows]
            inputs, targets = data.examples(ids if len(ids) else _ANY)
            if (largest := max(int(inputs.max()), int(targets.max()))) >= vocab_size or int(inputs.min()) < 0:
                raise DataError(
                    f"{data.name} has the id {largest} in step {step + 1}, outside its vocabulary of {vocab_size}.",
                    hint="Build the dataset again with the model's tokenizer.",
                )
            return ids, inputs, targets

        self._rows = Prefetch(read, spec.steps)

    def next_batch(self, step: int, size: int) -> tuple[Ids, list[Micro], int]:
        """Returns this rank's sequence ids of a step, its microbatches of `size`, and the number of targets that count.

        All ranks return equally many microbatches, or their collectives would not match: a rank with fewer sequences is
        padded with ignored ones. In a pipeline all microbatches have the same shape.
        """
        ids, inputs, targets = self._rows.get(step)
        count, size = self.layout.microbatches(self._most, size)
        micros = []
        for start in range(0, count * size, size):
            present = max(0, min(size, len(ids) - start))
            row_count = size if self._one_shape else max(1, present)
            rows = np.minimum(np.arange(start, start + row_count), len(inputs) - 1)
            chunk, chunk_targets = inputs[rows], targets[rows]
            chunk_targets[present:] = IGNORE
            micros.append((self._put(chunk), self._put(chunk_targets)))
        return ids, micros, int((targets != IGNORE).sum()) if len(ids) else 0

    def _put(self, rows: Ids) -> Tensor:
        tensor = torch.from_numpy(rows)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class Prefetch(Generic[T]):
    """Runs `read(step)` on a thread, one step ahead. `read` must depend on the step alone."""

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self._read, self._last = read, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Returns the result of `read(step)`, or raises its error, and starts reading the next step."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == step else self._thread.submit(self._read, step)
        value = future.result()
        if step + 1 < self._last:
            self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return value

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
