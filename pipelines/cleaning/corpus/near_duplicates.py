"""Finds near-duplicates among documents by their MinHash signatures.

Two documents are a candidate pair if they have the same hash for at least one band. A candidate pair is verified by
the slots of the two signatures. Verified pairs form clusters. One document of each cluster is kept.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.pipelines.cleaning.corpus.minhash import Signatures

MOST_LEADERS = 64
"""The most documents of a bucket with which its other members are compared. It limits the cost of a bucket whose pairs
are mostly false candidates.
"""


@dataclass(frozen=True, slots=True)
class Clusters:
    """The clusters of near-duplicates among N documents. The documents are numbered in dataset order."""

    first: NDArray[np.int64]
    """The index of the first document of each document's cluster; a kept document's own index."""

    @property
    def keep(self) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = self.first == np.arange(len(self.first))
        return kept


class SignatureStore:
    """Collects signatures. Hashes of bands stay in memory, 8 bytes for each band of a document. Slots go to a temporary
    file.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._bands: list[NDArray[np.uint64]] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it

    def add(self, signatures: Signatures) -> int:
        """Appends the signatures of a part. Returns the part's number. The method `signatures` takes such numbers."""
        self._bands.append(signatures.bands)
        self._file.write(np.ascontiguousarray(signatures.slots, np.uint16).tobytes())
        return len(self._bands) - 1

    def close(self) -> None:
        self._file.close()

    def signatures(self, order: Sequence[int]) -> Signatures:
        """Returns the signatures of the parts with the numbers in `order`, in this order. The slots of the parts are
        read from the file only when they are used.
        """
        self._file.flush()
        bands = [self._bands[part] for part in order]
        sizes = [len(each) for each in self._bands]
        starts = np.cumsum([0, *sizes])
        if sum(sizes) == 0:
            return Signatures(np.zeros((0, self.slots), np.uint16), np.zeros((0, 1), np.uint64))
        rows = np.concatenate([np.arange(starts[part], starts[part] + sizes[part]) for part in order])
        slots = np.memmap(self._file, np.uint16, "r", shape=(int(starts[-1]), self.slots))
        return Signatures(slots, np.concatenate(bands), rows)


def slots_of(signatures: Signatures, documents: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Returns the MinHash slots of these documents, as an array [documents, slots]."""
    found: NDArray[np.uint16] = signatures.slots[documents if signatures.rows is None else signatures.rows[documents]]
    return found


def cluster(parts: Sequence[Signatures], min_similarity: float) -> Clusters:
    """Clusters all documents of `parts`, in order. Parts of earlier datasets must precede those of the dataset being
    built.
    """
    slots = _Slots(parts)
    least = _least_agreement(min_similarity, slots.count)
    edges = [np.zeros((0, 2), np.int64)]
    for band in range(min((part.bands.shape[1] for part in parts), default=0)):
        hashes = np.concatenate([part.bands[:, band] for part in parts])
        edges.append(_verified(hashes, slots, least))
    return Clusters(_first_of_each(np.concatenate(edges), sum(len(part.bands) for part in parts)))


def _least_agreement(min_similarity: float, slots: int) -> float:
    """Returns the least share of equal slots that makes a pair near-duplicates: two standard errors below
    `min_similarity`, so that few true pairs are lost.
    """
    return min_similarity - 2 * math.sqrt(min_similarity * (1 - min_similarity) / max(slots, 1))


def _verified(hashes: NDArray[np.uint64], slots: _Slots, least: float) -> NDArray[np.int64]:
    """Returns pairs (first, other) of one band's buckets that agree in enough slots.

    Each bucket's members are compared with its first member; those that differ from it form another bucket.
    """
    order = np.argsort(hashes, kind="stable")
    in_order = hashes[order]
    begins = np.concatenate([[True], in_order[1:] != in_order[:-1]]) if len(order) else np.zeros(0, np.bool_)
    bucket = np.cumsum(begins)
    found = []
    for _ in range(MOST_LEADERS):
        begins = np.concatenate([[True], bucket[1:] != bucket[:-1]]) if len(bucket) else np.zeros(0, np.bool_)
        shared = ~begins
        if not shared.any():
            break
        leaders = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        pairs = np.stack([leaders[shared], order[shared]], axis=1)
        is_near = slots.agreement(pairs) >= least
        found.append(pairs[is_near])
        order, bucket = order[shared][~is_near], bucket[shared][~is_near]
    return np.concatenate(found) if found else np.zeros((0, 2), np.int64)


def _first_of_each(edges: NDArray[np.int64], documents: int) -> NDArray[np.int64]:
    """Returns, for each document, the least index in its connected component."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first = np.arange(documents)
    nodes, ends = np.unique(edges, return_inverse=True)
    if len(nodes) == 0:
        return first
    ends = ends.reshape(-1, 2)
    graph = coo_array((np.ones(len(ends), np.bool_), (ends[:, 0], ends[:, 1])), shape=(len(nodes), len(nodes)))
    _, labels = connected_components(graph, directed=False)
    least = np.full(labels.max() + 1, documents)
    np.minimum.at(least, labels, nodes)
    first[nodes] = least[labels]
    return first


class _Slots:
    """The slots of several parts under one numbering."""

    BATCH = 1 << 14

    def __init__(self, parts: Sequence[Signatures]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *(len(part.bands) for part in parts)])
        self.count = parts[0].slots.shape[1] if parts else 0

    def agreement(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the share of equal slots of each pair."""
        shares = np.zeros(len(pairs))
        for start in range(0, len(pairs), self.BATCH):
            piece = pairs[start : start + self.BATCH]
            shares[start : start + self.BATCH] = (self._rows(piece[:, 0]) == self._rows(piece[:, 1])).mean(axis=1)
        return shares

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.uint16]:
        rows = np.zeros((len(indices), self.count), np.uint16)
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        for part in np.unique(owner):
            mine = owner == part
            rows[mine] = slots_of(self._parts[part], indices[mine] - self._starts[part])
        return rows
