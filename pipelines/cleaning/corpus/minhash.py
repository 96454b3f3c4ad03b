"""MinHash signatures of documents, by fast similarity sketching (Dahlgaard, Knudsen and Thorup 2017, arXiv 1704.04370).

One hash assigns each n-gram to a slot, and a slot keeps the least hash value assigned to it. In a short document,
some slots get no n-gram. Such a slot has a hash function of its own, and keeps the least value of that function over
all n-grams. Each slot orders n-grams in the same way for every document. Therefore two documents of Jaccard
similarity J agree in a slot with probability J. The method is as good as one permutation per slot, but costs only
one hash per n-gram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.specs.cleaning import NearDuplicates
from raytide.pipelines.cleaning.corpus.hashing import hash_n_grams, mix

BATCH_IDS = 1 << 15
_EMPTY = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Signatures:
    """MinHash signatures of N documents: the slots [N, bands * rows], and a hash of each band [N, bands]."""

    slots: NDArray[np.uint16]
    """The low 16 bits of each slot, by which candidates are verified."""
    bands: NDArray[np.uint64]
    rows: NDArray[np.int64] | None = None
    """The row of `slots` that belongs to each document; None if the rows are in document order. `slots` may be in a
    file.
    """


def sign(ids: NDArray[np.uint64], lengths: NDArray[np.int64], spec: NearDuplicates) -> Signatures:
    """Returns the signatures of documents.

    `ids` are the hashed words (or tokens) of all documents. `lengths` has the number of ids of each document. All
    documents without ids have the same signature.
    """
    found = np.full((len(lengths), spec.bands * spec.rows), _EMPTY, np.uint32)
    ends = np.cumsum(lengths)
    # Batches whose arrays stay in the processor's cache are twice as fast.
    batches = np.unique(ends // BATCH_IDS, return_index=True)[1]
    for first, last in zip(batches, [*batches, len(lengths)][1:], strict=True):
        start = ends[first] - lengths[first]
        n_grams, counts = hash_n_grams(
            ids[start : ends[last - 1]].astype(np.uint64, copy=False), lengths[first:last], spec.n_gram
        )
        keyed = mix(n_grams ^ mix(np.full(1, spec.seed + 1, np.uint64)))
        _least(found[first:last], keyed, counts)
        _fill(found[first:last], keyed, counts)
    return Signatures(found.astype(np.uint16), _band_hashes(found, spec.bands))


def _least(found: NDArray[np.uint32], keyed: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
    """Writes into each slot [N, slots] its least value. The high half of a hash selects the slot, the low half is the
    value.
    """
    slots = found.shape[1]
    at = ((keyed >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)
    at += np.repeat(np.arange(len(counts), dtype=np.uint64) * np.uint64(slots), counts)
    np.minimum.at(found.reshape(-1), at.view(np.int64), keyed.astype(np.uint32))


def _fill(found: NDArray[np.uint32], keyed: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
    """Fills each empty slot of a document with the least value of the slot's own hash function over the document's
    n-grams.
    """
    ends = np.cumsum(counts)
    for i in np.flatnonzero((found == _EMPTY).any(axis=1) & (counts > 0)):
        empty = np.flatnonzero(found[i] == _EMPTY)
        own = keyed[ends[i] - counts[i] : ends[i], None]
        keys = mix((empty.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        found[i, empty] = (((own ^ keys) * (keys | np.uint64(1))) >> np.uint64(32)).min(axis=0).astype(np.uint32)


def _band_hashes(found: NDArray[np.uint32], bands: int) -> NDArray[np.uint64]:
    rows = found.reshape(len(found), bands, found.shape[1] // bands).astype(np.uint64)
    hashes = np.zeros(rows.shape[:2], np.uint64)
    for row in range(rows.shape[2]):
        hashes = mix(hashes + rows[:, :, row] + np.uint64(0x9E3779B97F4A7C15))
    return hashes
