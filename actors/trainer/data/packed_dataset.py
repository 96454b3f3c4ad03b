"""Sequences of whole documents: rows of a packing plan, padded with end tokens, for training and for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.documents import Hashes, document_ends, document_hashes
from raytide.actors.trainer.data.order.shuffle import Ids, mix
from raytide.actors.trainer.data.packing import best_fit
from raytide.actors.trainer.data.token_dataset import Rows, TokenData
from raytide.core.errors import DataError

ALGORITHM = "best-fit 1"
"""Names the plan's algorithm in digests: another one gives other rows."""


class PackedData:
    """A RowData of best-fit rows over a token dataset.

    `held_out` is the share of documents kept from training, and `of_held_out` selects these in place of the others.
    """

    def __init__(self, data: TokenData, held_out: float = 0.0, *, of_held_out: bool = False) -> None:
        self._data, self.name, self.seq_len = data, data.name, data.seq_len
        ends = document_ends(data)
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        lengths = ends - starts
        if held_out:
            kept = is_held_out(document_hashes(data, ends), held_out) == of_held_out
            starts, lengths = starts[kept], lengths[kept]
        if not len(starts):
            what = f"keeps none of its {len(ends)} documents for {'evaluation' if of_held_out else 'training'}"
            raise DataError(f"{self.name} {what}.", hint="Use a larger dataset, or another eval.fraction.")
        self.plan = best_fit(starts, lengths, self.seq_len)
        self.n_sequences, self.n_tokens = self.plan.rows, self.plan.tokens
        parts = (data.digest, ALGORITHM, self.seq_len, held_out, of_held_out)
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self._data.vocab_size

    @property
    def eos_id(self) -> int:
        return self._data.eos_id

    @property
    def tokenizer_file(self) -> Path:
        return self._data.tokenizer_file

    @property
    def files(self) -> Mapping[str, Path]:
        return self._data.files

    @property
    def template(self) -> Mapping[str, Path]:
        return self._data.template

    def examples(self, ids: Ids) -> tuple[Ids, Ids]:
        return self.rows(ids).examples()

    def rows(self, ids: Ids) -> Rows:
        self._data.check()
        tokens = np.full((len(ids), self.seq_len + 1), self.eos_id, np.int64)
        learnt = np.zeros((len(ids), self.seq_len), np.bool_)
        documents = np.empty((len(ids), self.seq_len), np.int64)
        for row, index in enumerate(ids):
            starts, lengths = self.plan.pieces(int(index))
            at, documents[row] = 0, len(starts)
            for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                goes_on = length == self.seq_len and start + length < self._data.n_tokens
                piece = tokens[row, at : at + length + goes_on]
                self._data.read(start, piece)
                documents[row, at : at + length] = number
                learnt[row, at : at + length] = True
                if piece[length - 1] == self.eos_id or not goes_on:  # no target across the document's end
                    learnt[row, at + length - 1] = False
                at += length
        return Rows(tokens, learnt, documents)

    def prefetch(self, ids: Ids) -> None:
        pieces = [self.plan.pieces(int(index)) for index in ids]
        starts = np.concatenate([starts for starts, _ in pieces])
        self._data.prefetch_tokens(starts, starts + np.concatenate([lengths for _, lengths in pieces]))

    def attention_pairs(self, ids: Ids) -> Ids:
        return self.plan.attention_pairs(ids)


def is_held_out(hashes: Hashes, fraction: float) -> npt.NDArray[np.bool_]:
    """Returns which documents are held out. The same document is on one side in every dataset and build."""
    out: npt.NDArray[np.bool_] = mix(hashes) < np.uint64(int(fraction * 2**64))
    return out


def pairs_of(documents_BT: Ids) -> Ids:
    """Returns each row's sum of squared document lengths."""
    rows, length = documents_BT.shape
    counts = np.bincount((documents_BT + np.arange(rows)[:, None] * length).ravel(), minlength=rows * length)
    out: Ids = (counts.reshape(rows, length) ** 2).sum(axis=1)
    return out
