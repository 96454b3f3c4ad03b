"""Selects the sequences of each step.

The ids of a step are a pure function of (seed, step). A resumed or resized run reads the same stream as an
uninterrupted run. For that reason no state of the data is saved. Each rank takes its part of the step's ids.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The range in which sequences are shuffled: the whole dataset, or windows of `window` blocks.

    A block is `block` consecutive sequences. An epoch permutes the blocks, and then the sequences within each window of
    blocks. A step thus reads only the shards of one window. The sequences after the last full block come last.
    """

    block: int = 0
    window: int = 16

    def permute(self, index: Ids, size: int, key: str) -> Ids:
        """Returns the image of each index under a permutation of [0, size). `key` selects the permutation."""
        blocks = size // self.block if self.block else 0
        if blocks < 2:
            return feistel_permutation(index, size, key)
        whole, reach = blocks * self.block, self.window * self.block
        out = np.empty_like(index)
        tail = index >= whole
        out[tail] = whole + feistel_permutation(index[tail] - whole, size - whole, f"{key}/tail")
        for window in np.unique(index[~tail] // reach).tolist():
            here = ~tail & (index // reach == window)
            first = window * reach
            place = first + feistel_permutation(index[here] - first, min(reach, whole - first), f"{key}/{window}")
            block = feistel_permutation(place // self.block, blocks, f"{key}/blocks")
            out[here] = block * self.block + place % self.block
        return out


EVERYWHERE = Shuffle()
"""Shuffles over the whole dataset."""


class StepSampler(Protocol):
    """Selects the sequences of each step. The selection is the same on every rank."""

    def ids(self, step: int) -> Ids:
        """Returns the sequence ids of `step`, in order. The ids depend on the step alone."""


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """Shuffles all sequences anew in every epoch.

    The order is a keyed Feistel permutation. It takes no memory, however large the dataset is. Unlike a library's
    shuffle, it does not change between releases.
    """

    seed: int
    n_sequences: int
    global_batch: int
    shuffle: Shuffle = EVERYWHERE

    def ids(self, step: int) -> Ids:
        """Returns the sequence ids of `step`, in order. A batch may continue into the next epoch."""
        place = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs = place // self.n_sequences
        out = np.empty_like(place)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            places = place[in_epoch] % self.n_sequences
            out[in_epoch] = self.shuffle.permute(places, self.n_sequences, f"{self.seed}/{epoch}")
        return out


def rank_slice(count: int, rank: int, world: int) -> slice:
    """Returns a rank's contiguous slice of `count` items. The slices of all ranks are disjoint and cover all items.
    Their sizes differ by at most one.
    """
    return slice(count * rank // world, count * (rank + 1) // world)


def balanced_rows(costs: Ids, ranks: int) -> list[Ids]:
    """Returns the indices of each rank's items, ascending.

    Items are assigned in order of falling cost. An item goes to the rank with the smallest sum of costs among the ranks
    that have room. The sums are then nearly equal. A rank gets as many items as its `rank_slice` has.
    """
    room = [(each := rank_slice(len(costs), rank, ranks)).stop - each.start for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks) if room[rank]]
    for place in np.argsort(-costs, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        parts[rank].append(place)
        if len(parts[rank]) < room[rank]:
            heapq.heappush(heap, (total + int(costs[place]), rank))
    return [np.sort(np.asarray(part, np.int64)) for part in parts]


def feistel_permutation(index: Ids, size: int, key: str) -> Ids:
    """Returns the image of each index under the permutation of [0, size) that `key` selects.

    The permutation is a Feistel network over the next power of four. A result outside of [0, size) is permuted again
    until it lies inside.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    out = index.astype(np.uint64)
    todo = np.ones(out.shape, dtype=bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & mask)
        out[todo] = (left << np.uint64(half)) | right
        todo = out >= np.uint64(size)
    return out.astype(np.int64)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the splitmix64 finaliser's output for each value (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
