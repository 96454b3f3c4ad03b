"""Sequences made of whole documents, for training and evaluation. The rows of a packing plan are filled with documents
and padded with end tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytide.actors.trainer.data.order.shuffle import Ids, mix
from raytide.actors.trainer.data.packing import best_fit
from raytide.actors.trainer.data.token_dataset import Rows, TokenData
from raytide.core.errors import DataError
from raytide.core.io import token_dataset
from raytide.core.io.private_folder import lock, private_folder
from raytide.core.io.storage import full_disk_is_an_error

ALGORITHM = "best-fit 1"
"""Names the plan's algorithm in digests: another one gives other rows."""
Hashes = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]
CHUNK_TOKENS = 1 << 23
_POSITION = np.uint64(0x9E3779B97F4A7C15)
"""The multiplier of a token's place in its document, by which a hash depends on the order of tokens."""


class PackedData:
    """A RowData whose rows are documents of a token dataset, packed by best fit.

    `held_out` is the fraction of documents that are not used for training. With `of_held_out`, the rows contain only
    the held-out documents. Without it, they contain only the documents for training.
    """

    def __init__(self, data: TokenData, held_out: float = 0.0, *, of_held_out: bool = False) -> None:
        self._data, self.name, self.seq_len = data, data.name, data.seq_len
        self.vocab_size, self.eos_id = data.vocab_size, data.eos_id
        self.tokenizer_file, self.files, self.template = data.tokenizer_file, data.files, data.template
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
    """Returns a mask of the held-out documents. A document's hash alone decides whether it is held out. The same
    document is therefore held out in every dataset and build, or in none.
    """
    out: npt.NDArray[np.bool_] = mix(hashes) < np.uint64(int(fraction * 2**64))
    return out


def pairs_of(documents_BT: Ids) -> Ids:
    """Returns, for each row, the sum of the squared lengths of the row's documents."""
    rows, length = documents_BT.shape
    counts = np.bincount((documents_BT + np.arange(rows)[:, None] * length).ravel(), minlength=rows * length)
    out: Ids = (counts.reshape(rows, length) ** 2).sum(axis=1)
    return out


def document_ends(data: TokenData) -> Ids:
    """Returns the index of the token after each document. Tokens behind the last end token count as one more
    document.
    """

    def find() -> Ids:
        ends = token_dataset.document_ends(data.location, data.manifest)
        return ends if len(ends) and ends[-1] == data.n_tokens else np.append(ends, data.n_tokens)

    return _cached(f"{data.digest}-ends", find)


def document_hashes(data: TokenData, ends: Ids) -> Hashes:
    """Returns a 64-bit hash of each document's tokens. Documents with equal tokens have equal hashes, wherever they are
    in the dataset.
    """

    def find() -> Hashes:
        hashes = np.zeros(len(ends), np.uint64)
        for start, tokens in _chunks(data):
            stop = start + len(tokens)
            first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
            bounds = np.concatenate(([start], ends[first:last], [stop]))
            counts = np.diff(bounds)
            begins = np.concatenate(([0], ends))[first : last + 1]
            place = np.arange(start, stop) - np.repeat(begins, counts)
            mixed = mix(tokens.astype(np.uint64) + (place.astype(np.uint64) + np.uint64(1)) * _POSITION)
            hashes[first : last + 1] += np.add.reduceat(mixed, bounds[:-1] - start)
        return mix(hashes)

    return _cached(f"{data.digest}-hashes", find)


def _chunks(data: TokenData) -> Iterator[tuple[int, Ids]]:
    buffer = np.empty(min(CHUNK_TOKENS, max(1, data.n_tokens)), np.int64)
    for start in range(0, data.n_tokens, CHUNK_TOKENS):
        tokens = buffer[: min(CHUNK_TOKENS, data.n_tokens - start)]
        data.read(start, tokens)
        yield start, tokens


def _cached(name: str, find: Callable[[], Array]) -> Array:
    """Returns the array in the file `name` of this user's cache. If there is none, one process of the machine makes it
    with `find`: ends come from the dataset's index, hashes need one pass over the tokens.
    """
    file = private_folder("documents") / f"{name}.npy"
    if (array := _load(file)) is not None:
        return array
    with lock(file.with_suffix(".lock")):
        if (array := _load(file)) is None:
            array = find()
            part = file.with_suffix(".part")
            with full_disk_is_an_error(str(file)):
                try:
                    with open(part, "wb") as body:
                        np.save(body, array, allow_pickle=False)
                    os.replace(part, file)
                finally:
                    part.unlink(missing_ok=True)
    return array


def _load(file: Path) -> Array | None:
    try:
        array: Array = np.load(file, allow_pickle=False)
        return array
    except (OSError, ValueError, EOFError):  # none yet, or torn: it is made again
        return None
