"""Loads a rank's part of each step's batch, one step ahead, and cuts the part into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from raytide.actors.trainer.data.augment import Augmentation
from raytide.actors.trainer.data.order.shuffle import Ids, StepSampler, balanced_rows, rank_slice
from raytide.actors.trainer.data.packed_dataset import pairs_of
from raytide.actors.trainer.data.token_dataset import RowData, TokenDataset
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.loss import IGNORE, Micro
from raytide.core.errors import ConfigError, DataError
from raytide.core.specs.train import TrainSpec

T = TypeVar("T")
_ANY: Ids = np.zeros(1, dtype=np.int64)
"""The sequence that pads a microbatch; its targets are ignored."""


class RankBatch(NamedTuple):
    """A rank's part of a step's batch."""

    ids: Ids
    """The ids of its sequences."""
    micros: list[Micro]
    """The microbatches. All ranks have the same number of them, or their collectives would not match."""
    counted: int
    """The number of targets that count."""
    computed: int
    """The number of tokens that the targets need: those of prompts too, but not the padding at a sequence's end."""
    pairs: int
    """The sum of the squared lengths of the documents or, without document masks, of the sequences without padding."""


class _Read(NamedTuple):
    """The sequences of one step that a rank computes; one padding sequence if there are none."""

    ids: Ids
    inputs: Ids
    targets: Ids
    documents: Ids | None


class DataLoader:
    def __init__(
        self, data: TokenDataset, sampler: StepSampler, group: ProcessGroup, spec: TrainSpec, vocab_size: int
    ) -> None:
        """`vocab_size` is the model's, which may be smaller than that of its tokenizer."""
        self.device, self.layout = group.device, spec.layout
        self._one_shape = group.sizes.pipeline > 1
        self._most = math.ceil(spec.global_batch / group.sizes.data)
        self._data, self._sampler, self._spec = data, sampler, spec
        self._rank, self._ranks = group.data_rank, group.sizes.data
        self._augmentation = None if spec.augment is None else Augmentation(spec.augment, spec.seed)
        self._vocab_size = min(vocab_size, data.vocab_size)
        _check_tokens(spec, self._vocab_size)
        self._fetched = 0
        """The shards of all steps before this one are fetched, or being fetched."""
        self._rows = Prefetch(self._read, spec.steps)

    def next_batch(self, step: int, size: int) -> RankBatch:
        """Returns this rank's part of a step's batch, in microbatches of up to `size` sequences.

        A rank with fewer sequences than others gets padding, which the loss ignores. In a pipeline, all microbatches
        have the same shape.
        """
        read = self._rows.get(step)
        ids, inputs, targets, documents = read
        count, size = self.layout.microbatches(self._most, size)
        micros = []
        for start in range(0, count * size, size):
            present = max(0, min(size, len(ids) - start))
            row_count = size if self._one_shape else max(1, present)
            rows = np.minimum(np.arange(start, start + row_count), len(inputs) - 1)
            chunk, chunk_targets = inputs[rows], targets[rows]
            chunk_targets[present:] = IGNORE
            chunk_documents = None if documents is None else self._put(documents[rows])
            micros.append(Micro(self._put(chunk), self._put(chunk_targets), chunk_documents))
        if not len(ids):
            return RankBatch(ids, micros, 0, 0, 0)
        lengths = np.where(targets != IGNORE, np.arange(1, targets.shape[1] + 1), 0).max(axis=1)  # to the last target
        pairs = int((lengths**2 if documents is None else pairs_of(documents)).sum())
        return RankBatch(ids, micros, int((targets != IGNORE).sum()), int(lengths.sum()), pairs)

    def _read(self, step: int) -> _Read:
        ids = self._assigned(self._sampler.ids(step))
        data, wanted, documents = self._data, ids if len(ids) else _ANY, None
        self._fetch_ahead(step)
        if self._augmentation is None and not self._spec.masks_documents:
            inputs, targets = data.examples(wanted)
        else:
            rows = cast(RowData, data).rows(wanted)
            inputs, targets = rows.examples() if self._augmentation is None else self._augmentation(rows, step, wanted)
            documents = rows.documents if self._spec.masks_documents else None
        if (largest := max(int(inputs.max()), int(targets.max()))) >= self._vocab_size or int(inputs.min()) < 0:
            raise DataError(
                f"{data.name} has the id {largest} in step {step + 1}, outside its vocabulary of {self._vocab_size}.",
                hint="Build the dataset again with the model's tokenizer.",
            )
        return _Read(ids, inputs, targets, documents)

    def _fetch_ahead(self, step: int) -> None:
        """Starts fetching the shards of `step` and of the steps after it."""
        if self._spec.stream is not None:
            until = min(step + 1 + self._spec.stream.ahead, self._spec.steps)
            for later in range(max(step, min(self._fetched, until)), until):
                if len(ids := self._assigned(self._sampler.ids(later))):
                    cast(RowData, self._data).prefetch(ids)
            self._fetched = until

    def _assigned(self, ids: Ids) -> Ids:
        """Returns the sequences of a step that this rank computes."""
        if self._spec.masks_documents and self._ranks > 1:
            pairs = cast(RowData, self._data).attention_pairs(ids)
            if pairs is not None:
                return ids[balanced_rows(pairs, self._ranks)[self._rank]]
        return ids[rank_slice(len(ids), self._rank, self._ranks)]

    def _put(self, rows: Ids) -> Tensor:
        tensor = torch.from_numpy(rows)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class Prefetch(Generic[T]):
    """Runs `read(step)` on a thread, one step ahead. The result of `read` must depend on the step alone."""

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self._read, self._last = read, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Returns the result of `read(step)` or raises its error. Before the method returns, a background thread starts
        to read the next step.
        """
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == step else self._thread.submit(self._read, step)
        value = future.result()
        if step + 1 < self._last:
            self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return value

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_tokens(spec: TrainSpec, vocab_size: int) -> None:
    """Raises ConfigError if augmentation inserts a token that is not in the vocabulary."""
    wrong = [token for token in (spec.augment.tokens if spec.augment else ()) if token >= vocab_size]
    if wrong:
        raise ConfigError(
            f"{spec.name}: augment puts in the token {wrong[0]}, outside the vocabulary of {vocab_size}.",
            hint="Give ids of special tokens of the dataset's tokenizer.",
        )
